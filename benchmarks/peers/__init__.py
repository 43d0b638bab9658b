"""Compares Moorage with other programs that book GPUs (peers): `python -m benchmarks.peers`."""
