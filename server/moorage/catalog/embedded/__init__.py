"""The catalog in the server's own database, for parts without an external service."""
