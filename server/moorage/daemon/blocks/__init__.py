"""Block-level requests: on which cluster, and which node of it, a block should run."""
