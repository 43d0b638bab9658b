"""A folder for PYTHONPATH that shifts the calendar of servers."""
