"""Clients of a Moorage server."""
