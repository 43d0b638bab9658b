"""Cluster documents, metrics and policies: what is known of the world outside the core."""
