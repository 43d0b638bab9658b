"""Runs two servers on one PostgreSQL, plays faults, and checks the answers that clients got."""
