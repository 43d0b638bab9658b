"""The driver: the process that speaks to Ray for the daemon (`__main__`)."""
