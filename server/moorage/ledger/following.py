"""Reads facts that another process writes, in order, each once."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Final

from moorage.core.state.facts import Fact
from moorage.ledger.base import (
    PAGE_BYTES_MAX,
    PAGE_FACTS_MAX,
    LedgerEntry,
    LedgerError,
    translated,
)
from moorage.ledger.codec import unseal
from moorage.ledger.inspection import check_linked
from moorage.ledger.reading import StoredHistory
from moorage.storage.base import FollowedFacts

PIECE_FACTS: Final = 200
"""Facts that are taken at a time, before others have their turn."""


class FollowedLedger(StoredHistory):
    """`ledger.base.LedgerHistory`, as far as its facts were taken. Read the contract there.

    Args:
        facts: In a database that another process writes.

    """

    def __init__(self, facts: FollowedFacts) -> None:
        super().__init__(facts)
        self._facts = facts
        self._taken_seq = 0
        self._read_seq = 0
        self._chain = 0

    @property
    def last_seq(self) -> int:
        """See `LedgerHistory.last_seq`: the last one that was taken."""
        return self._taken_seq

    async def load(self, take: Callable[[Sequence[Fact]], None]) -> None:
        """Read the newest checkpoint and the facts after it.

        Raises:
            LedgerError: It cannot be read.

        """
        recovered, last_seq = await asyncio.to_thread(self._load)
        while piece := await asyncio.to_thread(lambda: list(islice(recovered, PIECE_FACTS))):
            take(piece)
        self._taken_seq = self._read_seq = last_seq

    async def follow(self, take: Callable[[Sequence[Fact]], None]) -> bool:
        """Read facts that were written since; return whether these were all.

        Raises:
            LedgerFailed: The database cannot be read now.
            LedgerError: What it holds does not go on from what was taken: load it again.

        """
        entries, last_seq = await asyncio.to_thread(self._since)
        for start in range(0, len(entries), PIECE_FACTS):
            piece = entries[start : start + PIECE_FACTS]
            take([entry.fact for entry in piece])
            self._taken_seq = piece[-1].seq
            await asyncio.sleep(0)
        return self._read_seq >= last_seq

    async def history(
        self, subject: str, after: int = 0, limit: int = PAGE_FACTS_MAX
    ) -> list[LedgerEntry]:
        """See `LedgerHistory.history`."""
        return self._taken(await super().history(subject, after, limit))

    async def read(self, after: int = 0, limit: int = PAGE_FACTS_MAX) -> list[LedgerEntry]:
        """See `LedgerHistory.read`."""
        return self._taken(await super().read(after, limit))

    def _taken(self, entries: list[LedgerEntry]) -> list[LedgerEntry]:
        return [entry for entry in entries if entry.seq <= self._taken_seq]

    def _load(self) -> tuple[Iterator[Fact], int]:
        with translated(), self._reading.reading() as facts:
            last_seq = facts.last_seq()
            checkpoint, parts, _ = self.newest_good(facts, last_seq)
            self._chain = facts.chain_of(last_seq) or 0
        return self.recovered(parts, checkpoint.seq if checkpoint else 0, last_seq), last_seq

    def _since(self) -> tuple[list[LedgerEntry], int]:
        with translated():
            last_seq = self._facts.last_seq()
            if last_seq == self._read_seq:
                return [], last_seq
            with self._reading.reading() as facts:
                chain = facts.chain_of(self._read_seq)
                rows = facts.page(self._read_seq, PAGE_FACTS_MAX, PAGE_BYTES_MAX)
        if chain != self._chain or not rows:  # Pruned, or the facts of another history.
            raise LedgerError(f"{self._place} does not go on from fact {self._read_seq}")
        check_linked(rows, self._read_seq, chain, (), self._place)
        entries = [unseal(row, self._place) for row in rows]
        self._read_seq, self._chain = rows[-1].seq, rows[-1].chain
        return entries, last_seq
