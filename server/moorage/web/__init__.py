"""The HTTP server: the documented service APIs, health and metrics."""
