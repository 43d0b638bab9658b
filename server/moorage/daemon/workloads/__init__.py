"""Orders backends to run the workloads of leases, and serves the owners' calls to workloads."""
