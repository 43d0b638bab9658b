"""A faulty world around the allocator, drawn from one seed, and the laws that it must obey."""
