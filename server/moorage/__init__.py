"""Moorage: decides which cluster, node and GPUs run a workload, and holds them as a lease."""
