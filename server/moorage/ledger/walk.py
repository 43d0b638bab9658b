"""Reads everything in a ledger, damaged or not, for `verify` and `repair`.

Unlike a start, this reads the whole history, and continues after unreadable parts.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

from moorage.core.state.facts import Carried, Counted, Fact, Granted
from moorage.ledger.base import FactUnknown, LedgerCorrupt, LedgerError, translate_errors
from moorage.ledger.codec import FACTS, link, unseal
from moorage.ledger.contents import ContentChange, changes_of
from moorage.ledger.inspection import without_checkpoint
from moorage.storage.base import Checkpoint, FactRow, StorageCorrupt, run
from moorage.storage.sqlite.fact_tables import FactTables
from moorage.storage.sqlite.facts import deep_looking, is_unmade, missing, place_of, read_marks
from moorage.storage.sqlite.fencing import fencing_path
from moorage.storage.sqlite.files import UNREADABLE, find_log_damage, log_damage
from moorage.storage.sqlite.marks import Found

_WINDOW: Final = 1_000
"""Number of facts read at once; if such a read fails, these facts are read one by one."""
FINDINGS_MAX: Final = 100
"""Maximum findings per file; further findings would only repeat these."""


class HeldFacts(NamedTuple):
    """A fact that is unchanged since it was written; its body stays on disk.

    Args:
        at: The time at which the fact was appended.
        chain: The stored chain value.
        changes: The names that the fact adds and removes.
    """

    seq: int
    at: float
    checksum: int
    chain: int
    changes: tuple[ContentChange, ...]


@dataclass(slots=True)
class LedgerWalk:
    """The readable contents of a ledger, and its faults.

    Attributes:
        findings: Faults, one sentence with the place for each.
        unknown: Facts of a newer release: they are not damage, and must not be dropped.
        rows: The undamaged facts, in order.
        checkpoints: The undamaged checkpoints, newest first, with their parts.
        pruned: The last fact that was deleted on purpose.
        lost: Facts whose loss was accepted before.
        mark: The last seq that the ledger recorded as written.
        fencing: The highest reserved fencing number, as stored.
        fencing_seen: The highest fencing number in the readable facts.
        unread: Whether parts of the file were unreadable, so that more may be lost than is known.
    """

    findings: list[str] = field(default_factory=list[str])
    unknown: list[FactUnknown] = field(default_factory=list[FactUnknown])
    rows: list[HeldFacts] = field(default_factory=list[HeldFacts])
    checkpoints: list[tuple[Checkpoint, list[bytes]]] = field(
        default_factory=list[tuple[Checkpoint, list[bytes]]]
    )
    pruned: int = 0
    lost: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    mark: Found = field(default_factory=lambda: Found(exists=False))
    fencing: Found = field(default_factory=lambda: Found(exists=False))
    fencing_seen: int = 0
    unread: bool = False

    def say(self, finding: str) -> None:
        """Add a fault to the findings."""
        if len(self.findings) < FINDINGS_MAX:
            self.findings.append(finding)


def walk(ledger: Path) -> LedgerWalk:
    """Read all of a ledger, which may be in use. Changes nothing.

    Raises:
        LedgerError: There is no ledger, or a ledger of another release.
        OSError: A file cannot be read at all.
    """
    mark, fencing = read_marks(ledger)
    if not ledger.exists() and not mark.exists and not fencing.first:
        raise LedgerError(f"{ledger}: there is no ledger; expected a daemon's data directory.")
    found = LedgerWalk(mark=mark, fencing=fencing)
    for each in (found.mark, found.fencing):
        if each.doubt:
            found.say(f"{each.doubt}.")
    if not ledger.exists():
        found.unread = True
        found.say(f"{ledger.name} is missing, with all its facts.")
        return found
    with (
        _continue_after_errors(ledger, found),
        translate_errors(),
        deep_looking(ledger, mark) as tables,
    ):
        _look_at(tables, ledger, found)
    if 0 < found.fencing.first < found.fencing_seen:
        found.say(
            f"{fencing_path(ledger).name} reserves numbers up to {found.fencing.first}, but number "
            f"{found.fencing_seen} was used."
        )
    return found


@contextlib.contextmanager
def _continue_after_errors(ledger: Path, found: LedgerWalk) -> Iterator[None]:
    """Run one check; its error becomes a finding, and further checks still run."""
    try:
        yield
    except UNREADABLE as no:
        found.unread = True
        found.say(f"{ledger.name} cannot be read: {no}.")


def _look_at(tables: FactTables, ledger: Path, found: LedgerWalk) -> None:
    if where := find_log_damage(ledger):
        found.say(where)
    if _is_new(tables, ledger, found):
        if found.mark.first:
            found.unread = True
            found.say(f"{ledger.name} is empty; {run(1, found.mark.first)} should be there.")
        elif found.fencing.first and not found.mark.exists:
            found.unread = True
            found.say(f"{ledger.name} is empty; fencing numbers were used.")
        return
    with _continue_after_errors(ledger, found):
        if lacking := missing(tables, found.mark, new=False):
            found.say(f"{ledger.name}: {lacking}.")
            if (also := log_damage(ledger)) and also != where:
                found.say(also)
    with _continue_after_errors(ledger, found):
        for line in tables.findings(FINDINGS_MAX):
            found.say(f"{ledger.name}: {line}.")
    found.pruned = _check_pruned(tables, ledger, found)
    with _continue_after_errors(ledger, found):
        found.lost = tables.lost_ranges()
    with _continue_after_errors(ledger, found):
        _walk_facts(tables, ledger, found)
    with _continue_after_errors(ledger, found):
        _walk_checkpoints(tables, ledger, found)
    if found.pruned and not found.checkpoints:
        found.say(f"{ledger.name}: {without_checkpoint(found.pruned)}.")


def _walk_checkpoints(tables: FactTables, ledger: Path, found: LedgerWalk) -> None:
    for checkpoint in tables.checkpoints():
        parts = tables.checkpoint_parts(checkpoint)
        if parts is None or not _is_readable(checkpoint, parts, ledger, found):
            found.say(f"{ledger.name}: the checkpoint as of fact {checkpoint.seq} is damaged.")
        else:
            found.checkpoints.append((checkpoint, parts))


def _is_new(tables: FactTables, ledger: Path, found: LedgerWalk) -> bool:
    try:
        return is_unmade(tables, ledger, found.mark)
    except StorageCorrupt as no:
        found.say(f"{ledger.name}: {no.finding}.")
    except UNREADABLE as no:  # The facts are in other pages.
        found.unread = True
        found.say(f"{ledger.name} lacks its own format and version: {no}.")
    return False


def _check_pruned(tables: FactTables, ledger: Path, found: LedgerWalk) -> int:
    try:
        return tables.pruned_seq()
    except UNREADABLE:  # The row or the table is missing.
        found.say(f"{ledger.name} does not say which facts were deleted for their age.")
    with _continue_after_errors(ledger, found):
        return tables.first_seq() - 1
    return 0


def _walk_facts(tables: FactTables, ledger: Path, found: LedgerWalk) -> None:
    place = place_of(ledger)
    before: FactRow | None = None
    expected = found.pruned + 1
    for row in _check_facts(tables, ledger, found):
        try:
            entry = unseal(row, place)
        except FactUnknown as no:
            found.unknown.append(no)
            continue
        except LedgerCorrupt as no:
            found.say(f"{ledger.name}: {no.finding}.")
            continue
        if row.seq < expected:
            found.say(f"{ledger.name}: fact {row.seq} is there twice.")
            continue
        if row.seq > expected and (expected, row.seq - 1) not in found.lost:
            found.say(f"{ledger.name}: {run(expected, row.seq - 1)} cannot be read.")
        follows = before is not None and before.seq == row.seq - 1
        if follows and before is not None and row.chain != link(row.checksum, before.chain):
            found.say(f"{ledger.name}: fact {row.seq} is not linked to the fact before.")
        changes = changes_of(entry.fact)
        found.rows.append(HeldFacts(row.seq, row.at, row.checksum, row.chain, changes))
        found.fencing_seen = max(found.fencing_seen, fencing_of(entry.fact))
        before, expected = row, row.seq + 1


def _check_facts(tables: FactTables, ledger: Path, found: LedgerWalk) -> Iterator[FactRow]:
    for facts, rows, doubt in windows(tables, found):
        if doubt:
            found.say(f"{ledger.name}: not all of {facts} can be read: {doubt}.")
        yield from rows


def windows(tables: FactTables, found: LedgerWalk) -> Iterator[tuple[str, list[FactRow], str]]:
    """Read all readable facts, in ranges of `_WINDOW` facts.

    Every walk reads the same ranges: in a damaged SQLite file, other ranges find other facts.

    Returns:
        For each range: its name, its readable facts, and why its other facts cannot be read.
    """
    last = found.mark.first
    with contextlib.suppress(*UNREADABLE):  # Other facts may be readable even so.
        last = max(last, tables.last_seq())
    for start in range(found.pruned, last, _WINDOW):
        end = min(start + _WINDOW, last)
        yield run(start + 1, end), *_readable(tables, start, end)


def _readable(tables: FactTables, after: int, last: int) -> tuple[list[FactRow], str]:
    try:
        return tables.between(after, last), ""
    except UNREADABLE as no:
        doubt = str(no)
    rows: list[FactRow] = []
    for seq in range(after, last):
        with contextlib.suppress(*UNREADABLE):
            rows += tables.between(seq, seq + 1)
    return rows, doubt


def _is_readable(
    checkpoint: Checkpoint, parts: list[bytes], ledger: Path, found: LedgerWalk
) -> bool:
    try:
        for part in parts:
            for fact in FACTS.unpack(part, place_of(ledger), f"checkpoint {checkpoint.number}"):
                found.fencing_seen = max(found.fencing_seen, fencing_of(fact))
    except FactUnknown as no:
        found.unknown.append(no)
    except LedgerCorrupt:
        return False
    return True


def fencing_of(fact: Fact) -> int:
    """Return the fencing number in a fact; 0 if there is none."""
    match fact:
        case Granted(lease) | Carried(lease):
            return lease.fencing
        case Counted(fencing):
            return fencing
        case _:  # No other fact has a number.
            return 0
