"""Elects the server that writes a database by an advisory lock, and fences others by an epoch.

The lock belongs to one connection, which goes straight to the server: a pooler would share it.
"""

import contextlib
import threading
import time
from importlib.metadata import version
from pathlib import Path
from typing import Final

import psycopg

from moorage.storage.base import (
    LEAD_SECONDS,
    Deposed,
    Leader,
    Seat,
    SqlValue,
    StorageError,
    StorageFailed,
    StorageLocked,
)
from moorage.storage.formats import Format
from moorage.storage.postgres.connection import (
    Connection,
    connect,
    name_of,
    place_of,
    storage_error,
    translate_errors,
)
from moorage.storage.statements import read_statements

SQL: Final = read_statements(Path(__file__).with_name("schema.sql"))
FORMAT: Final = Format(3, {1: [SQL["add_audit"]], 2: [SQL["add_logins"]]})
"""The format of the tables, and the steps from older formats."""
LOCK_SECONDS_MAX: Final = 5.0
"""Maximum seconds for which a starting server waits for the lock. If the server with the lock was
killed, the lock is free within a second."""
_POLL_SECONDS: Final = 0.1
LOOK_SECONDS: Final = 1.0
"""Seconds between two checks that this server still has the lock."""
STAND_SECONDS: Final = 0.05
"""Seconds for which a standby waits for the leader to leave before it tries the lock again."""
STANDBY_SECONDS: Final = 1.0
"""Seconds between two heartbeats of a standby."""
SEEN_SECONDS: Final = 5.0
"""A standby counts as gone this many seconds after its last heartbeat."""
SPARE: Final = 4
"""Number of sessions that a takeover needs at once: for the ledger, the catalog and the secret."""
_TRIES_MAX: Final = 20
"""Maximum times that a takeover ends the former server's transactions on the epoch's row."""


