"""Studies: many runs with one budget, side by side."""
