"""Reads, checks and compares documents of clusters, metrics and policies; stores none."""
