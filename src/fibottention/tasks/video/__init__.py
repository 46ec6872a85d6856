"""Action recognition from video."""
