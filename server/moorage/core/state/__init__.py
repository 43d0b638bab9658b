"""The allocator's state, and the facts with which `apply` changes it."""
