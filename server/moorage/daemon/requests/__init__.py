"""Turns messages into events of the core, and the core's answers into replies."""
