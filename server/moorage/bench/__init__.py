"""Load tests of a real daemon, for `moored bench` and `moored replay`."""
