"""Workloads of leases in a Kubernetes cluster: objects made, followed, read and ended."""
