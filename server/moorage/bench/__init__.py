"""`moored bench` and `moored replay`: load tests of a real daemon, one file per figure."""
