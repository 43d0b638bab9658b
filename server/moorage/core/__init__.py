"""The allocator: a pure state machine. Events come in, facts stay, effects go out."""
