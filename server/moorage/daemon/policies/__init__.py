"""Finds, consults and executes policies."""
