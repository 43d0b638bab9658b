"""The catalog in a database of the server, used if no external service is configured."""
