"""A folder for PYTHONPATH whose `sitecustomize` shifts the calendar clock of servers."""
