"""Benchmarks of Moorage and other schedulers: run `python -m benchmarks NAME…` in a checkout."""
