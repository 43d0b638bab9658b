"""A SQLite file that commands write while a server reads it: `tokens` and `agents` are such files.

The server sees a change at once, since it reads the database's version before each use of its rows
(https://sqlite.org/pragma.html#pragma_data_version).
"""

import contextlib
import errno
import os
import sqlite3
import threading
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import ClassVar, Final

from moorage.storage.base import StorageError, TokenRow, diff_rows
from moorage.storage.sqlite import TOKENS_MARK
from moorage.storage.sqlite.files import OWNER_ONLY, check_files, connect_to_look
from moorage.storage.sqlite.marks import DurableMark, read_mark
from moorage.storage.statements import read_statements

_FORMAT: Final = 1
_BUSY_SECONDS: Final = 10.0
_LABEL: Final = "tokens"
"""Name of the tokens in their mark."""
_DAMAGED: Final = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_REMEDY: Final = "; put back a copy of this file, or move it away and make its entries again"
TOKENS_SQL: Final = read_statements(Path(__file__).with_name("tokens.sql"))
LOGINS_SQL: Final = read_statements(Path(__file__).with_name("logins.sql"))
AGENTS_SQL: Final = read_statements(Path(__file__).with_name("agents.sql"))


class SharedFile:
    """The common part of `storage.base.TokenRows` and others: one file, used from several threads.

    The first change creates the file.

    Args:
        path: The file.
        looks: Whether the file is only read, and nothing beside it is made.
    """

    schema: ClassVar[str]
    """SQL statement that creates the table."""

    def __init__(self, path: Path, *, looks: bool = False) -> None:
        self._path = path
        self._looks = looks
        self._connection: sqlite3.Connection | None = None
        self._opened: os.stat_result | None = None
        self._changes = 0
        self._guard = threading.RLock()

    @property
    def place(self) -> str:
        return str(self._path)

    def version(self) -> tuple[int, int] | None:
        if self._connection is None and not self._path.exists():
            return None
        with self.connection() as connection:
            (version,) = connection.execute("PRAGMA data_version").fetchone()
        return version, self._changes  # The version changes only with writes by other connections.

    def close(self) -> None:
        with self._guard:
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    @contextlib.contextmanager
    def connection(self) -> Iterator[sqlite3.Connection]:
        """Yield the connection, for exclusive use.

        Raises:
            StorageError: The file cannot be read or written, or was deleted.
        """
        try:
            with self._guard:
                if self._connection is not None and self._is_replaced():
                    self.close()
                    self._changes += 1  # A new connection's version may equal the old one's.
                if self._connection is None:
                    self._connection = self._open()
                yield self._connection
        except (sqlite3.Error, OSError) as error:
            is_damaged = (getattr(error, "sqlite_errorcode", 0) & 0xFF) in _DAMAGED
            remedy = _REMEDY if is_damaged else ""
            raise StorageError(f"{self.place}: {error}{remedy}") from error

    @contextlib.contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Yield the connection in a write transaction.

        Raises:
            StorageError: The file cannot be read or written, or was deleted; nothing was changed.
        """
        with self.connection() as connection, connection:
            connection.execute("BEGIN IMMEDIATE")
            self._changes += 1
            yield connection

    def _is_replaced(self) -> bool:
        """Return whether the path now leads to another file than the open one."""
        return self._opened is not None and not os.path.samestat(self._opened, self._path.stat())

    def _open(self) -> sqlite3.Connection:
        check_files(self._path)
        connection = self._connect_to_look() if self._looks else self._connect()
        try:
            self._prepare(connection)
        except sqlite3.Error:
            connection.close()
            raise
        return connection

    def _connect_to_look(self) -> sqlite3.Connection:
        """Open the file; a file without tables is read as an empty one, as a start makes it."""
        self._opened = self._path.stat()
        connection = connect_to_look(self._path)
        try:
            (version,) = connection.execute("PRAGMA user_version").fetchone()
        except sqlite3.Error:
            connection.close()
            raise
        if version:
            return connection
        connection.close()
        return sqlite3.connect(":memory:", isolation_level=None)

    def _connect(self) -> sqlite3.Connection:
        # SQLite would let other users read a file that it creates.
        try:
            descriptor = os.open(self._path, os.O_CREAT | os.O_RDWR, OWNER_ONLY)
        except OSError as error:
            if error.errno != errno.EROFS:
                raise
            descriptor = os.open(self._path, os.O_RDONLY)  # SQLite can read it, too.
        self._opened = os.fstat(descriptor)
        os.close(descriptor)
        return sqlite3.connect(
            self._path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False
        )

    def _prepare(self, connection: sqlite3.Connection) -> None:
        """Create the table if it is missing; refuse the file of a newer release."""
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version > _FORMAT:
            reason = f"format {version} is of a newer release; this release reads up to {_FORMAT}"
            raise sqlite3.DatabaseError(reason)
        connection.execute("PRAGMA synchronous = FULL")
        if not version:
            connection.execute(self.schema)
            connection.execute(f"PRAGMA user_version = {_FORMAT}")


def tokens_mark(path: Path) -> Path:
    """Return the path of the mark that exists as soon as a file of tokens has a token."""
    return path.with_name(TOKENS_MARK)


def remember_tokens(path: Path) -> None:
    """Make the mark of a file of tokens, if it is missing.

    Raises:
        OSError: The mark cannot be written.
    """
    mark = tokens_mark(path)
    if not mark.exists():
        DurableMark(mark, _LABEL, 1, 0, read_mark(mark, _LABEL).writes).close()


def lost_tokens(path: Path) -> str:
    """Return the error for a file that has no tokens, though its mark says that it had some."""
    return (
        f"{path} is missing or has no tokens, and had some before: put back a copy of this file; "
        "or make a token with `moored token create`, and the old tokens stay invalid"
    )


class SqliteTokens(SharedFile):
    """The named tokens in a file; implements `storage.base.TokenRows`.

    Tokens are never deleted. A mark beside the file says that there were some, so that a lost or
    empty file does not open the server to everyone.
    """

    schema = TOKENS_SQL["schema"]

    def __init__(self, path: Path, *, looks: bool = False) -> None:
        super().__init__(path, looks=looks)
        self._checked: tuple[int, int] | None = None

    def version(self) -> tuple[int, int] | None:
        found = super().version()
        if found is None or found != self._checked:
            self._check_mark(found)
            self._checked = found
        return found

    def _check_mark(self, version: tuple[int, int] | None) -> None:
        """Refuse a file that lost its tokens; mark a file that an older release filled."""
        if version is not None and self.rows():
            # Only the owner: a mark that root made would be in the way of another user's server.
            with contextlib.suppress(OSError):  # The next look tries again.
                if not self._looks and self._path.stat().st_uid == os.geteuid():
                    remember_tokens(self._path)
        elif tokens_mark(self._path).exists():
            raise StorageError(lost_tokens(self._path))

    def rows(self) -> list[TokenRow]:
        with self.connection() as connection:
            return [TokenRow(*row) for row in connection.execute(TOKENS_SQL["rows"])]

    def insert(self, row: TokenRow) -> bool:
        with self.transaction() as connection:
            inserted = connection.execute(TOKENS_SQL["insert"], row).rowcount > 0
        self.version()  # It makes the mark.
        return inserted

    def revoke(self, name: str, at: float) -> bool | None:
        with self.transaction() as connection:
            row = connection.execute(TOKENS_SQL["revoked_at"], (name,)).fetchone()
            if row is None:
                return None
            if row[0] is None:
                connection.execute(TOKENS_SQL["revoke"], (at, name))
            return row[0] is None


class SqliteLogins(SharedFile):
    """The logins to the console in a file; implements `storage.base.LoginRows`."""

    schema = LOGINS_SQL["schema"]

    def rows(self) -> dict[str, bytes]:
        with self.connection() as connection:
            return dict(connection.execute(LOGINS_SQL["rows"]))

    def insert(self, digest: str, document: bytes, gone: Collection[str] = ()) -> None:
        with self.transaction() as connection:
            connection.execute(LOGINS_SQL["insert"], (digest, document))
            connection.executemany(LOGINS_SQL["delete"], [(each,) for each in gone])

    def delete(self, digests: Collection[str]) -> None:
        with self.transaction() as connection:
            connection.executemany(LOGINS_SQL["delete"], [(each,) for each in digests])


class SqliteAgents(SharedFile):
    """The agents and joining tokens in a file; implements `storage.base.AgentRows`."""

    schema = AGENTS_SQL["schema"]

    def __init__(self, path: Path, *, looks: bool = False) -> None:
        super().__init__(path, looks=looks)
        self._rows: dict[str, bytes] = {}
        self._rows_of: tuple[sqlite3.Connection, int] | None = None

    def rows(self) -> dict[str, bytes]:
        with self.connection() as connection:
            return self._current(connection)

    def _current(self, connection: sqlite3.Connection) -> dict[str, bytes]:
        """Return all documents; read them again only if another process changed them."""
        (version,) = connection.execute("PRAGMA data_version").fetchone()
        if self._rows_of != (connection, version):
            self._rows = dict(connection.execute(AGENTS_SQL["rows"]))
            self._rows_of = connection, version
        return self._rows

    @contextlib.contextmanager
    def change(self) -> Iterator[dict[str, bytes]]:
        with self.connection():  # The lock keeps other threads from changing these rows.
            with self.transaction() as connection:
                before = self._current(connection)
                after = dict(before)
                yield after
                put, gone = diff_rows(before, after)
                connection.executemany(AGENTS_SQL["put"], put)
                connection.executemany(AGENTS_SQL["delete"], gone)
            self._rows = after
