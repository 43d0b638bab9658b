"""What goes into a turn of the core and what comes out of it."""
