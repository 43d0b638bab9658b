"""What `moored` does, a file for each command."""
