"""The ledger in one SQLite file: what the daemon uses by default.

Three parties share the file: the writing thread (`ledger.writer.GroupCommit`), one reading
    connection
for questions and for recovery, and no other process, which `ledger.lock.WriterLock` sees to.
"""

import asyncio
import sqlite3
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Final, NamedTuple

from moorage.core.state.facts import Fact, Granted
from moorage.durability import DurableMark, Found, Reserve, owner_only, sync_directory
from moorage.ledger import tables
from moorage.ledger.base import (
    COMMIT_SECONDS_MAX,
    PAGE_FACTS_MAX,
    PENDING_FACTS_MAX,
    LedgerCorrupt,
    LedgerEntry,
    LedgerError,
    LedgerFailed,
    Recovery,
    place_of,
)
from moorage.ledger.codec import FACTS, seal, unseal
from moorage.ledger.fencing import Fencing
from moorage.ledger.inspection import LABEL, check_linked, look, mark_path, without_checkpoint
from moorage.ledger.lock import WriterLock
from moorage.ledger.tables import Checkpoint
from moorage.ledger.writer import GroupCommit, WriteJob

CHECKPOINT_PART_FACTS: Final = 200
"""Facts encoded and written at a time: about a millisecond of the interpreter lock."""


class _Opened(NamedTuple):
    connection: sqlite3.Connection
    recovery: Recovery
    chain: int
    mark: DurableMark
    fencing: Fencing
    reserve: Reserve


