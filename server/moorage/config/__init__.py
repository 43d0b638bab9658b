"""Settings: from flags, the environment, a TOML file, or their defaults."""
