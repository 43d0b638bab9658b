"""One SQLite file and the only thread that touches it; the embedded catalog's disk.

Jobs run one after another in the order they were submitted, each in a transaction of its own.
When a job's transaction is durable, its `publish` runs on the event loop, also in that order and
also when the job is not awaited any more: what is on disk and what is in memory cannot drift
apart because a client hung up.
"""

import asyncio
import queue
import sqlite3
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Generic, Literal, TypeVar, cast, get_args

from moorage.catalog.embedded.integrity import (
    FORMAT,
    LABEL,
    check_tallies,
    checksum,
    commits,
    damaged,
    is_intact,
    look,
    mark_path,
)
from moorage.durability import DurableMark, next_of, note_release, owner_only
from moorage.model import Code
from moorage.protocol.faults import ServiceError

__all__ = ["JOBS_MAX", "Database", "DocumentStore", "Kind", "StoredRow", "Usage", "new_file"]

JOBS_MAX: Final = 1024
"""Jobs waiting for the thread; one more is refused with `busy`."""
CLOSE_SECONDS_MAX: Final = 30.0
"""How long `close` waits for the jobs already accepted."""

Kind = Literal[
    "cluster",
    "metrics",
    "policy",
    "alias",
    "context",
    "executor",
    "history",
    "block",
    "block_metrics",
]
T = TypeVar("T")
_KINDS: Final = get_args(Kind)

# `usage` follows `records` by triggers, so that limits are checked in the transaction that would
# break them, without counting rows, and that a record cannot go missing without a word.
_SCHEMA: Final = """
CREATE TABLE records (
    kind TEXT NOT NULL, id TEXT NOT NULL, document BLOB NOT NULL, files BLOB NOT NULL,
    checksum INTEGER NOT NULL, PRIMARY KEY (kind, id)
);
CREATE TABLE damaged (kind, id, document, files, checksum, why TEXT NOT NULL);
CREATE TABLE commits (number INTEGER NOT NULL);
INSERT INTO commits VALUES (0);
CREATE TABLE usage (
    kind TEXT PRIMARY KEY, records INTEGER NOT NULL, bytes INTEGER NOT NULL,
    checksums INTEGER NOT NULL
);
INSERT INTO usage VALUES
    ('cluster', 0, 0, 0), ('metrics', 0, 0, 0), ('policy', 0, 0, 0), ('alias', 0, 0, 0),
    ('context', 0, 0, 0), ('executor', 0, 0, 0), ('history', 0, 0, 0), ('block', 0, 0, 0),
    ('block_metrics', 0, 0, 0);
CREATE TRIGGER record_added AFTER INSERT ON records BEGIN
    UPDATE usage SET records = records + 1, checksums = checksums + new.checksum,
        bytes = bytes + length(new.document) + length(new.files) WHERE kind = new.kind;
END;
CREATE TRIGGER record_changed AFTER UPDATE ON records BEGIN
    UPDATE usage SET checksums = checksums + new.checksum - old.checksum,
        bytes = bytes + length(new.document) + length(new.files)
        - length(old.document) - length(old.files) WHERE kind = new.kind;
END;
CREATE TRIGGER record_removed AFTER DELETE ON records BEGIN
    UPDATE usage SET records = records - 1, checksums = checksums - old.checksum,
        bytes = bytes - length(old.document) - length(old.files) WHERE kind = old.kind;
END;
"""


@dataclass(frozen=True, slots=True)
class StoredRow:
    """One stored record.

    Args:
        id: Unique within its kind.
        document: JSON.
        files: Packed files of a policy; empty for the other kinds.

    """

    id: str
    document: bytes
    files: bytes = b""


@dataclass(frozen=True, slots=True)
class Usage:
    """How much is stored: records of one kind, and bytes of all kinds together."""

    records: int
    bytes_total: int