class Leadership:
    """The right of one server to write a database, for all its stores; a `storage.base.Election`.

    Args:
        address: Address of the database.
        copies: Whether the database is to be filled from another storage.

    Attributes:
        place: Name of the database in messages.
        epoch: Number that fences each commit; 0 before this server leads.
    """

    def __init__(self, address: str, *, copies: bool = False) -> None:
        self.place = place_of(address)
        self._copies = copies
        self.epoch = 0
        self._address = address
        self._connection: Connection | None = None
        self._users = 0
        self._guard = threading.Lock()
        self._failure = ""
        self._looked_at = 0.0
        self._waiting: Connection | None = None
        """The session with which a standby waits for the lock."""
        self._spare: list[Connection] = []
        """Sessions that a standby opens in advance, for its takeover."""
        self._noted_at = 0.0
        self._name = ""
        self._leaving = ""
        """Epoch of a leader that announced that it will resign."""
        self.leader: Leader | None = None
        self.standbys = self.is_deposed = False

    def open(self, purpose: str) -> Connection:
        """Open another session of this server, for reading."""
        while self._spare:
            connection = self._spare.pop()
            with contextlib.suppress(psycopg.Error):  # The database ended the session.
                connection.execute(SQL["rename"], (name_of(purpose),))
                return connection
            connection.close()
        return connect(self._address, purpose)

    def open_writer(self, purpose: str) -> Connection:
        """Open a session to write. A warning at a commit stops all writes of this server.

        PostgreSQL warns, and reports success, if a commit may be lost: its wait for the standby
        database was cancelled.

        Raises:
            StorageError: The session cannot be opened.
        """
        connection = self.open(purpose)
        with translate_errors(self.place):
            connection.execute(SQL["keep_commits"])
        connection.add_notice_handler(self._note)
        return connection

    def _note(self, notice: psycopg.errors.Diagnostic) -> None:
        if notice.severity_nonlocalized == "WARNING":
            self.fail(
                f"{self.place} warned at a commit: {notice.message_primary}. Whether the commit "
                "survives the loss of the database's machine is unknown. Start again: acknowledged "
                "changes are safe."
            )

    def take(self) -> None:
        """Become the leader; only the first of several calls has an effect.

        Raises:
            StorageLocked: Another server leads.
            StorageError: The database cannot be used.
        """
        with self._guard:
            if not self._users:
                self._failure = ""
                connection = connect(self._address, "lock")
                try:
                    with translate_errors(self.place):
                        self._take(connection)
                except BaseException:
                    connection.close()
                    raise
                self._connection = connection
            self._users += 1

    def stand(self, seat: Seat) -> bool:
        with self._guard:
            try:
                with translate_errors(self.place):
                    return self._stand(seat)
            except StorageError:
                self._leave()  # The next attempt opens a new connection.
                raise

    def _stand(self, seat: Seat) -> bool:
        if self._waiting is None or self._waiting.closed:
            self._leave()
            self._waiting = connect(self._address, "lock")
            check_server(self._waiting, self.place)
            make_tables(self._waiting, self.place)
            self._waiting.execute(SQL["listen"])
        connection = self._waiting
        if _first(connection, "try_lock"):
            self._take_epoch(connection)
            # The next writes may be lost in a crash of the database, and wait for no standby.
            connection.execute("SET synchronous_commit = off")
            connection.execute(SQL["lead"], {"epoch": self.epoch, **seat._asdict()})
            self._connection, self._waiting, self._users = connection, None, 1
            self.leader = None
            return True
        leader = leader_of(connection)
        self.leader = None if leader and str(leader.epoch) == self._leaving else leader
        if leader is None and connection.execute(SQL["depose"], (LEAD_SECONDS,)).fetchone():
            return False  # The deposed leader's lock will be free in a moment.
        if time.monotonic() - self._noted_at >= STANDBY_SECONDS:
            self._name = seat.name
            connection.execute(SQL["stand_by"], seat._asdict())
            self._noted_at = time.monotonic()
        elif len(self._spare) < SPARE:
            self._spare.append(connect(self._address, "spare"))
        for heard in connection.notifies(timeout=STAND_SECONDS, stop_after=1):
            self._leaving = heard.payload or self._leaving
            if self.leader is not None and str(self.leader.epoch) == self._leaving:
                self.leader = None
        return False

    def _leave(self) -> None:
        if self._waiting is not None:
            self._waiting.close()
            self._waiting = None
        while self._spare:
            self._spare.pop().close()
        self.leader, self._noted_at = None, 0.0

    def beat(self) -> bool:
        with self._guard:
            if self._connection is None:
                raise Deposed(f"another server leads on {self.place}: this server has resigned.")
            try:
                row = self._connection.execute(SQL["beat"], (self.epoch,)).fetchone()
                others = self._connection.execute(SQL["standbys"], (SEEN_SECONDS,)).fetchone()
            except psycopg.Error as error:
                raise self._loss_error(error) from error
        if row is None:
            raise self.deposition()
        self.standbys = others is not None
        return bool(row[0])

    def announce(self) -> None:
        with self._guard, contextlib.suppress(psycopg.Error):  # Standbys learn it later.
            if self._connection is not None:
                self._connection.execute(SQL["announce"], (str(self.epoch),))

    def resign(self) -> None:
        with self._guard:
            if self._connection is not None:
                with contextlib.suppress(psycopg.Error):  # The lock is lost already.
                    self._connection.execute(SQL["leave"], (self.epoch,))
                    self._connection.execute(SQL["unlock"])
                self._connection.close()
                self._connection = None
            elif self._waiting is not None:
                with contextlib.suppress(psycopg.Error):  # The heartbeat then expires soon.
                    self._waiting.execute(SQL["sit_down"], (self._name,))
            self._leave()

    def _loss_error(self, error: psycopg.Error) -> StorageFailed:
        """Return the error for a lost lock: another server leads now, or the database failed."""
        with (
            contextlib.suppress(psycopg.Error, StorageError),
            contextlib.closing(connect(self._address, "look")) as connection,
        ):
            if _first(connection, "epoch") != self.epoch:
                return self.deposition()
        return storage_error(self.place, error)

    def release(self) -> None:
        """Release the lock when all stores of the server have called this."""
        with self._guard:
            self._users -= 1
            if not self._users and self._connection is not None:
                self._connection.close()
                self._connection = None

    def fail(self, reason: str) -> None:
        """Stop all writes, since it is unknown whether the last commit succeeded."""
        self._failure = self._failure or reason

    def check_failure(self) -> None:
        """Raise an error if a commit of any of the server's stores has failed.

        Raises:
            StorageFailed: A commit of one of the server's stores failed.
        """
        if self._failure:
            raise StorageFailed(self._failure)

    def look(self) -> None:
        """Raise an error if the lock was lost; the check runs every `LOOK_SECONDS`.

        Raises:
            StorageFailed: The lock was lost, or a commit of one of the server's stores failed.
        """
        self.check_failure()
        now = time.monotonic()
        with self._guard:
            if self._connection is not None and now - self._looked_at >= LOOK_SECONDS:
                try:
                    self._connection.execute("SELECT 1")
                except psycopg.Error as error:
                    raise self._loss_error(error) from error
                self._looked_at = now

    def deposition(self) -> Deposed:
        """Record a takeover by another server, and return the error for it."""
        self.is_deposed = True
        return Deposed(
            f"another server has written to {self.place} since this server's epoch {self.epoch}: "
            "no more changes of this server are stored."
        )

    def _take(self, connection: Connection) -> None:
        check_server(connection, self.place)
        until = time.monotonic() + LOCK_SECONDS_MAX
        while not _first(connection, "try_lock"):
            if time.monotonic() > until:
                raise self._locked_error(connection)
            time.sleep(_POLL_SECONDS)  # A blocking wait could not name the lock's holder.
        self._take_epoch(connection)

    def _take_epoch(self, connection: Connection) -> None:
        """Write a new epoch, which fences the former server; the caller has the lock."""
        if _format(connection) != FORMAT.current:
            make_tables(connection, self.place, copies=self._copies)
        try:
            if not self._copies:
                refuse_unfinished(connection, self.place)
            connection.execute("SET lock_timeout = '500ms'")
            for _ in range(_TRIES_MAX):
                # Waits for a running commit of the former server; its later commits find this
                # epoch. If the former server was paused in a transaction, the row stays locked:
                # then end its session.
                with contextlib.suppress(psycopg.errors.LockNotAvailable):
                    self.epoch = int(_first(connection, "take_epoch"))
                    return
                connection.execute(SQL["end_holders"])
        except psycopg.errors.InsufficientPrivilege as error:
            raise _missing_grant_error(self.place) from error
        raise StorageError(
            f"{self.place} has a transaction that holds the row of the epoch for more than "
            "10 s. Look for it in pg_locks, end it, then start again."
        )

    def _locked_error(self, connection: Connection) -> StorageLocked:
        holder = connection.execute(SQL["holder"]).fetchone()
        name, since, where = holder or ("", "just now", "an unknown address")
        *_, host, pid = f"unknown {name}".split()
        number = int(pid) if pid.isdecimal() else None
        process = "another process" if number is None else f"process {number} on {host}"
        return StorageLocked(
            self.place,
            number,
            f"{self.place} is in use by {process} ({where}), since {since}: one server writes at a "
            "time. Stop that process, or name another database.",
        )


