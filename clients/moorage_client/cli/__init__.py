"""The `moorage` command: `moorage_client.cli:main` is its entry point.

Imports of the commands, of the clients and of rich wait until they are needed, so that help and
shell completion are quick.
"""

from moorage.launch import run_program

__all__ = ["main"]


def main() -> None:
    """Run the command line and end the process with one of `exits.Exit`."""
    run_program("moorage", "moorage_client.cli.program")
