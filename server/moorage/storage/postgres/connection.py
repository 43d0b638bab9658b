"""Opens connections to PostgreSQL, with session settings, and converts their errors."""

import contextlib
import os
import re
import socket
from collections.abc import Iterator
from typing import Any, Final, TypeAlias

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from moorage.storage.base import SqlRow, StorageError, StorageFailed

Connection: TypeAlias = "psycopg.Connection[SqlRow]"
CONNECT_SECONDS_MAX: Final = 10
_KEEPALIVE: Final = {
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 15_000,
}
_SESSION: Final = """
SET search_path = moorage;
SET default_transaction_isolation = 'read committed';
SET client_connection_check_interval = '200ms';
SET idle_in_transaction_session_timeout = '10s';
SET lock_timeout = '10s';
SET statement_timeout = 0;
SET idle_session_timeout = 0;
SET client_min_messages = 'warning';
SET tcp_keepalives_idle = 5; SET tcp_keepalives_interval = 2; SET tcp_keepalives_count = 3;
SET tcp_user_timeout = '15s'
"""
"""Settings of each session, with which PostgreSQL soon ends sessions of clients that are gone.

The end of a session frees its locks. The settings override those of the role, which could end the
idle session with the lock, or hide the warning that a commit may be lost.
"""


def place_of(address: str) -> str:
    """Return the name of a database for messages, without a password.

    Raises:
        StorageError: The text is not the address of a database.
    """
    parts = _parts(address)
    host = parts.get("host") or parts.get("hostaddr") or os.environ.get("PGHOST", "its socket")
    port = parts.get("port") or os.environ.get("PGPORT", "5432")
    user = parts.get("user") or os.environ.get("PGUSER", "")
    name = parts.get("dbname") or os.environ.get("PGDATABASE", user)
    return f"the database {name or 'of this user'} at {host}, port {port},"


def _parts(address: str) -> dict[str, Any]:
    authority, _, rest = address.partition("://")[2].partition("/")
    try:
        parts: dict[str, Any] = conninfo_to_dict(address)
        # Unless escaped, `@` or `/` ends a password early, and the rest counts as host or database.
        readable = authority.count("@") < 2 and "@" not in rest  # noqa: PLR2004  # One ends it.
        if readable and re.fullmatch("[0-9,]*", str(parts.get("port", ""))):
            return parts
    except psycopg.Error:  # The error's text repeats the address, which may contain a password.
        pass
    raise StorageError(
        "storage: expected postgresql://USER@HOST:PORT/DATABASE, as libpq takes it, with %40 for @ "
        "and %2F for / in user or password (the value is not shown: a password may be in it)"
    )


def has_password(address: str) -> bool:
    """Return whether a database address contains a password.

    Raises:
        StorageError: The text is not the address of a database.
    """
    return any("password" in name for name in _parts(address))


def without_password(address: str) -> str:
    """Return a database address for PostgreSQL's own programs, without its passwords.

    Raises:
        StorageError: The text is not the address of a database.
    """
    parts = _parts(address)
    return make_conninfo("", **{name: parts[name] for name in parts if "password" not in name})


def name_of(purpose: str) -> str:
    """Return the application name that the database shows for a session of this process."""
    return f"moored {purpose} {socket.gethostname()} {os.getpid()}"[:63]


def connect(address: str, purpose: str) -> Connection:
    """Open a session with the database.

    Raises:
        StorageFailed: The database does not answer, or does not let this user in.
        StorageError: The database is too old, or behind a pooler.
    """
    place = place_of(address)
    options: dict[str, Any] = {
        **_KEEPALIVE,
        "application_name": name_of(purpose),
        "client_encoding": "utf8",
    }
    if "connect_timeout" not in conninfo_to_dict(address):
        options["connect_timeout"] = CONNECT_SECONDS_MAX
    try:
        connection: Connection = psycopg.connect(address, autocommit=True, **options)
    except psycopg.Error as error:
        raise StorageFailed(
            f"{place} cannot be reached: {_words(error)}. Check `storage` (MOORAGE_STORAGE), that "
            "the database runs, and that it lets this user in."
        ) from error
    try:
        connection.execute(_SESSION)
    except psycopg.Error as error:
        connection.close()
        raise StorageError(
            f"{place} cannot be used: {_words(error)}. Moorage needs PostgreSQL 14 or newer, "
            "without a pooler in between."
        ) from error
    return connection


@contextlib.contextmanager
def translate_errors(place: str) -> Iterator[None]:
    """Convert errors of PostgreSQL into this package's errors.

    Raises:
        StorageFailed: The database refused a statement, or the connection broke.
    """
    try:
        yield
    except psycopg.Error as error:
        raise storage_error(place, error) from error


def storage_error(place: str, error: psycopg.Error) -> StorageFailed:
    """Convert one error of PostgreSQL into this package's error."""
    return StorageFailed(
        f"{place} failed: {_words(error)}. Make sure that the database runs and has free space, "
        "then start again: acknowledged changes are safe."
    )


def _words(error: psycopg.Error) -> str:
    return " ".join(str(error).split()).rstrip(".?") or type(error).__name__
