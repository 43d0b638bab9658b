"""What keeps a command from running: one line for its user, and exit code 1."""


class CommandError(Exception):
    """The command could not be played."""
