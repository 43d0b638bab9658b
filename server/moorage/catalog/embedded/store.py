"""The stored records of the embedded catalog, and the one thread that uses them.

Jobs run one after another, each in its own transaction: the jobs of one tenant in order, and
tenants take turns. When a job's transaction is durable, its `publish` runs on the event loop, in
the same order, even if no caller awaits the job any more. So disk and memory stay equal when
clients disconnect.
"""

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Generic, TypeVar, cast, get_args

from moorage.catalog.embedded.integrity import (
    check_tallies,
    checksum,
    damage_error,
    is_intact,
    unavailable,
)
from moorage.catalog.embedded.record_owners import (
    RECORDS_MAX,
    Kind,
    OwnedRecord,
    RecordOwners,
    StoredRow,
)
from moorage.model import Code
from moorage.protocol.fair_semaphore import FairSemaphore
from moorage.protocol.faults import ServiceError
from moorage.protocol.on_behalf import ON_BEHALF_OF
from moorage.storage.base import RecordRow, RecordStore, RecordTable, StorageError

__all__ = ["JOBS_MAX", "Database", "DocumentStore", "Kind", "StoredRow"]

JOBS_MAX: Final = 1024
"""Maximum jobs that wait for a turn; with one more, the tenant with most jobs loses its last one,
which is refused as `busy`."""
AT_ONCE_MAX: Final = 8
"""Maximum jobs in the thread's queue; tenants take turns for its places, and no tenant gets all."""
CLOSE_SECONDS_MAX: Final = 30.0
"""Seconds that `close` waits for accepted jobs."""

T = TypeVar("T")
_KINDS: Final = get_args(Kind)
_ABOUT: Final[Mapping[Kind, Kind]] = {"block_metrics": "block", "metrics": "cluster"}
"""Kinds whose records belong to the owner of the object that they describe, e.g. metrics."""
_WITH_OWNER: Final = frozenset(("cluster", "block", "executor"))
"""Kinds whose records have their owner in `files`."""


