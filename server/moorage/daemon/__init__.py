"""The daemon: runs the commit loop, and connects the other packages to it."""
