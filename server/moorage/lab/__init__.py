"""Policies without a server: tests, backtests and pictures, on the production core."""