class Database:
    """The database as one job uses it, within the job's transaction.

    Args:
        place: Name of the catalog in messages.
        warnings: A list that gets a sentence for each record that was moved away.
        owners: The owner of each record.
        tenant: The tenant that the job is for; empty: the server itself.
    """

    def __init__(
        self,
        records: RecordTable,
        place: str,
        warnings: list[str],
        owners: RecordOwners,
        tenant: str = "",
    ) -> None:
        self._records = records
        self._place = place
        self._warnings = warnings
        self._owners = owners
        self.tenant = tenant
        self.has: Callable[[Kind, str], bool] = records.has
        self.ids: Callable[[Kind], list[str]] = records.ids
        self.usage: Callable[[], dict[str, tuple[int, int]]] = records.usage
        self.count: Callable[[Kind], int] = records.count
        self.marks: Callable[[], dict[str, object]] = records.marks
        self.checksums: Callable[[Kind], dict[str, int]] = records.checksums

    def get(self, kind: Kind, record_id: str) -> StoredRow | None:
        """Return a record, or None.

        Raises:
            ServiceError: `unavailable`: the record is damaged.
        """
        row = self._records.get(kind, record_id)
        if row is None:
            return None
        if not is_intact(kind, row):
            raise damage_error(self._place, f"the {kind} {record_id} does not match its checksum")
        return StoredRow(row.id, row.document, row.files)

    def put(self, kind: Kind, row: StoredRow) -> str:
        """Store a record, or replace the record with its id; return the owner.

        Raises:
            ServiceError: `too_large`: the catalog, or the tenant's part of it, is full.
        """
        owner = self._owner(kind, row)
        files = owner.encode() if kind in _ABOUT or kind == "alias" else row.files
        values = (row.id, row.document, files)
        self._records.put(kind, RecordRow(*values, checksum(kind, *values)))
        record = OwnedRecord(owner, len(row.document) + len(files))
        self._owners.put(kind, row.id, record, self.usage)
        return owner

    def _owner(self, kind: Kind, row: StoredRow) -> str:
        """Return the tenant that will own a record."""
        if kind in _WITH_OWNER:
            return row.files.decode(errors="replace")
        known = self._owners.owner(_ABOUT.get(kind, kind), row.id)
        return known or self._owners.owner(kind, row.id) or self.tenant

    def remove(self, kind: Kind, record_id: str) -> bool:
        """Remove a record; return whether it existed."""
        self._owners.remove(kind, record_id)
        return self._records.remove(kind, record_id)

    def forget_history(self) -> None:
        """Remove the first history without a policy, of the tenant with most such histories."""
        tenant = self._owners.most_histories()
        for uri in self.ids("history"):
            if self._owners.is_history_of(tenant, uri):
                self.remove("history", uri)
                return

    def rows(self, kind: Kind) -> list[StoredRow]:
        """Return all records of a kind, by id; move damaged records away."""
        good: list[StoredRow] = []
        for number, row in self._records.rows(kind):
            if is_intact(kind, row):
                good.append(StoredRow(row.id, row.document, row.files))
                self._owners.load(kind, good[-1])
            else:
                self._set_aside(kind, number, row.id, "it does not match its checksum")
        return good

    def count_owners(self) -> None:
        """Load the owner of each record again."""
        self._owners.forget()
        for kind in ("history", *RECORDS_MAX):  # A policy's history has its owner.
            self.rows(kind)

    def set_aside(self, kind: Kind, record_id: str, why: str) -> None:
        """Move an unreadable record away, and add a warning."""
        self._set_aside(kind, self._records.number_of(kind, record_id), record_id, why)
        self._owners.remove(kind, record_id)

    def _set_aside(self, kind: Kind, number: int, record_id: object, why: str) -> None:
        self._records.set_aside(number, why)
        self._warnings.append(
            f"the {kind} {str(record_id)[:300]} in {self._place} was set aside and is not served:"
            f" {why}. Store it again, or restore the data directory from a backup."
        )

    def tally(self) -> None:
        """Compare the number of records of each kind with the stored number.

        The comparison also reads the kinds that a start does not read otherwise.

        Raises:
            ServiceError: `unavailable`: records are missing, or older than the last ones stored.
        """
        for kind in check_tallies(self._records, self._place, frozenset(_KINDS)):
            before = len(self._warnings)
            self.rows(cast("Kind", kind))  # Moves damaged records away.
            if len(self._warnings) == before:
                raise damage_error(self._place, f"a {kind} is not the version that was stored last")
            self._records.take_tally(kind)
        self.rows("executor")
        self.rows("history")


@dataclass(frozen=True, slots=True)
class _Job(Generic[T]):
    work: Callable[[Database], T]
    publish: Callable[[T], None] | None
    durable: bool
    tenant: str
    future: "asyncio.Future[T]"


