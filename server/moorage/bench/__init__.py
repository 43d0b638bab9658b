"""`moored bench` and `moored replay`: a real daemon under load, a file for each figure."""
