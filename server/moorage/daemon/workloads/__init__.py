"""What the daemon does at the backends for leases, and for their owners."""
