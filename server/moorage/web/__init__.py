"""The HTTP front door: the documented service APIs, health and metrics."""
