"""Which server writes a database: an advisory lock elects it, an epoch fences it.

The lock belongs to one connection, which goes straight to the server: a pooler would share it.
"""

import threading
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import psycopg

from moorage.storage.base import StorageError, StorageFailed, StorageLocked
from moorage.storage.formats import Format
from moorage.storage.postgres.connection import Connection, connect, place_of, translated
from moorage.storage.statements import read_statements

FORMAT: Final = Format(1, {})
"""Of the tables."""
SQL: Final = read_statements(Path(__file__).with_name("schema.sql"))
LOCK_SECONDS_MAX: Final = 5.0
"""How long a start waits for the lock: that of a server that was killed is free within a second."""
_POLL_SECONDS: Final = 0.1
LOOK_SECONDS: Final = 1.0
"""Between two looks at an idle lock."""


class Leadership:
    """The right to write one database, of all parts of one server.

    Args:
        address: As libpq takes it.

    Attributes:
        place: What the database is called in messages.
        epoch: Fences each commit; 0 before it is taken.

    """

    def __init__(self, address: str) -> None:
        self.place = place_of(address)
        self.epoch = 0
        self._address = address
        self._connection: Connection | None = None
        self._users = 0
        self._guard = threading.Lock()
        self._failure = ""
        self._looked_at = 0.0

    def open(self, purpose: str) -> Connection:
        """Open another session of this server, to read."""
        return connect(self._address, purpose)

    def open_writer(self, purpose: str) -> Connection:
        """Open one to write. A warning at a commit fails all parts, as that commit may be lost.

        A wait for a standby that was cancelled is a success to PostgreSQL, with a warning.

        Raises:
            StorageError: It cannot be opened.

        """
        connection = connect(self._address, purpose)
        with translated(self.place):
            connection.execute(SQL["keep_commits"])
        connection.add_notice_handler(self._note)
        return connection

    def _note(self, notice: psycopg.errors.Diagnostic) -> None:
        if notice.severity_nonlocalized == "WARNING":
            self.fail(
                f"{self.place} warned at a commit: {notice.message_primary}. Whether it outlives "
                "the loss of that machine is unknown. Start again: what was acknowledged is safe."
            )

    def take(self) -> None:
        """Become the one who writes, once for all parts.

        Raises:
            StorageLocked: Another server is.
            StorageError: The database cannot be used.

        """
        with self._guard:
            if not self._users:
                self._failure = ""
                connection = connect(self._address, "lock")
                try:
                    with translated(self.place):
                        self._take(connection)
                except BaseException:
                    connection.close()
                    raise
                self._connection = connection
            self._users += 1

    def release(self) -> None:
        """Stop writing, once all parts have called this."""
        with self._guard:
            self._users -= 1
            if not self._users and self._connection is not None:
                self._connection.close()
                self._connection = None

    def fail(self, reason: str) -> None:
        """Have nothing written any more: whether a commit is there is unknown."""
        self._failure = self._failure or reason

    def check_failure(self) -> None:
        """Refuse to go on after a failure.

        Raises:
            StorageFailed: A commit of one of the parts failed.

        """
        if self._failure:
            raise StorageFailed(self._failure)

    def look(self) -> None:
        """Refuse to go on without the lock; looks at it every `LOOK_SECONDS`.

        Raises:
            StorageFailed: It was lost, or a commit of one of the parts failed.

        """
        self.check_failure()
        now = time.monotonic()
        with self._guard, translated(self.place):
            if self._connection is not None and now - self._looked_at >= LOOK_SECONDS:
                self._connection.execute("SELECT 1")
                self._looked_at = now

    def deposed(self) -> StorageFailed:
        """Return what is raised where another server took over."""
        return StorageFailed(
            f"{self.place} is written by another server since (this one had epoch {self.epoch}): "
            "nothing more of this one is stored."
        )

    def _take(self, connection: Connection) -> None:
        check_server(connection, self.place)
        until = time.monotonic() + LOCK_SECONDS_MAX
        while not _first(connection, "try_lock"):
            if time.monotonic() > until:
                raise self._locked(connection)
            time.sleep(_POLL_SECONDS)  # To wait for it would tell nothing of who has it.
        make_tables(connection, self.place)
        try:
            # Waits for a batch of the server before that is under way; later ones find this epoch.
            self.epoch = int(_first(connection, "take_epoch"))
        except psycopg.errors.LockNotAvailable as error:
            raise StorageError(
                f"{self.place} has a transaction that holds the row of the epoch for more than "
                "10 s. Look for it in pg_locks, end it, then start again."
            ) from error
        except psycopg.errors.InsufficientPrivilege as error:
            raise _not_granted(self.place) from error

    def _locked(self, connection: Connection) -> StorageLocked:
        holder = connection.execute(SQL["holder"]).fetchone()
        name, since, where = holder or ("", "just now", "an unknown address")
        *_, host, pid = f"unknown {name}".split()
        number = int(pid) if pid.isdecimal() else None
        process = "another process" if number is None else f"process {number} on {host}"
        return StorageLocked(
            self.place,
            number,
            f"{self.place} is in use by {process} ({where}), since {since}: one server writes at a "
            "time. Stop that one, or name another database.",
        )


