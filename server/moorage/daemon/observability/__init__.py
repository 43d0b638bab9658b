"""The metrics of `/metrics`: counters and gauges."""
