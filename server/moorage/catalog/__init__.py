"""Stores and serves cluster documents, metrics and policies, which the core does not own."""
