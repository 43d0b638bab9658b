"""Is all there that was made durable? Looked at before anything is changed.

`SqliteLedger` asks at every start, `verify` and `repair` when a user wants to know.
"""

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Final

from moorage.durability import DurableMark, Found, log_lost, read_mark
from moorage.ledger import tables
from moorage.ledger.base import LedgerCorrupt, place_of
from moorage.ledger.codec import FactRow, link

LABEL: Final = "ledger"
"""Of the mark that says how far the ledger has come: seq and chain of its last durable fact."""


def mark_path(ledger: Path) -> Path:
    """Return where it is written down how far a ledger has come."""
    return ledger.with_suffix(".mark")


def look(ledger: Path) -> Found:
    """Return a ledger's mark, once all is there that it speaks of. Changes nothing.

    Raises:
        LedgerCorrupt: Something is missing, or nothing says whether it is.
        LedgerError: It is no ledger of this release.
        sqlite3.Error: SQLite cannot read it.

    """
    found = read_mark(mark_path(ledger), LABEL)
    place = place_of(ledger)
    with closing(tables.connect_to_look(ledger)) as connection:
        new = is_new(connection, ledger, found)
        if (found.exists or not new) and not found.known:
            raise LedgerCorrupt(
                place,
                f"{found.doubt}, and nothing else says how many facts it must have: "
                f"it has {0 if new else tables.last_seq(connection)}",
            )
        lacking = missing(connection, found, new=new)
    # After a power cut the mark may be a second behind; a log that is damaged shows by itself.
    lacking = lacking or log_lost(ledger).rstrip(".")
    if lacking:
        raise LedgerCorrupt(place, lacking)
    return found


def is_new(connection: sqlite3.Connection, ledger: Path, found: Found) -> bool:
    """Return whether a ledger has no tables yet.

    Raises:
        LedgerCorrupt: It does not say that it is a ledger, and its mark does.
        LedgerError: It is no ledger of this release.

    """
    try:
        return tables.is_new(connection, ledger)
    except tables.NoLedgerError as no:
        if found.known:
            raise LedgerCorrupt(place_of(ledger), "it does not say that it is a ledger") from no
        raise


def run(first: int, last: int) -> str:
    """Return a name for facts that follow one another."""
    return f"fact {first}" if first == last else f"facts {first} to {last}"


def without_checkpoint(pruned: int) -> str:
    """Return what is wrong where facts were deleted for their age, and nothing stands for them."""
    return f"{run(1, pruned)} were deleted for their age, and no checkpoint after them can be read"


def copy_ledger(ledger: Path, target: Path) -> None:
    """Copy a ledger that may be in use, as of one moment, with its mark.

    Raises:
        sqlite3.Error: SQLite cannot read it.
        OSError: The copy cannot be written.

    """
    found = read_mark(mark_path(ledger), LABEL)  # First: the copy may know more than its mark.
    with closing(tables.connect_to_look(ledger)) as before, closing(sqlite3.connect(target)) as new:
        before.backup(new)
    if found.known:
        DurableMark(mark_path(target), LABEL, found.first, found.second, found.writes).close()


def missing(connection: sqlite3.Connection, found: Found, *, new: bool) -> str:
    """Return what is missing in a ledger; empty where nothing is."""
    last_seq = 0 if new else tables.last_seq(connection)
    if last_seq < found.first:
        one = last_seq + 1 == found.first
        verbs = "was durable and is" if one else "were durable and are"
        return (
            f"{run(last_seq + 1, found.first)} {verbs} missing; its write-ahead log, or the file "
            "itself, is damaged, cut or gone"
        )
    if not new and tables.chain_of(connection, found.first) != found.second:
        return f"fact {found.first} is missing, or is not the one that was made durable"
    return ""


def check_linked(
    rows: Sequence[FactRow],
    after: int,
    chain: int | None,
    lost: Sequence[tuple[int, int]],
    place: str,
) -> None:
    """Check that facts follow one another, and that each is linked to the one before.

    Args:
        rows: In order, each with a checksum that is right.
        after: The seq of the fact before them.
        chain: Its chain; None where it is not there any more.
        lost: Facts that may be missing: their loss was accepted.
        place: The ledger, for messages.

    Raises:
        LedgerCorrupt: They do not follow one another, or are not linked.

    """
    before = after
    for row in rows:
        if row.seq != before + 1:
            if (before + 1, row.seq - 1) not in lost:
                finding = f"fact {before + 1} is missing; {row.seq} follows"
                raise LedgerCorrupt(place, finding)
        elif chain is not None and row.chain != link(row.checksum, chain):
            finding = f"fact {row.seq} is not linked to the one before: one of them was exchanged"
            raise LedgerCorrupt(place, finding)
        before, chain = row.seq, row.chain
