"""Answers about the state, and estimates of when a waiter has its turn."""