class Database:
    """What a job may do, within its transaction.

    Args:
        connection: In a transaction.
        path: The file, for messages.
        warnings: Gets a sentence for each record that was set aside.

    """

    def __init__(self, connection: sqlite3.Connection, path: Path, warnings: list[str]) -> None:
        self._connection = connection
        self._path = path
        self._warnings = warnings

    def get(self, kind: Kind, record_id: str) -> StoredRow | None:
        """Return a record, or None.

        Raises:
            ServiceError: `unavailable`: it is damaged.

        """
        found = self._connection.execute(
            "SELECT id, document, files, checksum FROM records WHERE kind = ? AND id = ?",
            (kind, record_id),
        ).fetchone()
        if found is None:
            return None
        *values, stored = found
        if not is_intact(kind, (values[0], values[1], values[2]), stored):
            raise damaged(self._path, f"the {kind} {record_id} does not match its checksum")
        return StoredRow(*values)

    def has(self, kind: Kind, record_id: str) -> bool:
        """Return whether there is such a record."""
        found = self._connection.execute(
            "SELECT 1 FROM records WHERE kind = ? AND id = ?", (kind, record_id)
        )
        return found.fetchone() is not None

    def ids(self, kind: Kind) -> list[str]:
        """Return the ids of all records of a kind."""
        found = self._connection.execute("SELECT id FROM records WHERE kind = ?", (kind,))
        return [each for (each,) in found]

    def put(self, kind: Kind, row: StoredRow) -> None:
        """Store a record, in the place of the one with its id if there is one."""
        self._connection.execute(
            "INSERT INTO records VALUES (?, ?, ?, ?, ?) ON CONFLICT (kind, id) DO UPDATE"
            " SET document = excluded.document, files = excluded.files,"
            " checksum = excluded.checksum",
            (
                kind,
                row.id,
                row.document,
                row.files,
                checksum(kind, row.id, row.document, row.files),
            ),
        )

    def remove(self, kind: Kind, record_id: str) -> bool:
        """Delete a record; return whether there was one."""
        deleted = self._connection.execute(
            "DELETE FROM records WHERE kind = ? AND id = ?", (kind, record_id)
        )
        return deleted.rowcount > 0

    def rows(self, kind: Kind) -> list[StoredRow]:
        """Return all records of a kind, by id; those that are damaged are set aside."""
        good: list[StoredRow] = []
        bad: list[tuple[int, object]] = []
        found = self._connection.execute(
            "SELECT id, document, files, checksum, rowid FROM records WHERE kind = ? ORDER BY id",
            (kind,),
        )
        for record_id, document, files, stored, number in found:
            if is_intact(kind, (record_id, document, files), stored):
                good.append(StoredRow(record_id, document, files))
            else:
                bad.append((number, record_id))
        for number, record_id in bad:
            self._set_aside(kind, number, record_id, "it does not match its checksum")
        return good

    def set_aside(self, kind: Kind, record_id: str, why: str) -> None:
        """Keep a record that cannot be read where it is in no other record's way, and say so."""
        (number,) = self._connection.execute(
            "SELECT rowid FROM records WHERE kind = ? AND id = ?", (kind, record_id)
        ).fetchone()
        self._set_aside(kind, number, record_id, why)

    def _set_aside(self, kind: Kind, number: int, record_id: object, why: str) -> None:
        self._connection.execute(
            "INSERT INTO damaged SELECT *, ? FROM records WHERE rowid = ?", (why, number)
        )
        self._connection.execute("DELETE FROM records WHERE rowid = ?", (number,))
        self._warnings.append(
            f"the {kind} {str(record_id)[:300]} in {self._path} was set aside and is not served:"
            f" {why}. Store it again, or restore the data directory from a backup."
        )

    def tally(self) -> None:
        """Compare what there is of each kind with what there should be.

        What is not read at every start all the same is read here.

        Raises:
            ServiceError: `unavailable`: something is missing.

        """
        for kind in check_tallies(self._connection, self._path, frozenset(_KINDS)):
            before = len(self._warnings)
            self.rows(cast("Kind", kind))  # Sets aside what it finds.
            if len(self._warnings) == before:
                raise damaged(self._path, f"a {kind} is not the one that was stored last")
            self._connection.execute(
                "UPDATE usage SET checksums = (SELECT coalesce(sum(checksum), 0) FROM records"
                " WHERE kind = ?1) WHERE kind = ?1",
                (kind,),
            )
        self.rows("executor")
        self.rows("history")

    def count(self, kind: Kind) -> int:
        """Return how many records of a kind there are, by counting them."""
        found = self._connection.execute("SELECT count(*) FROM records WHERE kind = ?", (kind,))
        (records,) = found.fetchone()
        return int(records)

    def remove_oldest_without(self, kind: Kind, other: Kind) -> None:
        """Delete the oldest record of a kind whose id no record of another kind has."""
        self._connection.execute(
            "DELETE FROM records WHERE rowid = (SELECT min(rowid) FROM records WHERE kind = ?"
            " AND id NOT IN (SELECT id FROM records WHERE kind = ?))",
            (kind, other),
        )

    def usage(self, kind: Kind) -> Usage:
        """Return how much is stored, this transaction included.

        Aliases, contexts, executors and histories have bounds of their own.
        """
        found = self._connection.execute(
            "SELECT sum(records) FILTER (WHERE kind = ?), sum(bytes) FILTER (WHERE kind NOT IN"
            " ('alias', 'context', 'executor', 'history')) FROM usage",
            (kind,),
        ).fetchone()
        return Usage(*found)


