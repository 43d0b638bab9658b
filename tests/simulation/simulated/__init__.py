"""A faulty world around the allocator, drawn from one seed, with laws for the allocator."""
