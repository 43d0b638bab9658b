"""The `moorage` command: `moorage_client.cli:main` is its entry point.

Imports of the commands, of the clients and of rich wait until they are needed, so that help and
shell completion are quick.
"""

import io
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and end the process with one of `exits.Exit`.

    Args:
        arguments: Without the program's name; default: those of the process.

    """
    from moorage_client.cli.program import run  # noqa: PLC0415  # See the module docstring.

    # The command line words every failure itself; the library's log would say it twice.
    logging.getLogger("websockets").addHandler(logging.NullHandler())
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # Closed by our parent process; what is written goes nowhere.
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115  # For good.
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # Whatever the terminal can show.
    code = run(sys.argv[1:] if arguments is None else arguments)
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        # Our reader has seen enough, which is no failure. The rest goes nowhere; otherwise
        # the interpreter flushes it once more as it ends, and complains.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    raise SystemExit(int(code))
