"""Backends, which start workloads: one Protocol for all (`base`), and the kinds of backends."""
