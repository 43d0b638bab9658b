"""Machines other than the server's own: each runs an agent, and belongs to the backend `local`."""
