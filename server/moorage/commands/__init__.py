"""The commands of `moored`, one file for each."""
