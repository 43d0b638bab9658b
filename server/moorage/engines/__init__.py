"""What starts a lease's workload where it was placed."""
