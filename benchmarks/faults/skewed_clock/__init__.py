"""A folder for PYTHONPATH, of servers whose clock is set."""
