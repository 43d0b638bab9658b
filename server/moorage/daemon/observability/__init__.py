"""What `/metrics` shows: counters and gauges."""
