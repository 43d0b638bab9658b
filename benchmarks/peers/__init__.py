"""Compares Moorage with its peers on one machine, by one protocol: `python -m benchmarks.peers`."""
