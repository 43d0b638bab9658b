"""This machine as a backend: processes and services under a supervisor each, and containers."""
