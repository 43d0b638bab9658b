"""Measures Moorage and other schedulers: `python -m benchmarks NAME…`, in a checkout."""
