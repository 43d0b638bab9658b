"""Tests of the console; successive tests share a browser."""
