"""The queue: its waiters, their order, and the limits that other requests set to one of them."""
