"""What keeps a command from running, as one line on stderr and an exit code. Commands use it."""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import typer

from moorage.config.settings import Config, ConfigError
from moorage.launch import reason_of

EXIT_USAGE = 2


def load_config(flags: dict[str, Any], file: Path | None) -> Config:
    """Return the settings, or end the command with what is wrong with them."""
    try:
        return Config.load(flags, os.environ, file)
    except ConfigError as error:
        typer.echo(f"moored: {error}", err=True)
        raise typer.Exit(EXIT_USAGE) from None


def refuse_option(option: str, expected: str) -> NoReturn:
    """End the command, since an option is wrong."""
    typer.echo(f"moored: {option}: expected {expected}", err=True)
    raise typer.Exit(EXIT_USAGE)


@contextlib.contextmanager
def command_errors() -> Iterator[None]:
    """Turn what keeps a command from running into one line and an exit code."""
    from httpx import HTTPError  # noqa: PLC0415  # `--help` stays quick.
    from websockets.exceptions import WebSocketException  # noqa: PLC0415  # As in serve.

    from moorage.lab.errors import CommandError  # noqa: PLC0415  # As in serve.
    from moorage.lab.trace import TraceError  # noqa: PLC0415  # As in serve.

    # A user who stops a command stops its daemon too, and lets it clean up.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    except (CommandError, TraceError, OSError, HTTPError, WebSocketException) as error:
        typer.echo(f"moored: {reason_of(error)}", err=True)
        raise typer.Exit(1) from None
