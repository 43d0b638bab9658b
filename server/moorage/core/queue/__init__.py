"""The queue: the waiters, their order, and the nodes that a request may not use."""
