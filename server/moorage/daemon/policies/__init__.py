"""Where policies are found, consulted and executed."""
