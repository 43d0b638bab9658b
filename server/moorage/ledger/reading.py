"""Reads the facts in a database: for recovery, and for questions about the past."""

import asyncio
from collections.abc import Iterator

from moorage.core.state.facts import Fact
from moorage.ledger.base import (
    PAGE_BYTES_MAX,
    PAGE_FACTS_MAX,
    LedgerCorrupt,
    LedgerEntry,
    translate_errors,
)
from moorage.ledger.codec import FACTS, unseal
from moorage.ledger.inspection import check_links, without_checkpoint
from moorage.storage.base import Checkpoint, FactReading, Facts


class StoredHistory:
    """The readable facts in a database; implements `ledger.base.LedgerHistory` without `last_seq`.

    Args:
        reading: The facts in the database.
    """

    def __init__(self, reading: FactReading) -> None:
        self._reading = reading
        self._place = reading.place
        self._asking = asyncio.Lock()
        self._lost: list[tuple[int, int]] = []

    def _check_readable(self) -> None:
        """Raise a `LedgerError` if the facts cannot be read now."""

    async def history(
        self, subject: str, after: int = 0, limit: int = PAGE_FACTS_MAX
    ) -> list[LedgerEntry]:
        return await self._read(after, limit, subject)

    async def read(
        self, after: int = 0, limit: int = PAGE_FACTS_MAX, kind: str | None = None
    ) -> list[LedgerEntry]:
        return await self._read(after, limit, None, kind)

    async def history_start(self) -> float | None:
        async with self._asking:
            self._check_readable()
            return await asyncio.to_thread(self._start)

    def newest_good(
        self, facts: Facts, last_seq: int
    ) -> tuple[Checkpoint | None, list[bytes], list[Checkpoint]]:
        """Return the newest readable checkpoint, its parts, and damaged newer checkpoints."""
        finished = facts.checkpoints()
        if finished and finished[0].seq > last_seq:
            raise LedgerCorrupt(
                self._place,
                f"its newest checkpoint is as of fact {finished[0].seq}, but its facts end with "
                f"{last_seq}",
            )
        damaged = list[Checkpoint]()
        for checkpoint in finished:
            parts = facts.checkpoint_parts(checkpoint)
            if parts is not None:
                return checkpoint, parts, damaged
            damaged.append(checkpoint)
        if pruned := facts.pruned_seq():
            raise LedgerCorrupt(self._place, without_checkpoint(pruned))
        return None, [], damaged

    def recovered(self, parts: list[bytes], checkpoint_seq: int, last_seq: int) -> Iterator[Fact]:
        """Yield the facts of a checkpoint, then the facts after it."""
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

    async def _read(
        self, after: int, limit: int, subject: str | None, kind: str | None = None
    ) -> list[LedgerEntry]:
        # One question at a time: more would only occupy threads that wait for the connection.
        async with self._asking:
            self._check_readable()
            return await asyncio.to_thread(self._entries, after, limit, subject, kind)

    def _entries(
        self, after: int, limit: int, subject: str | None, kind: str | None = None
    ) -> list[LedgerEntry]:
        with translate_errors(), self._reading.reading() as facts:
            if subject is None:
                after = max(after, facts.pruned_seq())
            rows = facts.page(after, min(limit, PAGE_FACTS_MAX), PAGE_BYTES_MAX, subject)
            chain = facts.chain_of(after) if subject is None else None
        ends = {rows[0].seq, rows[-1].seq} if rows else set[int]()
        entries = [
            unseal(row, self._place) for row in rows if kind in {None, row.kind} or row.seq in ends
        ]
        if subject is None:
            check_links(rows, after, chain, self._lost, self._place)
        return entries

    def _start(self) -> float | None:
        with translate_errors(), self._reading.reading() as facts:
            return facts.oldest_at() if facts.pruned_seq() else None
