"""Checks, registers, activates and observes versions of policies."""
