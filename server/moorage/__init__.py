"""Moorage: decides which cluster, node and GPUs run a workload, and stands by the answer."""
