"""Runs workloads of leases in Kubernetes clusters, as pods and other objects."""
