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
from moorage.storage.sqlite import (
    AGENTS_FILE,
    AUDIT_FOLDER,
    CATALOG_FILE,
    LEDGER_FILE,
    SECRET_FILE,
    TOKENS_FILE,
)

EXIT_USAGE = 2
_SERVER_FILES = (LEDGER_FILE, CATALOG_FILE, TOKENS_FILE, AGENTS_FILE, SECRET_FILE, AUDIT_FOLDER)


def load_config(flags: Mapping[str, object], file: Path | None) -> Config:
    """Return the settings; if they are invalid, end the command with a message."""
    try:
        return Config.load(flags, os.environ, file)
    except ConfigError as error:
        fail(error, EXIT_USAGE)


def load_local_config(data: Path | None, file: Path | None) -> Config:
    """Return the settings, without the check that other addresses than loopback need tokens."""
    return load_config({"data_dir": data, "host": "127.0.0.1", "http_host": "127.0.0.1"}, file)


def fail(reason: object, code: int = 1) -> NoReturn:
    """End the command with a message on stderr."""
    typer.echo(f"moored: {reason}", err=True)
    raise typer.Exit(code)


@contextlib.contextmanager
def fail_on(*kinds: type[Exception]) -> Iterator[None]:
    """End the command with a message about an error of one of these kinds."""
    try:
        yield
    except kinds as error:
        fail(reason_of(error))


def refuse_option(option: str, expected: str) -> NoReturn:
    """End the command with a message about a wrong option."""
    fail(f"{option}: expected {expected}", EXIT_USAGE)


def refuse_no_server(settings: Config) -> None:
    """End the command if the data folder has no file of a server, and the data is in no database.

    An answer about such a folder would be about the wrong folder.
    """
    if settings.storage or any((settings.data_dir / each).exists() for each in _SERVER_FILES):
        return
    fail(f"{settings.data_dir} is not a data folder of a server: name it with --data", EXIT_USAGE)


def refuse_root(folder: Path) -> None:
    """End the command if root runs it in the data folder of another user.

    The server could not read or append to files that belong to root.
    """
    if os.geteuid() == 0 and folder.is_dir() and _owner(folder) != 0:
        _refuse_user(folder, "")


def refuse_root_beside_server(folder: Path) -> None:
    """End the command if root runs it in a data folder where another user's server made files.

    A container may run as root in a new folder that belongs to another user of its host.
    """
    if os.geteuid() == 0 and is_of_another_than_root(folder):
        _refuse_user(folder, "")


def is_of_another_than_root(folder: Path) -> bool:
    """Return whether a server of another user than root made files in a data folder."""
    made = folder / CATALOG_FILE
    return made.exists() and made.stat().st_uid != 0


def name_user(number: int) -> str:
    """Return the name of a user, or `#NUMBER` if this machine does not know the user."""
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"#{number}"


def refuse_stranger(folder: Path) -> None:
    """End the command if its user may not read and write in a data folder that exists."""
    needed = os.R_OK | os.W_OK | os.X_OK
    seen = next(each for each in (folder, *folder.parents) if os.access(each, os.F_OK))
    if seen != folder:  # The folder is missing, or this user may not look for it.
        allowed = os.access(seen, os.X_OK)
    else:
        made = folder / CATALOG_FILE
        allowed = os.access(seen, needed) and (
            not made.exists() or os.access(made, os.R_OK | os.W_OK)
        )
    if not allowed and os.geteuid() not in {0, _owner(seen), seen.stat().st_uid}:
        _refuse_user(seen, ", and hides its ledger, tokens, audit log and server from this one")


def _owner(folder: Path) -> int:
    """Return the id of the server's user: the owner of a file that the server made."""
    made = folder / CATALOG_FILE
    return (made if os.access(made, os.F_OK) else folder).stat().st_uid


def _refuse_user(folder: Path, hides: str) -> NoReturn:
    command = shlex.join(["sudo", "-u", name_user(_owner(folder)), "moored", *sys.argv[1:]])
    fail(
        f"{folder} belongs to another user{hides}: run this command as the server's user, such as "
        f"`{command}`",
        EXIT_USAGE,
    )


@contextlib.contextmanager
def command_errors() -> Iterator[None]:
    """Turn an error in the block into one line on stderr and an exit code."""
    from httpx import HTTPError  # noqa: PLC0415  # `--help` stays quick.
    from websockets.exceptions import WebSocketException  # noqa: PLC0415  # As in serve.

    from moorage.lab.errors import CommandError  # noqa: PLC0415  # As in serve.
    from moorage.lab.trace import TraceError  # noqa: PLC0415  # As in serve.

    # A user who stops a command also stops its daemon, which then cleans up.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    with fail_on(CommandError, TraceError, OSError, HTTPError, WebSocketException):
        yield