class DocumentStore:
    """A store of records with its own thread; created by `await DocumentStore.open(records)`.

    Args:
        records: The records; not open yet.

    Attributes:
        warnings: Sentences for the log about damaged records, which are not served.
    """

    def __init__(self, records: RecordStore) -> None:
        self.warnings: list[str] = []
        self._records = records
        self._next_records: RecordStore | None = None
        self._loop = asyncio.get_running_loop()
        self._owners = RecordOwners()
        self._turns = FairSemaphore(AT_ONCE_MAX, JOBS_MAX, busy="operations wait for the catalog")
        self._jobs: queue.SimpleQueue[_Job[Any] | None] = queue.SimpleQueue()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._closing = False
        self._thread = threading.Thread(target=self._work, name="catalog", daemon=True)

    @classmethod
    async def open(cls, records: RecordStore) -> "DocumentStore":
        """Open or create the tables and start the thread.

        Raises:
            ServiceError: `unavailable`: the records cannot be opened, are not a catalog, are
            incomplete, or were written by another release.
        """
        store = cls(records)
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
        """Run `work` in the thread and return its result.

        Args:
            work: Reads and writes the database; if it raises, all its changes are undone.
            publish: Called on the event loop with the result, once it is durable.
            durable: False: a power cut within some seconds may undo the change, but a kill of the
                process cannot. Metrics use False, since newer metrics replace them.

        Raises:
            ServiceError: `busy`, `shutting_down`, `unavailable`, or the error of `work`.
        """
        if self._closing:
            raise ServiceError(
                Code.SHUTTING_DOWN, "the catalog is closed; try again when the server runs"
            )
        tenant = ON_BEHALF_OF.get()
        async with self._turns.turn(tenant):
            future: asyncio.Future[T] = self._loop.create_future()
            self._jobs.put(_Job(work, publish, durable, tenant, future))
            return await future

    async def go_on_with(self, records: RecordStore) -> None:
        """From the next job on, use these records: the same records, opened for writing.

        Raises:
            ServiceError: `unavailable`: the records cannot be used; see `open`.
        """
        self._next_records = records
        await self.run(lambda _: None)

    def count_owners(self) -> None:
        """Queue a job that reads the owner of each record; nothing awaits the job."""
        future: asyncio.Future[None] = self._loop.create_future()
        future.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._jobs.put(_Job(Database.count_owners, None, durable=False, tenant="", future=future))

    async def close(self) -> None:
        """Finish the accepted jobs, write a checkpoint, and close the file. Idempotent.

        Raises:
            TimeoutError: The jobs did not end within `CLOSE_SECONDS_MAX`.
        """
        if not self._closing:
            self._closing = True
            self._turns.close()
            await asyncio.sleep(0)  # Let waiting callers add their jobs.
            self._jobs.put(None)
        async with asyncio.timeout(CLOSE_SECONDS_MAX):
            await asyncio.shield(self._ended)
        self._thread.join()

    # In the thread -------------------------------------------------------------------------

    def _work(self) -> None:
        is_open = False
        while (job := self._next()) is not None:
            try:
                if self._next_records is not None:
                    self._records.close()
                    self._records, self._next_records = self._next_records, None
                    is_open = False
                if not is_open:
                    self.warnings += self._records.open()
                    is_open = True
                self._owners.begin()
                result = self._records.transact(partial(self._do, job), durable=job.durable)
            except StorageError as error:
                self._owners.undo()
                self._loop.call_soon_threadsafe(_fail, job.future, unavailable(error))
            except BaseException as error:  # noqa: BLE001  # The caller gets any error.
                self._owners.undo()
                self._loop.call_soon_threadsafe(_fail, job.future, error)
            else:
                self._loop.call_soon_threadsafe(_finish, job, result)
        self._records.close()
        self._loop.call_soon_threadsafe(self._ended.set_result, None)

    def _do(self, job: _Job[T], records: RecordTable) -> T:
        place, owners = self._records.place, self._owners
        return job.work(Database(records, place, self.warnings, owners, job.tenant))

    def _next(self) -> _Job[Any] | None:
        """Wait for the next job and return it; while waiting, do maintenance that is due."""
        while True:
            wait_seconds = None
            with contextlib.suppress(StorageError):  # The next job fails with it.
                wait_seconds = self._records.upkeep()
            with contextlib.suppress(queue.Empty):
                return self._jobs.get(timeout=wait_seconds)


# On the event loop -----------------------------------------------------------------------------


def _fail(future: "asyncio.Future[T]", error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)


def _finish(job: _Job[T], result: T) -> None:
    try:
        if job.publish is not None:
            job.publish(result)
    except BaseException as error:  # noqa: BLE001  # The caller gets a listener's error.
        _fail(job.future, error)
    else:
        if not job.future.done():
            job.future.set_result(result)
