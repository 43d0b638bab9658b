"""Mutants of the core: each changes one function through its syntax tree, while it is tested."""
