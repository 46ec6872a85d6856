"""Stand-ins for libraries that old code imports."""
