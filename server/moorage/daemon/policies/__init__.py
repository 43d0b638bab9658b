"""Finds, consults and executes policies, and stores their contexts."""
