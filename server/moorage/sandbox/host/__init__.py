"""The daemon's side of the sandbox. The daemon uses it through `sandbox`."""
