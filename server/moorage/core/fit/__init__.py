"""Decides whether a demand fits now, later or ever, beside the reservations of others."""
