"""Backends start workloads: one Protocol for all of them (`base`), and one package per kind."""
