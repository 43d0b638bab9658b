"""What leases start in a Kubernetes cluster: objects made, followed, read and ended."""