class SqliteLedger:
    """`ledger.base.Ledger` on a file. Read the contract there.

    Args:
        path: The database file; made where it is missing, its directory too. Readable by its
            owner only: requests of tenants are in it.

    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._place = place_of(path)
        self._lock = WriterLock(path)
        self._writer: GroupCommit | None = None
        self._reader: sqlite3.Connection | None = None
        self._asking = asyncio.Lock()
        self._reading = threading.Lock()
        self._failure: LedgerFailed | None = None
        self._durable_seq = 0
        self._given_seq = 0
        self._chain = 0
        self._lost: list[tuple[int, int]] = []
        self._reserve: Reserve | None = None
        self._pending = 0
        self._append_lock = asyncio.Lock()
        self._space = asyncio.Event()
        self._checkpointing = asyncio.Lock()
        self._checkpoint_seq = 0
        self._checkpoint_number = 0

    @property
    def last_seq(self) -> int:
        """See `Ledger.last_seq`."""
        return self._durable_seq

    @property
    def is_full(self) -> bool:
        """See `Ledger.is_full`."""
        return self._reserve is not None and self._reserve.spent

    async def open(self) -> Recovery:
        """See `Ledger.open`."""
        if self._writer is not None:
            raise LedgerError(f"{self._place} is open already.")
        self._failure = None
        opened = await asyncio.to_thread(self._open)
        recovery = opened.recovery
        self._durable_seq = self._given_seq = recovery.last_seq
        self._chain = opened.chain
        self._checkpoint_seq = recovery.checkpoint_seq
        self._writer = GroupCommit(
            opened.connection,
            self._path,
            opened.mark,
            opened.fencing,
            opened.reserve,
            self._settled,
        )
        self._reserve = opened.reserve
        return recovery

    async def append(self, facts: Sequence[Fact], at: float) -> int:
        """See `Ledger.append`."""
        # The lock is fair: while one call waits for room, later ones queue behind it.
        async with self._append_lock:
            writer = self._usable()
            while self._pending and self._pending + len(facts) > PENDING_FACTS_MAX:
                self._space.clear()
                await self._space.wait()
                writer = self._usable()
            rows, chain = [], self._chain
            for seq, fact in enumerate(facts, self._given_seq + 1):
                rows.append(seal(seq, at, fact, chain))
                chain = rows[-1].chain
            self._chain = chain
            self._given_seq += len(rows)
            self._pending += len(rows)
            seq = self._given_seq
            fencing = max((f.lease.fencing for f in facts if isinstance(f, Granted)), default=0)
            job = WriteJob(asyncio.get_running_loop().create_future(), rows, fencing)
            writer.submit(job)
        await self._durable(job)
        return seq

    async def checkpoint(self, seq: int, facts: Sequence[Fact]) -> None:
        """See `Ledger.checkpoint`."""
        async with self._checkpointing:
            self._usable()
            if not self._checkpoint_seq <= seq <= self._given_seq:
                raise LedgerError(
                    f"a checkpoint of {self._place} as of fact {seq} was asked for; it must lie "
                    f"between the last checkpoint's ({self._checkpoint_seq}) and the last fact "
                    f"({self._given_seq})."
                )
            while await self._work(tables.sweep):
                pass
            number = self._checkpoint_number = self._checkpoint_number + 1
            parts = checksum = 0
            for start in range(0, len(facts), CHECKPOINT_PART_FACTS):
                chunk = facts[start : start + CHECKPOINT_PART_FACTS]
                body = await asyncio.to_thread(FACTS.pack, chunk)
                await self._work(_part_writer(number, parts, body))
                checksum = zlib.crc32(body, checksum)
                parts += 1
            finished = tables.checkpoint(number, seq, parts, checksum)
            await self._work(lambda connection: tables.finish_checkpoint(connection, finished))
            self._checkpoint_seq = seq

    async def history(
        self, subject: str, after: int = 0, limit: int = PAGE_FACTS_MAX
    ) -> list[LedgerEntry]:
        """See `Ledger.history`."""
        return await self._asked(after, limit, subject)

    async def read(self, after: int = 0, limit: int = PAGE_FACTS_MAX) -> list[LedgerEntry]:
        """See `Ledger.read`."""
        return await self._asked(after, limit, None)

    async def prune(self, before: float, bytes_max: int) -> bool:
        """See `Ledger.prune`."""
        return bool(
            await self._work(lambda connection: tables.prune(connection, before, bytes_max))
        )

    async def kept_since(self) -> float | None:
        """See `Ledger.kept_since`."""
        async with self._asking:
            self._usable()
            return await asyncio.to_thread(self._kept_since)

    async def close(self) -> None:
        """See `Ledger.close`."""
        writer, self._writer = self._writer, None
        if writer is None:
            return
        self._space.set()
        try:
            async with asyncio.timeout(COMMIT_SECONDS_MAX):
                await writer.stop()
        except TimeoutError:
            raise self._fail(f"the disk took longer than {COMMIT_SECONDS_MAX:g} s") from None
        finally:
            with self._reading:
                if self._reader is not None:
                    self._reader.close()
                    self._reader = None
            self._lock.release()
        if self._failure is not None:
            raise self._failure

    # Opening: in a thread, since a log left by a crash is read back first.

    def _open(self) -> "_Opened":
        with ExitStack() as opened, tables.translated(self._path):
            self._make_file(opened)
            found = look(self._path)
            fencing, mark = self._beside(opened, found)
            connection = opened.enter_context(closing(tables.connect(self._path)))
            reader = opened.enter_context(closing(tables.connect_reader(self._path)))
            last_seq = tables.last_seq(connection)
            checkpoint, parts, warnings = self._newest_good(connection, last_seq)
            self._checkpoint_number = tables.last_checkpoint_number(connection)
            self._lost = tables.lost(connection)
            chain = tables.chain_of(connection, last_seq) or 0
            mark.write_both(last_seq, chain)
            opened.pop_all()
        self._reader = reader
        doubts = [doubt for doubt in (found.doubt, fencing.found.doubt) if last_seq and doubt]
        warnings += [f"{self._place}: {doubt}; it was written again." for doubt in doubts]
        checkpoint_seq = checkpoint.seq if checkpoint else 0
        facts = self._recovered(parts, checkpoint_seq, last_seq)
        recovery = Recovery(facts, last_seq, checkpoint_seq, tuple(warnings), fencing.floor)
        reserve = Reserve(self._path.with_suffix(".reserve"))
        return _Opened(connection, recovery, chain, mark, fencing, reserve)

    def _beside(self, opened: ExitStack, found: Found) -> tuple[Fencing, DurableMark]:
        """Open what lies beside the database; a database without it would be refused."""
        try:
            fencing = Fencing(self._path)
            opened.callback(fencing.close, clean=False)
            mark = DurableMark(
                mark_path(self._path), LABEL, found.first, found.second, found.writes
            )
        except OSError as no:
            raise LedgerError(f"{self._place} cannot be opened: {no}.") from no
        opened.callback(mark.close)
        return fencing, mark

    def _make_file(self, opened: ExitStack) -> None:
        """Lock, and see to it that the file exists and that its name outlives a power cut."""
        directory = self._path.parent
        try:
            if not directory.exists():
                directory.mkdir(parents=True, exist_ok=True)
                sync_directory(directory.parent)
            owner_only(self._path)  # First: the lock is on this file, too.
            self._lock.acquire()
            opened.callback(self._lock.release)
            sync_directory(directory)
        except OSError as no:
            raise LedgerError(
                f"{self._place} cannot be opened: {no}. The data directory must be a directory "
                "that this user may write to."
            ) from no

    def _newest_good(
        self, connection: sqlite3.Connection, last_seq: int
    ) -> tuple[Checkpoint | None, list[bytes], list[str]]:
        warnings: list[str] = []
        finished = tables.checkpoints(connection)
        if finished and finished[0].seq > last_seq:
            raise LedgerCorrupt(
                self._place,
                f"its newest checkpoint is as of fact {finished[0].seq}, but its facts end with "
                f"{last_seq}",
            )
        newest, parts, damaged = None, list[bytes](), list[Checkpoint]()
        for checkpoint in finished:
            found = tables.checkpoint_parts(connection, checkpoint)
            if found is not None:
                newest, parts = checkpoint, found
                break
            damaged.append(checkpoint)
        if newest is None and (pruned := tables.pruned_seq(connection)):
            raise LedgerCorrupt(self._place, without_checkpoint(pruned))
        for checkpoint in damaged:
            warnings.append(
                f"{self._place}: the checkpoint as of fact {checkpoint.seq} is damaged and was "
                "dropped; more facts are replayed instead. Check the disk."
            )
            tables.drop_checkpoint(connection, checkpoint)
        return newest, parts, warnings

    def _recovered(self, parts: list[bytes], checkpoint_seq: int, last_seq: int) -> Iterator[Fact]:
        where = f"the checkpoint as of fact {checkpoint_seq}"
        for part in parts:
            yield from FACTS.unpack(part, self._place, where)
        seq = checkpoint_seq
        while seq < last_seq:
            entries = self._entries(seq, min(PAGE_FACTS_MAX, last_seq - seq), None)
            if not entries:
                raise LedgerCorrupt(self._place, f"fact {seq + 1} of {last_seq} is missing")
            for entry in entries:
                yield entry.fact
            seq = entries[-1].seq

    # Reading.

    async def _asked(self, after: int, limit: int, subject: str | None) -> list[LedgerEntry]:
        # One at a time: more would only hold threads while they wait for the connection.
        async with self._asking:
            self._usable()
            return await asyncio.to_thread(self._entries, after, limit, subject)

    def _entries(self, after: int, limit: int, subject: str | None) -> list[LedgerEntry]:
        with self._reading:
            if self._reader is None:
                raise self._closed()
            with tables.translated(self._path), tables.one_moment(self._reader):
                if subject is None:
                    after = max(after, tables.pruned_seq(self._reader))
                rows = tables.page(self._reader, after, min(limit, PAGE_FACTS_MAX), subject)
                chain = tables.chain_of(self._reader, after) if subject is None else None
        entries = [unseal(row, self._place) for row in rows]
        if subject is None:
            check_linked(rows, after, chain, self._lost, self._place)
        return entries

    def _kept_since(self) -> float | None:
        with self._reading:
            if self._reader is None:
                raise self._closed()
            with tables.translated(self._path), tables.one_moment(self._reader):
                return tables.kept_since(self._reader)

    # Writing.

    def _usable(self) -> GroupCommit:
        if self._failure is not None:
            raise LedgerFailed(str(self._failure))
        if self._writer is None:
            raise self._closed()
        return self._writer

    def _closed(self) -> LedgerError:
        return LedgerError(f"{self._place} is not open.")

    async def _work(self, work: Callable[[sqlite3.Connection], object]) -> object:
        """Have a change to the tables made durable, and return what it returned."""
        writer = self._usable()
        job = WriteJob(asyncio.get_running_loop().create_future(), work=work)
        writer.submit(job)
        return await self._durable(job)

    async def _durable(self, job: WriteJob) -> object:
        try:
            async with asyncio.timeout(COMMIT_SECONDS_MAX):
                return await job.done
        except TimeoutError:
            raise self._fail(f"the disk took longer than {COMMIT_SECONDS_MAX:g} s") from None

    def _fail(self, finding: str) -> LedgerFailed:
        self._failure = LedgerFailed(
            f"{self._place} failed: {finding}. Repair the disk, then start again: what was "
            "acknowledged is safe."
        )
        self._space.set()
        return self._failure

    def _settled(self, jobs: Sequence[WriteJob], failure: LedgerFailed | None) -> None:
        count = sum(len(job.rows) for job in jobs)
        self._pending -= count
        if failure is None:
            self._durable_seq += count
        else:
            self._failure = failure
        self._space.set()


def _part_writer(
    checkpoint: int, number: int, body: bytes
) -> Callable[[sqlite3.Connection], object]:
    return lambda connection: tables.insert_part(connection, checkpoint, number, body)
