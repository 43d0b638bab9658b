"""Two servers on one PostgreSQL under faults, and what clients saw of it held against the laws."""
