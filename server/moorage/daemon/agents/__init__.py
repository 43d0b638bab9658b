"""Agents of other machines: their tokens and keys, how they are let in, and when they are lost."""
