"""Where rules run: host, zygote, jail and cell."""
