"""A client played against a real daemon: demo, replay, bench, doctor."""
