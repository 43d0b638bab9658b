"""The ledger in memory, for tests, trials and demonstrations. The facts end with the process.

Facts pass the same codec and checks as on disk, so that a fact that the disk could not hold fails
here, too. Each call yields to other tasks once, as if it waited for a disk.
"""

import asyncio
import os
import zlib
from bisect import bisect_right
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from moorage.core.state.facts import Fact
from moorage.ledger.base import (
    CHECKPOINTS_KEPT,
    PAGE_BYTES_MAX,
    PAGE_FACTS_MAX,
    LedgerCorrupt,
    LedgerEntry,
    LedgerError,
    LedgerLocked,
    Recovery,
)
from moorage.ledger.codec import FACTS, seal_all, unseal
from moorage.storage.base import FactRow

_PLACE = "the ledger in memory"


@dataclass(slots=True)
class MemoryStorage:
    """The stored part of a `MemoryLedger`; a later ledger with the same object continues from it.

    Args:
        checkpoints: Seq, bytes and checksum of each checkpoint, oldest first.
        taken: Whether a ledger has opened this storage.
        pruned: The last fact that was deleted.
    """

    rows: list[FactRow] = field(default_factory=list[FactRow])
    checkpoints: list[tuple[int, bytes, int]] = field(default_factory=list[tuple[int, bytes, int]])
    taken: bool = False
    pruned: int = 0


class MemoryLedger:
    """A ledger in memory, for tests and trials; implements `ledger.base.Ledger`.

    Args:
        storage: The storage of an earlier ledger; None: an empty storage.
    """

    def __init__(self, storage: MemoryStorage | None = None) -> None:
        self._storage = MemoryStorage() if storage is None else storage
        self._open = False

    @property
    def last_seq(self) -> int:
        return self._storage.rows[-1].seq if self._storage.rows else 0

    @property
    def checkpoint_seq(self) -> int:
        checkpoints = self._storage.checkpoints
        return checkpoints[-1][0] if checkpoints else 0

    @property
    def is_full(self) -> bool:
        return False

    def check(self) -> None:
        """Do nothing, since memory does not fail; see `Ledger.check`."""

    async def open(self) -> Recovery:
        if self._open:
            raise LedgerError(f"{_PLACE} is open already.")
        if self._storage.taken:
            raise LedgerLocked(_PLACE, os.getpid())
        seq, body, warnings = self._newest_good()
        self._open = self._storage.taken = True
        last_seq = self.last_seq
        facts = self._recover(seq, body, last_seq)
        return Recovery(facts, last_seq, seq, tuple(warnings))

    def append(
        self, facts: Sequence[Fact], at: float, *, lone: bool = False
    ) -> Coroutine[Any, Any, int]:
        del lone  # All are durable at once.
        self._check_open()
        chain = self._storage.rows[-1].chain if self._storage.rows else 0
        rows = seal_all(self.last_seq + 1, at, facts, chain)
        self._storage.rows.extend(rows)
        return asyncio.sleep(0, self.last_seq)

    async def checkpoint(self, seq: int, facts: Iterable[Fact]) -> None:
        self._check_open()
        checkpoints, oldest = self._storage.checkpoints, self.checkpoint_seq
        if not oldest <= seq <= self.last_seq:
            raise LedgerError(
                f"a checkpoint of {_PLACE} as of fact {seq} is impossible; it must lie between "
                f"the last checkpoint's ({oldest}) and the last fact ({self.last_seq})."
            )
        body = FACTS.pack(facts)
        checkpoints.append((seq, body, zlib.crc32(body)))
        del checkpoints[:-CHECKPOINTS_KEPT]
        await asyncio.sleep(0)

    async def history(
        self, subject: str, after: int = 0, limit: int = PAGE_FACTS_MAX
    ) -> list[LedgerEntry]:
        await asyncio.sleep(0)
        self._check_open()
        return self._page((row for row in self._after(after) if row.subject == subject), limit)

    async def read(
        self, after: int = 0, limit: int = PAGE_FACTS_MAX, kind: str | None = None
    ) -> list[LedgerEntry]:
        del kind  # Without a disk, leaving facts out saves nothing.
        await asyncio.sleep(0)
        self._check_open()
        after = max(after, self._storage.pruned)
        return self._page(self._gapless(after), limit)

    async def prune(self, before: float, bytes_max: int) -> bool:
        self._check_open()
        await asyncio.sleep(0)
        storage = self._storage
        if len(storage.checkpoints) < CHECKPOINTS_KEPT:
            return False
        limit = min(seq for seq, _, _ in storage.checkpoints)
        used = sum(len(row.body) for row in storage.rows)
        while (oldest := storage.rows[0]).seq < limit and (oldest.at < before or used > bytes_max):
            storage.pruned = oldest.seq
            used -= len(oldest.body)
            del storage.rows[0]
        return False

    async def history_start(self) -> float | None:
        self._check_open()
        await asyncio.sleep(0)
        return self._storage.rows[0].at if self._storage.pruned else None

    async def close(self) -> None:
        if self._open:
            self._open = self._storage.taken = False

    def _check_open(self) -> None:
        if not self._open:
            raise LedgerError(f"{_PLACE} is not open.")

    def _newest_good(self) -> tuple[int, bytes, list[str]]:
        warnings: list[str] = []
        checkpoints = self._storage.checkpoints
        while checkpoints:
            seq, body, checksum = checkpoints[-1]
            if seq > self.last_seq:
                raise LedgerCorrupt(
                    _PLACE,
                    f"its newest checkpoint is as of fact {seq}, but its facts end with "
                    f"{self.last_seq}",
                )
            if zlib.crc32(body) == checksum:
                return seq, body, warnings
            warnings.append(
                f"{_PLACE}: the checkpoint as of fact {seq} is damaged and was dropped; more "
                "facts are replayed instead."
            )
            checkpoints.pop()
        return 0, b"", warnings

    def _recover(self, checkpoint_seq: int, body: bytes, last_seq: int) -> Iterator[Fact]:
        if body:
            where = f"the checkpoint as of fact {checkpoint_seq}"
            yield from FACTS.unpack(body, _PLACE, where)
        for row in self._gapless(checkpoint_seq):
            if row.seq > last_seq:
                return
            yield unseal(row, _PLACE).fact

    def _after(self, seq: int) -> Iterator[FactRow]:
        rows = self._storage.rows
        start = bisect_right(rows, seq, key=lambda row: row.seq)
        return (rows[index] for index in range(start, len(rows)))

    def _gapless(self, after: int) -> Iterator[FactRow]:
        for seq, row in enumerate(self._after(after), after + 1):
            if row.seq != seq:
                raise LedgerCorrupt(_PLACE, f"fact {seq} is missing; {row.seq} follows")
            yield row

    def _page(self, rows: Iterator[FactRow], limit: int) -> list[LedgerEntry]:
        entries: list[LedgerEntry] = []
        size = 0
        for row in rows:
            if len(entries) >= min(limit, PAGE_FACTS_MAX) or size > PAGE_BYTES_MAX:
                break
            entries.append(unseal(row, _PLACE))
            size += len(row.body)
        return entries
