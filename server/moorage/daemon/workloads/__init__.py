"""Orders backends to run the workloads of leases, and gives owners access to their workloads."""
