"""Orders to the backends for leases, and calls of their owners."""
