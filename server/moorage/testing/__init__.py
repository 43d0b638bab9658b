"""A real server for tests."""
