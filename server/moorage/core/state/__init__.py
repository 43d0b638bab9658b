"""The state, and the facts that change it. `apply` is the only mutation."""
