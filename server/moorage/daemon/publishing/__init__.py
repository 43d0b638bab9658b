"""Versions of policies: checks, registration, activation and observation."""
