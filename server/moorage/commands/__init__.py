"""The commands of `moored`, a file for each."""
