"""Block-level requests: advise on a cluster and a node for a whole block."""
