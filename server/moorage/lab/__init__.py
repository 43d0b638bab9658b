"""Tests and backtests policies without a server, with the production core."""
