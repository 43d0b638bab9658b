"""The messages between host and cells, and every bound of the sandbox."""
