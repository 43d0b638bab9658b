"""Machines beside the server's own: each has an agent, and is part of the backend `local`."""
