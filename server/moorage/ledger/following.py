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
    Position,
    translate_errors,
)
from moorage.ledger.codec import unseal
from moorage.ledger.inspection import check_links
from moorage.ledger.reading import StoredHistory
from moorage.storage.base import FollowedFacts

PIECE_FACTS: Final = 200
"""Number of facts taken before other tasks may run."""


class FollowedLedger(StoredHistory):
    """Reads a history while another process writes it; implements `ledger.base.LedgerHistory`.

    Args:
        facts: The facts, in a database that another process writes.
    """

    def __init__(self, facts: FollowedFacts) -> None:
        super().__init__(facts)
        self._facts = facts
        self._taken_seq = 0
        self._chain = 0
        self._is_whole = False

    @property
    def last_seq(self) -> int:
        """See `LedgerHistory.last_seq`: the last fact that was taken."""
        return self._taken_seq

    @property
    def position(self) -> Position | None:
        """The position up to which facts were taken; None if a piece was not read completely."""
        return Position(self._taken_seq, self._chain) if self._is_whole else None

    def close(self) -> None:
        """Close the connection to the database."""
        self._facts.close()

    async def load(self, take: Callable[[Sequence[Fact]], None]) -> None:
        """Read the newest checkpoint and the facts after it.

        Raises:
            LedgerError: The ledger cannot be read.
        """
        recovered, loaded = await asyncio.to_thread(self._load)
        while piece := await asyncio.to_thread(lambda: list(islice(recovered, PIECE_FACTS))):
            take(piece)
        self._taken_seq, self._chain = loaded
        self._is_whole = True

    async def follow(self, take: Callable[[Sequence[Fact]], None]) -> bool:
        """Take facts that were written since the last call; return whether all were taken.

        A cancelled call has taken whole pieces, and the next call continues after them.

        Raises:
            LedgerFailed: The database cannot be read now.
            LedgerError: The stored facts do not continue those that were taken: load the ledger
                again.
        """
        entries, last_seq = await asyncio.to_thread(self._since)
        for start in range(0, len(entries), PIECE_FACTS):
            piece = entries[start : start + PIECE_FACTS]
            self._is_whole = False
            take([fact for fact, _ in piece])
            self._taken_seq, self._chain = piece[-1][1]
            self._is_whole = True
            await asyncio.sleep(0)
        return self._taken_seq >= last_seq

    async def history(
        self, subject: str, after: int = 0, limit: int = PAGE_FACTS_MAX
    ) -> list[LedgerEntry]:
        return self._entries_taken(await super().history(subject, after, limit))

    async def read(
        self, after: int = 0, limit: int = PAGE_FACTS_MAX, kind: str | None = None
    ) -> list[LedgerEntry]:
        return self._entries_taken(await super().read(after, limit, kind))

    def _entries_taken(self, entries: list[LedgerEntry]) -> list[LedgerEntry]:
        return [entry for entry in entries if entry.seq <= self._taken_seq]

    def _load(self) -> tuple[Iterator[Fact], Position]:
        with translate_errors(), self._reading.reading() as facts:
            last_seq = facts.last_seq()
            checkpoint, parts, _ = self.newest_good(facts, last_seq)
            loaded = Position(last_seq, facts.chain_of(last_seq) or 0)
        return self.recovered(parts, checkpoint.seq if checkpoint else 0, last_seq), loaded

    def _since(self) -> tuple[list[tuple[Fact, Position]], int]:
        taken = Position(self._taken_seq, self._chain)
        with translate_errors():
            last_seq = self._facts.last_seq()
            if last_seq == taken.seq:
                return [], last_seq
            with self._reading.reading() as facts:
                chain = facts.chain_of(taken.seq)
                rows = facts.page(taken.seq, PAGE_FACTS_MAX, PAGE_BYTES_MAX)
        if chain != taken.chain or not rows:  # Pruned, or another history.
            raise LedgerError(f"the facts in {self._place} do not continue from fact {taken.seq}")
        check_links(rows, taken.seq, chain, (), self._place)
        return [
            (unseal(row, self._place).fact, Position(row.seq, row.chain)) for row in rows
        ], last_seq
