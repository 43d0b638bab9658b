"""Jobs: their resources, runs, repeated runs, and results."""
