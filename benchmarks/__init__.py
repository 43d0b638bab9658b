"""What measures Moorage, or others on its requests: `python -m benchmarks NAME…`, in a checkout."""
