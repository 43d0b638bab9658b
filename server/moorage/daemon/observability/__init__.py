"""The metrics of `/metrics`: counters, gauges and histograms; also logs, traces and health."""