def check_server(connection: Connection, place: str) -> None:
    """Refuse a server that cannot keep what it is given.

    Raises:
        StorageError: It is a standby or behind a pooler, or of another encoding.

    """
    row = connection.execute(SQL["facts_of_server"]).fetchone()
    assert row is not None
    is_standby, encoding, pid, _ = row
    if pid != connection.info.backend_pid:
        raise StorageError(
            f"{place} is behind a pooler, which would share locks between servers. Name the "
            "database itself in `storage` (MOORAGE_STORAGE)."
        )
    if is_standby:
        raise StorageError(
            f"{place} is a standby, and takes no writes. Name the primary, or all of them with "
            "target_session_attrs=read-write."
        )
    if encoding != "UTF8":
        raise StorageError(
            f"{place} has the encoding {encoding}. Make another one with ENCODING 'UTF8'."
        )


def make_tables(connection: Connection, place: str) -> bool:
    """Make the tables where there are none, and bring older ones up to date.

    Returns:
        Whether anything was changed.

    Raises:
        StorageError: This role may not, or a newer release made them.

    """
    try:
        with connection.transaction():
            connection.execute(SQL["make_alone"])
            row = connection.execute(SQL["exists"]).fetchone()
            assert row is not None
            exists, may_create = row
            if not exists and not may_create:
                raise _not_prepared(place)
            if not exists:
                connection.execute(SQL["schema"])
                connection.execute(SQL["set_writer"], [version("moorage")])
                return True
            return _migrate(connection, place)
    except (psycopg.errors.InsufficientPrivilege, psycopg.errors.UndefinedTable) as error:
        # A schema that a role may not use is none to it.
        raise _not_granted(place) from error


def _migrate(connection: Connection, place: str) -> bool:
    found, writer = int(_first(connection, "format")), str(_first(connection, "writer"))
    if refusal := FORMAT.refusal(found, writer):
        raise StorageError(f"{place} {refusal}. Nothing was changed.")
    for statement in FORMAT.migration(found):
        connection.execute(statement)
    if found < FORMAT.current:
        connection.execute(SQL["set_format"], [FORMAT.current])
    if writer != version("moorage"):
        connection.execute(SQL["set_writer"], [version("moorage")])
    return found < FORMAT.current


def _not_prepared(place: str) -> StorageError:
    return StorageError(
        f"{place} has no tables of Moorage, and this role may not make them. Run `moored storage "
        "prepare --for ROLE` once, as a role that may."
    )


def _not_granted(place: str) -> StorageError:
    return StorageError(
        f"{place} does not let this role write the tables in the schema moorage. Run `moored "
        "storage prepare --for ROLE` as the role that owns them."
    )


def _first(connection: Connection, name: str) -> Any:
    row = connection.execute(SQL[name]).fetchone()
    assert row is not None
    return row[0]
