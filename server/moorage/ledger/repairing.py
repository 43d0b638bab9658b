"""Rebuilds a ledger without its lost part: only on a user's order.

The state is rebuilt from the newest good checkpoint and the facts after it, up to the first missing
fact. Later facts are not used, since they may depend on the missing fact.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from moorage.core.state.facts import Counted
from moorage.ledger.base import CHECKPOINTS_KEPT, LedgerError, translate_errors
from moorage.ledger.codec import FACTS, is_sealed, link, seal
from moorage.ledger.contents import LedgerContents, changes_of
from moorage.ledger.walk import HeldFacts, LedgerWalk, windows
from moorage.storage.base import Checkpoint, FactRow, run
from moorage.storage.sqlite import facts
from moorage.storage.sqlite.fact_tables import FactTables


@dataclass(frozen=True, slots=True)
class Salvage:
    """The readable rest of a ledger.

    Args:
        rows: The facts that stay, in order, linked again.
        filler: Replaces the last fact of the checkpoint if that fact is lost.
        lost: Ranges of missing facts.
        checkpoint: The last fact in the checkpoint to rebuild from; None if no state is left.
        said: One sentence per loss.
    """

    rows: list[HeldFacts]
    filler: FactRow | None
    lost: list[tuple[int, int]]
    checkpoint: int | None
    said: list[str]

    @property
    def last(self) -> tuple[int, int]:
        """Seq and chain of the last fact."""
        end = self.filler or (self.rows[-1] if self.rows else None)
        return (0, 0) if end is None else (end.seq, end.chain)


def salvage(found: LedgerWalk) -> Salvage:
    """Return the readable rest of a ledger.

    Raises:
        LedgerError: A newer release wrote facts, which must not be dropped.
    """
    if found.unknown:
        raise LedgerError(f"{found.unknown[0]} Nothing was changed.")
    base = found.checkpoints[0][0].seq if found.checkpoints else None
    if base is None and not found.pruned:
        base = 0
    rows = _link_again(found.rows)
    whole = next((r.chain for r in rows if r.seq == found.mark.first), None) == found.mark.second
    last, chain_before = base, None
    stays = [row for row in rows if base is None or row.seq <= base]
    for stored, row in zip(found.rows, rows, strict=True):
        if base is None or last is None or row.seq <= base:
            chain_before = stored.chain
            continue
        broken = chain_before is not None and stored.chain != link(stored.checksum, chain_before)
        if row.seq != last + 1 or (broken and not whole):
            break
        stays.append(row)
        last, chain_before = row.seq, stored.chain
    sentences = _loss(found, stays, base, last)
    filler = None
    if base and (not stays or stays[-1].seq < base):
        before = stays[-1].chain if stays and stays[-1].seq == base - 1 else 0
        filler = seal(base, time.time(), Counted(found.fencing_seen), before)
    return Salvage(stays, filler, _gaps(stays, found.pruned, filler), base, sentences)


def _link_again(rows: Sequence[HeldFacts]) -> list[HeldFacts]:
    """Return facts linked again, each to the preceding fact if that exists."""
    linked: list[HeldFacts] = []
    for row in rows:
        if linked and linked[-1].seq == row.seq - 1:
            linked.append(row._replace(chain=link(row.checksum, linked[-1].chain)))
        else:
            linked.append(row)
    return linked


def _gaps(
    rows: Sequence[HeldFacts], pruned: int, filler: FactRow | None = None
) -> list[tuple[int, int]]:
    gaps, expected = [], pruned + 1
    for seq in [*(row.seq for row in rows), *([filler.seq] if filler else [])]:
        if seq > expected:
            gaps.append((expected, seq - 1))
        expected = seq + 1
    return gaps


def _loss(
    found: LedgerWalk, stays: Sequence[HeldFacts], base: int | None, last: int | None
) -> list[str]:
    sentences = [
        f"{run(first, end)} of the history: `why` and backtests lack them."
        for first, end in _gaps(stays, found.pruned)
    ]
    if found.rows and not found.mark.known:
        sentences.append(f"the facts after fact {found.rows[-1].seq}, if there were any.")
    end = max([found.mark.first, last or 0, *(row.seq for row in found.rows)])
    if base is None:
        sentences.append("every lease, waiting request and cluster: no checkpoint can be read.")
    elif last is not None and end > last:
        sentences.append(f"{run(last + 1, end)}: all later grants and ends of leases.")
    elif found.unread and not found.rows and not found.checkpoints:
        sentences.append("every lease, waiting request and cluster: no fact can be read.")
    else:
        return sentences
    after = LedgerContents() if base is None else _contents(found, stays)
    return [*sentences, *_contents(found, found.rows).without(after).sentences()]


def remaining_contents(found: LedgerWalk, left: Salvage) -> LedgerContents:
    """Return the names that are left after a repair."""
    return LedgerContents() if left.checkpoint is None else _contents(found, left.rows)


def _contents(found: LedgerWalk, rows: Sequence[HeldFacts]) -> LedgerContents:
    """Return the names in the state that the newest good checkpoint and all later facts give."""
    contents, base = LedgerContents(), 0
    if found.checkpoints:
        (newest, parts) = found.checkpoints[0]
        base = newest.seq
        for part in parts:
            for fact in FACTS.unpack(part, "", ""):  # Their parts were read before.
                contents.take(changes_of(fact))
    for row in rows:
        if row.seq > base:
            contents.take(row.changes)
    return contents


def rebuild(ledger: Path, found: LedgerWalk, left: Salvage) -> None:
    """Replace a damaged ledger with its readable rest; the caller has copied the damaged file.

    Raises:
        LedgerError: A file cannot be written.
    """
    reserved = max(found.fencing.first, found.fencing_seen)
    if not found.fencing.known:
        # The used numbers are unknown, but there were fewer grants than microseconds.
        reserved = max(reserved, time.time_ns() // 1000)

    def fill(new: FactTables) -> None:
        if left.rows:
            with facts.deep_looking(ledger, found.mark) as old:
                _copy(old, new, found, left.rows)
        _fill(new, found, left)

    last, fencing = (*left.last, found.mark.writes), (reserved, found.fencing.writes)
    with translate_errors():
        facts.rebuild(ledger, fill, last, fencing)


def _copy(old: FactTables, new: FactTables, found: LedgerWalk, rows: Sequence[HeldFacts]) -> None:
    chains = {row.seq: row.chain for row in rows}
    for _, stored, _ in windows(old, found):
        # Each fact once: a damaged file may show a fact twice, or another fact under its number.
        good = [
            row._replace(chain=chains.pop(row.seq))
            for row in stored
            if row.seq in chains and is_sealed(row)
        ]
        if good:
            new.insert(good)


def _fill(new: FactTables, found: LedgerWalk, left: Salvage) -> None:
    if left.filler is not None:
        new.insert([left.filler])
    new.write_lost(left.lost, time.time())
    new.write_pruned_seq(found.pruned)
    if left.checkpoint is None:
        new.finish_checkpoint(Checkpoint.of_parts(1, left.last[0], 0, 0), CHECKPOINTS_KEPT)
    for finished, parts in reversed(found.checkpoints):
        if finished.seq <= left.last[0] or finished.seq == left.checkpoint:
            for number, body in enumerate(parts):
                new.insert_part(finished.number, number, body)
            new.finish_checkpoint(finished, CHECKPOINTS_KEPT)
