"""What fits where, now, later and ever; and the reservations that it must leave room for."""
