"""Input and output of a turn of the core."""