def leader_of(connection: Connection) -> Leader | None:
    """Return the server that leads; None if no server leads, or it sends no heartbeats."""
    try:
        row = connection.execute(SQL["leader"]).fetchone()
    except psycopg.errors.UndefinedTable:  # The first server is creating the tables.
        return None
    if row is None:
        return None
    name, ws, http, epoch, since, age = row
    return None if age > LEAD_SECONDS else Leader(Seat(name, ws, http), int(epoch), since)


def look_around(address: str) -> tuple[Leader | None, list[Seat]]:
    """Return the server that leads, and the servers that stand by.

    Raises:
        StorageError: The database cannot be read.
    """
    place = place_of(address)
    with contextlib.closing(connect(address, "lead")) as connection, translate_errors(place):
        check_server(connection, place)
        make_tables(connection, place)
        rows = connection.execute(SQL["standbys"], (SEEN_SECONDS,)).fetchall()
        return leader_of(connection), [Seat(*row) for row in rows]


def ask_to_resign(address: str) -> bool:
    """Request that the leader resigns; return whether any server leads.

    Raises:
        StorageError: The database cannot be written.
    """
    with (
        contextlib.closing(connect(address, "lead")) as connection,
        translate_errors(place_of(address)),
    ):
        return bool(connection.execute(SQL["resign"], (LEAD_SECONDS,)).rowcount)


def check_server(connection: Connection, place: str) -> None:
    """Raise an error for a database server that cannot store commits safely.

    Raises:
        StorageError: The server is a standby, behind a pooler, or has another encoding.
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
            f"{place} has the encoding {encoding}. Make another database with ENCODING 'UTF8'."
        )


def refuse_unfinished(connection: Connection, place: str) -> None:
    """Raise an error if a copy into the database is not complete.

    Raises:
        StorageError: `moored storage copy` is filling the tables, or was stopped before its end.
    """
    if _first(connection, "copying"):
        raise StorageError(
            f"{place} is an unfinished copy: `moored storage copy` is still writing it, or was "
            "stopped. Wait, or run that command again, or drop the schema moorage."
        )


def make_tables(connection: Connection, place: str, *, copies: bool = False) -> bool:
    """Create the tables if they are missing, and upgrade older tables.

    Args:
        connection: A session that has no transaction.
        place: Name of the database in messages.
        copies: Whether new tables are the beginning of a copy, which no server may use.

    Returns:
        Whether anything was changed.

    Raises:
        StorageError: This role may not create tables, or a newer release created the tables.
    """
    try:
        with connection.transaction():
            connection.execute(SQL["make_alone"])
            row = connection.execute(SQL["exists"]).fetchone()
            assert row is not None
            exists, may_create = row
            if not exists and not may_create:
                raise _unprepared_error(place)
            if not exists:
                connection.execute(SQL["schema"])
                if copies:
                    connection.execute(SQL["begin_copy"])
            return _migrate(connection, place)
    except (psycopg.errors.InsufficientPrivilege, psycopg.errors.UndefinedTable) as error:
        # PostgreSQL reports a schema that a role may not use as missing.
        raise _missing_grant_error(place) from error


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


def _format(connection: Connection) -> int | None:
    """Return the format of the tables; None if they are missing or this role may not read them."""
    try:
        return int(_first(connection, "format"))
    except (psycopg.errors.UndefinedTable, psycopg.errors.InsufficientPrivilege):
        return None


def _unprepared_error(place: str) -> StorageError:
    return StorageError(
        f"{place} has no tables of Moorage, and this role may not create them. Run `moored storage "
        "prepare --for ROLE` once, as a role that may create them."
    )


def _missing_grant_error(place: str) -> StorageError:
    return StorageError(
        f"{place} does not let this role write the tables in the schema moorage. Run `moored "
        "storage prepare --for ROLE` as the role that owns them."
    )


def _first(connection: Connection, name: str) -> SqlValue:
    row = connection.execute(SQL[name]).fetchone()
    assert row is not None
    return row[0]
