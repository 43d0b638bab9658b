"""The daemon: runs the commit loop, and joins the packages."""
