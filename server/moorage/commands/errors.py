"""Errors that stop a command, as one line on stderr and an exit code."""

import contextlib
import os
import pwd
import shlex
import signal
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NoReturn

import typer

from moorage.config.settings import Config, ConfigError
from moorage.launch import reason_of

EXIT_USAGE = 2


def load_config(flags: Mapping[str, object], file: Path | None) -> Config:
    """Return the settings; if they are invalid, end the command with a message."""
    try:
        return Config.load(flags, os.environ, file)
    except ConfigError as error:
        typer.echo(f"moored: {error}", err=True)
        raise typer.Exit(EXIT_USAGE) from None


def refuse_option(option: str, expected: str) -> NoReturn:
    """End the command with a message about a wrong option."""
    typer.echo(f"moored: {option}: expected {expected}", err=True)
    raise typer.Exit(EXIT_USAGE)


def refuse_root(folder: Path) -> None:
    """End the command if root runs it in the data folder of another user.

    The server could not read or append to files there that belong to root.
    """
    if os.geteuid() != 0 or not folder.is_dir():
        return
    made = folder / "catalog.db"
    owner = (made if made.exists() else folder).stat().st_uid
    if owner == 0:
        return
    try:
        name = pwd.getpwuid(owner).pw_name
    except KeyError:
        name = f"#{owner}"
    typer.echo(
        f"moored: {folder} belongs to another user: run this command as the server's user, such "
        f"as `sudo -u {name} {' '.join(map(shlex.quote, ['moored', *sys.argv[1:]]))}`",
        err=True,
    )
    raise typer.Exit(EXIT_USAGE)


@contextlib.contextmanager
def command_errors() -> Iterator[None]:
    """Turn errors that stop a command into one line and an exit code."""
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
