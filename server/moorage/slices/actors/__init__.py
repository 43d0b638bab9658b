"""The actors of a pool on the cluster: one for each slice, one for each of its hosts."""
