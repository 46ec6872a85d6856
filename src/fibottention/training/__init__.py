"""The training engine shared by all tasks."""
