"""Cluster documents, metrics and policies: the world outside the core."""
