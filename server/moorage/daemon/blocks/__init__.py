"""Block-level requests: advice about a cluster and a node for a whole block."""
