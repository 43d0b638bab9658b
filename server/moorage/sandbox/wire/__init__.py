"""The messages between the host process and its cells, and all limits of the sandbox."""
