"""Group commit: one thread commits everything that waits in one transaction.

While a transaction is being synced, the next ones' jobs gather in the queue and then share one
sync: the slower the disk, the larger the groups.
"""

import asyncio
import queue
import threading
from collections.abc import Callable, Sequence

import msgspec

from moorage.ledger.base import LedgerFailed
from moorage.storage.base import FactRow, Facts, FactStore, StorageError


class WriteJob(msgspec.Struct, frozen=True, eq=False):
    """Facts, or another change, to be made durable.

    Args:
        done: Becomes what `work` returned once the job is durable, or a `LedgerFailed`.
        rows: Facts to add.
        fencing: The highest fencing number in them; 0 if there is none.
        work: Another change to the tables, or None.
    """

    done: asyncio.Future[object]
    rows: Sequence[FactRow] = ()
    fencing: int = 0
    work: Callable[[Facts], object] | None = None


class GroupCommit:
    """The writing thread. Jobs become durable in the order in which they were submitted.

    Args:
        store: Open; nothing else commits to it.
        settled: Called on the loop after every transaction, before the futures of its jobs are
            resolved, with the jobs and its failure or None.
    """

    def __init__(
        self, store: FactStore, settled: Callable[[Sequence[WriteJob], LedgerFailed | None], None]
    ) -> None:
        self._store = store
        self._settled = settled
        self._loop = asyncio.get_running_loop()
        self._queue: queue.SimpleQueue[WriteJob | None] = queue.SimpleQueue()
        self._ended = self._loop.create_future()
        # A daemon thread: a disk that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name="ledger-writer", daemon=True)
        self._thread.start()

    def submit(self, job: WriteJob) -> None:
        """Queue a job for the thread."""
        self._queue.put(job)

    async def stop(self) -> None:
        """Wait until every submitted job is finished and the thread has ended."""
        self._queue.put(None)
        await self._ended
        self._thread.join()

    def _run(self) -> None:
        failure: LedgerFailed | None = None
        running = True
        wait_seconds: float | None = None
        try:
            while running:
                jobs, running = self._gather(wait_seconds)
                results, failure = self._commit(jobs, failure)
                self._tell(self._settle, jobs, results, failure)
                wait_seconds = None
                if failure is None:
                    try:
                        wait_seconds = self._store.upkeep()
                    except StorageError as no:
                        failure = LedgerFailed(str(no))
                        self._tell(self._settled, (), failure)
        finally:
            self._store.end_writing(clean=failure is None)
            self._tell(self._end)

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

    def _commit(
        self, jobs: Sequence[WriteJob], failure: LedgerFailed | None
    ) -> tuple[list[object], LedgerFailed | None]:
        if failure is not None or not jobs:
            return [], failure
        rows = [row for job in jobs for row in job.rows]
        fencing = max((job.fencing for job in jobs), default=0)
        works = [job.work for job in jobs if job.work is not None]
        try:
            returned = iter(self._store.commit(rows, fencing, works))
        except Exception as no:  # noqa: BLE001  # All that wait must hear of it.
            return [], LedgerFailed(str(no))
        return [next(returned) if job.work is not None else None for job in jobs], None

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
