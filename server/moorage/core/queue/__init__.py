"""Who waits, in which order, and what a request may have beside the others."""
