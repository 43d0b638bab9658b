"""What is remembered of external services, and how they are read."""