@dataclass(frozen=True, slots=True)
class _Job(Generic[T]):
    work: Callable[[Database], T]
    publish: Callable[[T], None] | None
    durable: bool
    future: "asyncio.Future[T]"


class DocumentStore:
    """The thread and its queue. Make one with `await Store.open(path)`.

    Args:
        path: The file; it is created where it does not exist, its folder is not.

    Attributes:
        warnings: What was damaged and is done without, each a sentence for the log.

    """

    def __init__(self, path: Path) -> None:
        self.warnings: list[str] = []
        self._path = path
        self._mark: DurableMark | None = None
        self._loop = asyncio.get_running_loop()
        self._jobs: queue.SimpleQueue[_Job[Any] | None] = queue.SimpleQueue()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._closing = False
        self._thread = threading.Thread(target=self._work, name="catalog", daemon=True)

    @classmethod
    async def open(cls, path: Path) -> "DocumentStore":
        """Open or create the file and start the thread.

        Raises:
            ServiceError: `unavailable`: the file cannot be opened, is no catalog, is not whole, or
                was written by another release.

        """
        store = cls(path)
        store._thread.start()
        try:
            await store.run(lambda database: database.tally())
        except BaseException:
            await store.close()
            raise
        return store

    async def run(
        self,
        work: Callable[[Database], T],
        publish: Callable[[T], None] | None = None,
        *,
        durable: bool = True,
    ) -> T:
        """Run `work` in the thread and return what it returns.

        Args:
            work: Reads and writes the database; all of it is undone if it raises.
            publish: Called on the event loop with the result, once it is durable.
            durable: False where the last seconds may be lost with the machine's power (never
                with the process): observations, which the next ones replace.

        Raises:
            ServiceError: `busy`, `shutting_down`, `unavailable`, or what `work` raised.

        """
        if self._closing:
            raise ServiceError(Code.SHUTTING_DOWN, "the catalog is closed; ask again when it is up")
        if self._jobs.qsize() >= JOBS_MAX:
            raise ServiceError(
                Code.BUSY, f"the catalog has {JOBS_MAX} operations waiting; ask again later"
            )
        future: asyncio.Future[T] = self._loop.create_future()
        self._jobs.put(_Job(work, publish, durable, future))
        return await future

    async def close(self) -> None:
        """Finish the accepted jobs, checkpoint and close the file. Idempotent.

        Raises:
            TimeoutError: The jobs did not end within `CLOSE_SECONDS_MAX`.

        """
        if not self._closing:
            self._closing = True
            self._jobs.put(None)
        async with asyncio.timeout(CLOSE_SECONDS_MAX):
            await asyncio.shield(self._ended)
        self._thread.join()

    # In the thread -------------------------------------------------------------------------

    def _transact(self, connection: sqlite3.Connection, job: _Job[T]) -> T:
        assert self._mark is not None
        connection.execute(f"PRAGMA synchronous = {'FULL' if job.durable else 'NORMAL'}")
        self._mark.sync_in_time()
        connection.execute("BEGIN")
        before = connection.total_changes
        try:
            result = job.work(Database(connection, self._path, self.warnings))
            counted = job.durable and connection.total_changes > before
            if counted:
                connection.execute("UPDATE commits SET number = number + 1")
            number = commits(connection) if counted else 0
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
        if counted:
            self._mark.write(number, 0)
        return result

    def _work(self) -> None:
        connection: sqlite3.Connection | None = None
        while (job := next_of(self._jobs, self._mark)) is not None:
            try:
                if connection is None:
                    connection, self._mark = _connect(self._path, self.warnings)
                result = self._transact(connection, job)
            except (sqlite3.Error, OSError) as error:
                fault = ServiceError(
                    Code.UNAVAILABLE,
                    f"the catalog's database {self._path} failed: {error};"
                    " check the disk and the file's permissions",
                )
                self._loop.call_soon_threadsafe(_fail, job.future, fault)
            except BaseException as error:  # noqa: BLE001  # Whatever it is, the caller must know.
                self._loop.call_soon_threadsafe(_fail, job.future, error)
            else:
                self._loop.call_soon_threadsafe(_finish, job, result)
        if connection is not None:
            connection.close()
        if self._mark is not None:
            self._mark.close()
        self._loop.call_soon_threadsafe(self._ended.set_result, None)


