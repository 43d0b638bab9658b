"""What is true now, and the facts that make it so. `apply` is the only mutation."""
