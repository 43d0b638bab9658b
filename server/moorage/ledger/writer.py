"""Group commit: one thread, one transaction for everything that waits. `SqliteLedger` owns one.

While a transaction is being synced, the next ones' jobs gather in the queue and then share one
sync: the slower the disk, the larger the groups.
"""

import asyncio
import contextlib
import queue
import sqlite3
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from moorage.durability import DurableMark, Reserve, next_of
from moorage.ledger import tables
from moorage.ledger.base import LedgerFailed, place_of
from moorage.ledger.codec import FactRow
from moorage.ledger.fencing import Fencing


class WriteJob(msgspec.Struct, frozen=True, eq=False):
    """Something to be made durable.

    Args:
        done: Becomes what `work` returned once the job is durable, or a `LedgerFailed`.
        rows: Facts to add.
        fencing: The highest fencing number in them; 0 where there is none.
        work: Another change to the tables, or None.

    """

    done: asyncio.Future[object]
    rows: Sequence[FactRow] = ()
    fencing: int = 0
    work: Callable[[sqlite3.Connection], object] | None = None


class GroupCommit:
    """The writing thread. Jobs become durable in the order in which they were submitted.

    Args:
        connection: Its own from now on; it closes it.
        path: The ledger's file, for messages.
        mark: Says how far the ledger has come; its own from now on, too.
        fencing: Reserves the numbers of grants; likewise.
        reserve: Room for what is promised, should the disk be full.
        settled: Called on the loop after every transaction, before the futures of its jobs are
            resolved, with the jobs and its failure or None.

    """

    def __init__(
        self,
        connection: sqlite3.Connection,
        path: Path,
        mark: DurableMark,
        fencing: Fencing,
        reserve: Reserve,
        settled: Callable[[Sequence[WriteJob], LedgerFailed | None], None],
    ) -> None:
        self._connection = connection
        self._path = path
        self._mark = mark
        self._fencing = fencing
        self._reserve = reserve
        self._settled = settled
        self._loop = asyncio.get_running_loop()
        self._queue: queue.SimpleQueue[WriteJob | None] = queue.SimpleQueue()
        self._ended = self._loop.create_future()
        # A daemon thread: a disk that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name="ledger-writer", daemon=True)
        self._thread.start()

    def submit(self, job: WriteJob) -> None:
        """Have a job done."""
        self._queue.put(job)

    async def stop(self) -> None:
        """Return when every job submitted so far is settled and the thread has ended."""
        self._queue.put(None)
        await self._ended
        self._thread.join()

    def _run(self) -> None:
        failure: LedgerFailed | None = None
        running = True
        try:
            while running:
                jobs, running = self._gather()
                results: list[object] = []
                if failure is None:
                    try:
                        with tables.translated(self._path):
                            results = self._commit(jobs)
                    except OSError as no:
                        failure = _failed(self._path, no)
                    except Exception as no:  # noqa: BLE001  # All that wait must hear of it.
                        failure = no if isinstance(no, LedgerFailed) else LedgerFailed(str(no))
                self._tell(self._settle, jobs, results, failure)
                if failure is None:
                    try:
                        self._mark.sync_in_time()
                    except OSError as no:
                        failure = _failed(self._path, no)
        finally:
            self._connection.close()
            self._mark.close()
            with contextlib.suppress(OSError):  # Numbers then stay reserved, and unused.
                self._fencing.close(clean=failure is None)
                self._reserve.close()
            self._tell(self._end)

    def _gather(self) -> tuple[list[WriteJob], bool]:
        """Wait for a job; return it with all that wait behind it, and whether to go on."""
        jobs: list[WriteJob] = []
        item = next_of(self._queue, self._mark, self._reserve)
        while item is not None:
            jobs.append(item)
            try:
                item = self._queue.get_nowait()
            except queue.Empty:
                return jobs, True
        return jobs, False

    def _commit(self, jobs: Sequence[WriteJob]) -> list[object]:
        rows = [row for job in jobs for row in job.rows]
        self._fencing.reserve(max((job.fencing for job in jobs), default=0))
        self._reserve.refill()
        try:
            results = self._transact(jobs, rows)
        except sqlite3.OperationalError as no:
            # Nothing of it was written: unlike after a failed sync, it may be tried again.
            if no.sqlite_errorcode & 0xFF != sqlite3.SQLITE_FULL or not self._reserve.spend():
                raise
            results = self._transact(jobs, rows)
        if rows:
            self._mark.write(rows[-1].seq, rows[-1].chain)
        return results

    def _transact(self, jobs: Sequence[WriteJob], rows: Sequence[FactRow]) -> list[object]:
        works = [job.work for job in jobs if job.work is not None]
        if not works and len(rows) <= tables.ROWS_PER_STATEMENT:
            tables.insert(self._connection, rows)  # A single statement is its own transaction.
            return [None] * len(jobs)
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            tables.insert(self._connection, rows)
            results = [job.work and job.work(self._connection) for job in jobs]
            self._connection.execute("COMMIT")
        except BaseException:
            # SQLite rolls back by itself after the errors that matter most, such as a full disk.
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise
        return results

    def _settle(
        self, jobs: Sequence[WriteJob], results: Sequence[object], failure: LedgerFailed | None
    ) -> None:
        self._settled(jobs, failure)
        for number, job in enumerate(jobs):
            if job.done.done():
                continue  # Its waiter has been cancelled.
            if failure is None:
                job.done.set_result(results[number])
            else:
                job.done.set_exception(LedgerFailed(str(failure)))

    def _end(self) -> None:
        if not self._ended.done():
            self._ended.set_result(None)

    def _tell(self, callback: Callable[..., None], *arguments: object) -> None:
        try:
            self._loop.call_soon_threadsafe(callback, *arguments)
        except RuntimeError:
            if not self._loop.is_closed():
                raise
            # The loop is gone, and everybody who could have waited with it.


def _failed(path: Path, error: OSError) -> LedgerFailed:
    return LedgerFailed(
        f"{place_of(path)} failed: {error}. Make room on the disk or repair it, then start again: "
        "what was acknowledged is safe."
    )
