"""Copies of external services' documents, and the requests that read them."""
