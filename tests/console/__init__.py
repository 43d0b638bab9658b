"""Tests of the console; those that run one after the other share a browser."""
