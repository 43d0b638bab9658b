"""Feasibility now, later and ever; and the reservations that leases must leave room for."""
