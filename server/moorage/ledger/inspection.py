"""Checks that facts follow one another, for `StoredLedger` and `walk`."""

from collections.abc import Sequence

from moorage.ledger.base import LedgerCorrupt
from moorage.ledger.codec import link
from moorage.storage.base import FactRow, run


def without_checkpoint(pruned: int) -> str:
    """Return a sentence: facts were pruned, and no readable checkpoint replaces them."""
    return f"{run(1, pruned)} were deleted for their age, and no checkpoint after them can be read"


def check_links(
    rows: Sequence[FactRow],
    after: int,
    chain: int | None,
    lost: Sequence[tuple[int, int]],
    place: str,
) -> None:
    """Check that facts follow one another, and that each is linked to the one before.

    Args:
        rows: The rows, in order, each with a correct checksum.
        after: The seq of the fact before the rows.
        chain: The chain of that fact; None if the fact was deleted.
        lost: Facts that may be missing: their loss was accepted.
        place: The ledger, for messages.

    Raises:
        LedgerCorrupt: The rows do not follow one another, or are not linked.
    """
    before = after
    for row in rows:
        if row.seq != before + 1:
            if (before + 1, row.seq - 1) not in lost:
                finding = f"fact {before + 1} is missing; {row.seq} follows"
                raise LedgerCorrupt(place, finding)
        elif chain is not None and row.chain != link(row.checksum, chain):
            finding = (
                f"fact {row.seq} is not linked to the fact before: one of the two was replaced"
            )
            raise LedgerCorrupt(place, finding)
        before, chain = row.seq, row.chain
