"""The daemon's side of the sandbox. The daemon enters by `sandbox`."""
