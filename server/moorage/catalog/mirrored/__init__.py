"""Keeps copies of external services' documents in memory, and reads them over HTTP."""
