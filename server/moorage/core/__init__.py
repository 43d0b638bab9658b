"""The allocator: a state machine without I/O that takes events and returns facts and effects."""
