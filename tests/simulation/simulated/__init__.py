"""A faulty world for the allocator to live in, all of it drawn from one seed, and its laws."""
