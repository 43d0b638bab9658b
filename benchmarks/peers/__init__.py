"""Peers of Moorage on one machine, by one protocol: `python -m benchmarks.peers`."""
