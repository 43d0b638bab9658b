"""Finds damage in a catalog's file, and rebuilds the file without it, for `verify` and `repair`."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

from moorage.catalog.documents.encoding import decode
from moorage.catalog.embedded.integrity import is_intact, unavailable
from moorage.catalog.embedded.records import read_files
from moorage.catalog.embedded.store import StoredRow
from moorage.protocol.faults import ServiceError
from moorage.storage.base import RecordRow, SqlRow, StorageError
from moorage.storage.sqlite import records
from moorage.storage.sqlite.files import UNREADABLE, find_log_damage, log_damage
from moorage.storage.sqlite.marks import Found, read_mark
from moorage.storage.sqlite.records import RecordTables

FINDINGS_MAX: Final = 100
"""Maximum findings that are reported about one file."""


@dataclass(slots=True)
class CatalogWalk:
    """The contents and the damage of a catalog.

    Attributes:
        findings: Sentences about faults, with their places.
        rows: The intact records.
        mark: Number of changes that the file has seen.
        missing: Number of durable changes that the file lacks.
        stored: Number of records by kind, according to the file.
    """

    findings: list[str] = field(default_factory=list[str])
    rows: list[SqlRow] = field(default_factory=list[SqlRow])
    mark: Found = field(default_factory=lambda: Found(exists=False))
    missing: int = 0
    stored: dict[str, int] = field(default_factory=dict[str, int])

    def say(self, finding: str) -> None:
        """Add a fault to the findings."""
        if len(self.findings) < FINDINGS_MAX:
            self.findings.append(finding)


def walk(path: Path) -> CatalogWalk:
    """Check all records of a catalog, which may be in use; change nothing.

    Raises:
        ServiceError: `unavailable`: this release cannot read the file's format.
        OSError: A file cannot be read.
    """
    found = CatalogWalk(mark=read_mark(records.mark_path(path), records.LABEL))
    if not path.exists():
        if found.mark.exists:
            found.say(f"{path.name} is missing, with all its records.")
        return found
    if found.mark.doubt:
        found.say(f"{found.mark.doubt}.")
    try:
        with records.deep_looking(path, found.mark) as tables:
            _look_at(tables, path, found)
    except StorageError as no:
        raise unavailable(no) from no
    except UNREADABLE as no:
        found.say(f"{path.name} cannot be read: {no}.")
    return found


def _look_at(tables: RecordTables, path: Path, found: CatalogWalk) -> None:
    if where := find_log_damage(path):
        found.say(where)
    version = tables.refuse_format(records.place_of(path))
    changes = tables.commits() if version else 0
    found.missing = max(found.mark.first - changes, 0)
    if found.missing:
        found.say(f"{path.name} has seen {changes} changes of {found.mark.first}.")
        if (also := log_damage(path)) and also != where:
            found.say(also)
    if not version:
        return
    for look in (_check, _look_at_records, _count):  # A failed check does not stop the others.
        try:
            look(tables, path, found)
        except UNREADABLE as no:
            found.say(f"{path.name} cannot be read: {no}.")


def _check(tables: RecordTables, path: Path, found: CatalogWalk) -> None:
    for line in tables.findings(FINDINGS_MAX):
        found.say(f"{path.name}: {line}.")


def _count(tables: RecordTables, _: Path, found: CatalogWalk) -> None:
    found.stored = {kind: count for kind, (count, _) in tables.usage().items()}


def _look_at_records(tables: RecordTables, path: Path, found: CatalogWalk) -> None:
    for kind, *values in _rows(tables, path, found):
        row = RecordRow(*values)
        if not is_intact(kind, row):
            found.say(f"{path.name}: the {kind} {row.id!r} does not match its checksum.")
            continue
        if kind == "policy" and (doubt := _doubt(StoredRow(row.id, row.document, row.files))):
            found.say(f"{path.name}: {doubt}.")
        found.rows.append((kind, *row))
    for kind, tally in tables.tallies().items():
        there = (tally.records_there, tally.checksums_there)
        if there != (tally.records, tally.checksums):
            found.say(f"{path.name}: the records of kind {kind} were changed.")


def _doubt(row: StoredRow) -> str:
    try:
        read_files(row, decode(row.document))
    except (ServiceError, msgspec.MsgspecError, KeyError) as no:
        return str(no)
    return ""


def _rows(tables: RecordTables, path: Path, found: CatalogWalk) -> Iterator[SqlRow]:
    for start in range(0, tables.last_number(), 100):
        try:
            yield from tables.numbered(start, start + 100)
        except UNREADABLE as no:
            found.say(f"{path.name}: not all of records {start} to {start + 100}: {no}.")
            for number in range(start, start + 100):
                try:
                    yield from tables.numbered(number, number + 1)
                except UNREADABLE:
                    continue  # Already reported.


def loss(found: CatalogWalk) -> list[str]:
    """Return one sentence per kind of record, with the number of lost records."""
    if not found.findings:
        return []
    left, sentences = Counter(row[0] for row in found.rows), list[str]()
    if found.missing:
        sentences.append(f"the last {found.missing} changes, of documents, policies or aliases.")
    elif not found.mark.known:
        sentences.append("the last changes, if the file lacks any.")
    if not found.stored:
        all_of_it = "" if found.rows else "every document, policy, alias and context: "
        sentences.append(f"{all_of_it}their number is not known.")
    return sentences + [
        f"{count - left[kind]} of {count} records of kind {kind}."
        for kind, count in found.stored.items()
        if count > left[kind]
    ]


def remaining(found: CatalogWalk) -> list[str]:
    """Return one sentence per kind of record, with the number of remaining records."""
    left = Counter(row[0] for row in found.rows)
    return [f"in the catalog: {count} of kind {kind}." for kind, count in sorted(left.items())]


def rebuild(path: Path, found: CatalogWalk) -> None:
    """Replace a damaged catalog by its intact records; the caller must copy the file before.

    Raises:
        StorageError: A file cannot be written.
    """
    records.rebuild(path, found.mark, found.rows)
