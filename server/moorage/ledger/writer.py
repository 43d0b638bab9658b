"""Group commit: one thread commits everything that waits in one transaction.

While a transaction is being synced, the next ones' jobs gather in the queue and then share one
sync: the slower the disk, the larger the groups. If the disk is quick, the event loop itself waits
for a lone job: a wake-up by the thread would take as long as the sync.
"""

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import msgspec

from moorage.ledger.base import LedgerFailed
from moorage.storage.base import FactRow, Facts, FactStore, StorageError

QUICK_SECONDS: Final = 0.002
"""Seconds that the event loop waits for a commit; it waits only if the latest one took less."""


class WriteJob(msgspec.Struct, frozen=True, eq=False):
    """Facts, or another change, to be made durable.

    Args:
        done: Becomes what `work` returned once the job is durable, or a `LedgerFailed`.
        fencing: The highest fencing number in the facts; 0 if there is none.
        work: Another change to the tables, or None.
    """

    done: asyncio.Future[object]
    rows: Sequence[FactRow] = ()
    fencing: int = 0
    work: Callable[[Facts], object] | None = None


class _Finished(NamedTuple):
    jobs: Sequence[WriteJob]
    results: Sequence[object]
    failure: LedgerFailed | None


class GroupCommit:
    """The writing thread. Jobs become durable in the order in which they were submitted.

    Args:
        store: The open store; nothing else commits to it.
        settled: Called on the loop after every transaction, before the futures of its jobs are
            resolved, with the jobs, and the transaction's failure or None.
    """

    def __init__(
        self, store: FactStore, settled: Callable[[Sequence[WriteJob], LedgerFailed | None], None]
    ) -> None:
        self._store = store
        self._settled = settled
        self._loop = asyncio.get_running_loop()
        self._queue: queue.SimpleQueue[WriteJob | None] = queue.SimpleQueue()
        self._ended = self._loop.create_future()
        self._failure: LedgerFailed | None = None
        self._finished: queue.SimpleQueue[_Finished] = queue.SimpleQueue()
        """Facts that the thread has committed, and the event loop has not processed yet."""
        self._unsettled = 0
        """Submitted jobs whose futures are not resolved yet. Only the event loop counts them."""
        self._seconds = 0.0
        """How long the latest commit of facts took."""
        # A daemon thread: a disk that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name="ledger-writer", daemon=True)
        self._thread.start()

    def submit(self, job: WriteJob) -> None:
        """Queue a job for the thread."""
        self._unsettled += 1
        self._queue.put(job)

    def commit_at_once(self, job: WriteJob) -> bool:
        """Submit a job and wait for its commit; if that would be slow, do nothing and return False.

        The event loop waits for `QUICK_SECONDS` at most. So a disk that hangs delays no message to
        agents and other clients.
        """
        quick = self._store.is_local and self._seconds < QUICK_SECONDS
        if self._unsettled or not quick:
            return False
        self.submit(job)
        with contextlib.suppress(queue.Empty):
            self._settle(self._finished.get(timeout=QUICK_SECONDS))
        return True

    async def stop(self) -> None:
        """Wait until every submitted job is finished and the thread has ended."""
        self._queue.put(None)
        await self._ended
        self._thread.join()

    def _run(self) -> None:
        running = True
        wait_seconds: float | None = 0.0
        try:
            while running:
                jobs, running = self._gather(wait_seconds)
                if jobs:
                    self._report(jobs, self._commit(jobs))
                wait_seconds = None if self._failure is not None else self._keep_up()
        finally:
            self._store.end_writing(clean=self._failure is None)
            self._tell(self._end)

    def _keep_up(self) -> float | None:
        try:
            return self._store.upkeep()
        except StorageError as no:
            self._failure = LedgerFailed(str(no))
            self._report((), [])
            return None

    def _gather(self, wait_seconds: float | None) -> tuple[list[WriteJob], bool]:
        """Wait for a job; return it with all jobs behind it, and whether the thread continues."""
        jobs: list[WriteJob] = []
        try:
            item = self._queue.get(timeout=wait_seconds)
            while item is not None:
                jobs.append(item)
                item = self._queue.get_nowait()
        except queue.Empty:
            return jobs, True
        return jobs, False

    def _commit(self, jobs: Sequence[WriteJob]) -> list[object]:
        if self._failure is not None:
            return []
        began = time.monotonic()
        rows = [row for job in jobs for row in job.rows]
        fencing = max((job.fencing for job in jobs), default=0)
        works = [job.work for job in jobs if job.work is not None]
        try:
            returned = iter(self._store.commit(rows, fencing, works))
        except Exception as no:  # noqa: BLE001  # All waiting calls get the error.
            self._failure = LedgerFailed(str(no))
            return []
        if rows:
            self._seconds = time.monotonic() - began
        return [next(returned) if job.work is not None else None for job in jobs]

    def _report(self, jobs: Sequence[WriteJob], results: Sequence[object]) -> None:
        self._finished.put(_Finished(jobs, results, self._failure))
        self._tell(self._settle_finished)

    def _settle_finished(self) -> None:
        while not self._finished.empty():  # `commit_at_once` may have settled the jobs.
            self._settle(self._finished.get())

    def _settle(self, finished: _Finished) -> None:
        jobs, results, failure = finished
        self._unsettled -= len(jobs)
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
            # The loop has closed, so nothing waits any more.
