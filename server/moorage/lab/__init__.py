"""Test and backtest policies without a server, with the production core."""
