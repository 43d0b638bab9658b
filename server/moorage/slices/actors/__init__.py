"""What runs on the cluster for a pool: an actor for each slice, one for each of its hosts."""
