"""Agents on other machines: their tokens and keys, how they join, and when they are lost."""
