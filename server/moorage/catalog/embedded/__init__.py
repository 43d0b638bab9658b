"""The catalog in one SQLite file: what is used where no external service is configured."""
