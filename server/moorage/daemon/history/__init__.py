"""Decisions and fleets of the past, read from the ledger."""
