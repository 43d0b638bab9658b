"""Answers questions about the state, and estimates when waiters are served."""
