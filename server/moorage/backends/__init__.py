"""What starts workloads: one Protocol for all backends (`base`), and the kinds of backends."""
