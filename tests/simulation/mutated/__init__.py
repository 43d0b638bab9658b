"""Mutants of the core: one function each, changed through its syntax tree, played in place."""
