"""Tests of the console, which share one browser."""