def new_file(connection: sqlite3.Connection) -> None:
    """Make the tables of a catalog."""
    connection.executescript(
        f"BEGIN EXCLUSIVE; {_SCHEMA} PRAGMA user_version = {FORMAT.current}; COMMIT;"
    )


def _connect(path: Path, warnings: list[str]) -> tuple[sqlite3.Connection, DurableMark]:
    try:
        owner_only(path)
        found = look(path)
        mark = DurableMark(mark_path(path), LABEL, found.first, found.second, found.writes)
    except OSError as error:
        raise ServiceError(
            Code.UNAVAILABLE,
            f"the catalog's database {path} cannot be opened: {error}; the data directory must be"
            " one that this user may write to",
        ) from error
    connection = sqlite3.connect(path, isolation_level=None)
    try:
        connection.execute("PRAGMA busy_timeout = 5000")
        connection.execute("PRAGMA journal_mode = WAL")
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version == 0:
            new_file(connection)
        elif version < FORMAT.current:
            connection.execute("BEGIN IMMEDIATE")
            FORMAT.migrate(connection, version)
            connection.execute(f"PRAGMA user_version = {FORMAT.current}")
            connection.execute("COMMIT")
        if version and found.doubt:
            warnings.append(f"the catalog {path}: {found.doubt}; it was written again.")
        note_release(connection)
        mark.write_both(commits(connection), 0)
    except BaseException:
        connection.close()
        mark.close()
        raise
    return connection, mark


# On the event loop -----------------------------------------------------------------------------


def _fail(future: "asyncio.Future[Any]", error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)


def _finish(job: _Job[T], result: T) -> None:
    try:
        if job.publish is not None:
            job.publish(result)
    except BaseException as error:  # noqa: BLE001  # A listener's failure is the caller's to see.
        _fail(job.future, error)
    else:
        if not job.future.done():
            job.future.set_result(result)
