"""The ledger in a database, which the daemon uses.

A thread writes (`ledger.writer.GroupCommit`); questions and recovery read beside the thread.
"""

import asyncio
import zlib
from collections.abc import Callable, Coroutine, Iterable, Sequence
from itertools import islice
from typing import Any, Final, NamedTuple

from moorage.core.state.facts import Fact, Granted
from moorage.ledger.base import (
    CHECKPOINTS_KEPT,
    COMMIT_SECONDS_MAX,
    PENDING_FACTS_MAX,
    LedgerError,
    LedgerFailed,
    Position,
    Recovery,
    translate_errors,
)
from moorage.ledger.codec import FACTS, seal_all
from moorage.ledger.reading import StoredHistory
from moorage.ledger.writer import GroupCommit, WriteJob
from moorage.storage.base import Checkpoint, Facts, FactStore

CHECKPOINT_PART_FACTS: Final = 200
"""Number of facts encoded and written at a time: about a millisecond of the interpreter lock."""


class _Opened(NamedTuple):
    recovery: Recovery
    chain: int
    checkpoint_number: int
    lost: list[tuple[int, int]]


class StoredLedger(StoredHistory):
    """A ledger in a database, which this process writes; implements `ledger.base.Ledger`.

    Args:
        store: The facts in the database.
    """

    def __init__(self, store: FactStore) -> None:
        super().__init__(store)
        self._store = store
        self._writer: GroupCommit | None = None
        self._failure: LedgerFailed | None = None
        self._durable_seq = 0
        self._given_seq = 0
        self._chain = 0
        self._pending = 0
        self._append_lock = asyncio.Lock()
        self._late = 0
        """Calls of `append` that wait for room, or for earlier calls that wait."""
        self._space = asyncio.Event()
        self._checkpointing = asyncio.Lock()
        self._checkpoint_seq = 0
        self._checkpoint_number = 0

    @property
    def last_seq(self) -> int:
        return self._durable_seq

    @property
    def checkpoint_seq(self) -> int:
        return self._checkpoint_seq

    @property
    def is_full(self) -> bool:
        return self._store.is_full

    def check(self) -> None:
        if self._failure is not None:
            raise LedgerFailed(str(self._failure))

    async def open(self, known: Position | None = None) -> Recovery:
        """Open the ledger; see `Ledger.open`.

        Args:
            known: A follower's position: if the history continues from it, only newer facts are
                read.
        """
        if self._writer is not None:
            raise LedgerError(f"{self._place} is open already.")
        self._failure = None
        opened = await asyncio.to_thread(self._open, known)
        recovery = opened.recovery
        self._durable_seq = self._given_seq = recovery.last_seq
        self._chain, self._lost = opened.chain, opened.lost
        self._checkpoint_seq = recovery.checkpoint_seq
        self._checkpoint_number = opened.checkpoint_number
        self._writer = GroupCommit(self._store, self._settle)
        return recovery

    def append(
        self, facts: Sequence[Fact], at: float, *, lone: bool = False
    ) -> Coroutine[Any, Any, int]:
        if self._failure or self._writer is None or self._late or self._lacks_room(facts):
            self._late += 1
            return self._append_later(facts, at)
        return self._stored(*self._submit(facts, at, lone=lone))

    async def _append_later(self, facts: Sequence[Fact], at: float) -> int:
        """Append as soon as there is room, or raise the reason that prevents it."""
        # The lock is fair: while a call waits for room, later calls queue behind it.
        try:
            async with self._append_lock:
                while self._lacks_room(facts):
                    self._space.clear()
                    await self._space.wait()
                    self._usable()
                seq, job = self._submit(facts, at)
        finally:
            self._late -= 1
        return await self._stored(seq, job)

    def _lacks_room(self, facts: Sequence[Fact]) -> bool:
        return self._pending > 0 and self._pending + len(facts) > PENDING_FACTS_MAX

    def _submit(
        self, facts: Sequence[Fact], at: float, *, lone: bool = False
    ) -> tuple[int, WriteJob]:
        """Hand facts to the writer; return the seq of the last one, and the job."""
        writer = self._usable()
        rows = seal_all(self._given_seq + 1, at, facts, self._chain)
        if rows:
            self._chain = rows[-1].chain
        self._given_seq += len(rows)
        self._pending += len(rows)
        fencing = max((f.lease.fencing for f in facts if isinstance(f, Granted)), default=0)
        job = WriteJob(asyncio.get_running_loop().create_future(), rows, fencing)
        if not (lone and writer.commit_at_once(job)):
            writer.submit(job)
        return self._given_seq, job

    async def _stored(self, seq: int, job: WriteJob) -> int:
        await self._durable(job)
        return seq

    async def checkpoint(self, seq: int, facts: Iterable[Fact]) -> None:
        async with self._checkpointing:
            self._usable()
            if not self._checkpoint_seq <= seq <= self._given_seq:
                raise LedgerError(
                    f"a checkpoint of {self._place} as of fact {seq} is impossible; it must lie "
                    f"between the last checkpoint's ({self._checkpoint_seq}) and the last fact "
                    f"({self._given_seq})."
                )
            while await self._work(lambda facts: facts.sweep()):
                pass
            number = self._checkpoint_number = self._checkpoint_number + 1
            parts = checksum = 0
            rest = iter(facts)
            while chunk := [*islice(rest, CHECKPOINT_PART_FACTS)]:
                body = await asyncio.to_thread(FACTS.pack, chunk)
                await self._work(_part_writer(number, parts, body))
                checksum = zlib.crc32(body, checksum)
                parts += 1
            finished = Checkpoint.of_parts(number, seq, parts, checksum)
            await self._work(lambda facts: facts.finish_checkpoint(finished, CHECKPOINTS_KEPT))
            self._checkpoint_seq = seq

    async def prune(self, before: float, bytes_max: int) -> bool:
        return bool(await self._work(lambda facts: _prune(facts, before, bytes_max)))

    async def close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is None:
            return
        self._space.set()
        try:
            async with asyncio.timeout(COMMIT_SECONDS_MAX):
                await writer.stop()
        except TimeoutError:
            raise self._late_failure() from None
        finally:
            self._store.close()
        if self._failure is not None:
            raise self._failure

    # Opening: in a thread, since a log left by a crash is read back first.

    def _open(self, known: Position | None) -> _Opened:
        with translate_errors():
            opened = self._store.open()
            try:
                with self._store.reading() as facts:
                    last_seq = facts.last_seq()
                    if known is not None and facts.chain_of(known.seq) != known.chain:
                        known = None
                    if known is None:
                        checkpoint, parts, damaged = self.newest_good(facts, last_seq)
                    else:
                        finished = facts.checkpoints()
                        checkpoint, parts, damaged = finished[0] if finished else None, [], []
                    number, lost = facts.last_checkpoint_number(), facts.lost_ranges()
                    chain = facts.chain_of(last_seq) or 0
                if damaged:
                    self._store.commit([], 0, [_drop(each) for each in damaged])
            except BaseException:
                self._store.end_writing(clean=False)
                self._store.close()
                raise
        warnings = opened.warnings + [
            f"{self._place}: the checkpoint as of fact {each.seq} is damaged and was dropped; "
            "more facts are replayed instead. Check the disk."
            for each in damaged
        ]
        seq = checkpoint.seq if checkpoint else 0
        facts_left = self.recovered(parts, seq if known is None else known.seq, last_seq)
        goes_on = known is not None
        recovery = Recovery(facts_left, last_seq, seq, tuple(warnings), opened.fencing, goes_on)
        return _Opened(recovery, chain, number, lost)

    def _check_readable(self) -> None:
        self._usable()

    # Writing.

    def _usable(self) -> GroupCommit:
        self.check()
        if self._writer is None:
            raise LedgerError(f"{self._place} is not open.")
        return self._writer

    async def _work(self, work: Callable[[Facts], object]) -> object:
        """Commit a change to the tables, and return its result."""
        writer = self._usable()
        job = WriteJob(asyncio.get_running_loop().create_future(), work=work)
        writer.submit(job)
        return await self._durable(job)

    async def _durable(self, job: WriteJob) -> object:
        if job.done.done():
            return job.done.result()
        late = job.done.get_loop().call_later(COMMIT_SECONDS_MAX, self._give_up, job)
        try:
            return await job.done
        finally:
            late.cancel()

    def _give_up(self, job: WriteJob) -> None:
        if not job.done.done():
            job.done.set_exception(self._late_failure())

    def _late_failure(self) -> LedgerFailed:
        return self._fail(f"the disk took longer than {COMMIT_SECONDS_MAX:g} s")

    def _fail(self, finding: str) -> LedgerFailed:
        self._failure = LedgerFailed(
            f"{self._place} failed: {finding}. Repair the disk, then start again: acknowledged "
            "changes are safe."
        )
        self._space.set()
        return self._failure

    def _settle(self, jobs: Sequence[WriteJob], failure: LedgerFailed | None) -> None:
        count = sum(len(job.rows) for job in jobs)
        self._pending -= count
        if failure is None:
            self._durable_seq += count
        else:
            self._failure = failure
        self._space.set()


def _part_writer(checkpoint: int, number: int, body: bytes) -> Callable[[Facts], object]:
    return lambda facts: facts.insert_part(checkpoint, number, body)


def _drop(checkpoint: Checkpoint) -> Callable[[Facts], object]:
    return lambda facts: facts.drop_checkpoint(checkpoint)


def _prune(facts: Facts, before: float, bytes_max: int) -> bool:
    """Delete some of the oldest facts, only if both checkpoints include them."""
    finished = facts.checkpoints()
    if len(finished) < CHECKPOINTS_KEPT:
        return False
    return facts.prune(min(each.seq for each in finished), before, bytes_max)
