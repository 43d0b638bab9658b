"""What host and cells say to each other, and every bound of the sandbox."""
