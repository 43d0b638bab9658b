"""What is wrong in a catalog's file, and the same file without it: `verify` and `repair`."""

import sqlite3
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from moorage.catalog.documents.encoding import decode
from moorage.catalog.embedded.integrity import (
    LABEL,
    commits,
    is_intact,
    mark_path,
    refuse_format,
    tallied,
)
from moorage.catalog.embedded.records import stored_files
from moorage.catalog.embedded.store import StoredRow, new_file
from moorage.durability import DurableMark, Found, log_damage, owner_only, read_mark, sync_directory
from moorage.protocol.faults import ServiceError

FINDINGS_MAX: Final = 100
"""Of one file; more only say the same."""
_UNREADABLE: Final = (sqlite3.Error, ValueError, TypeError)
_SELECT: Final = "SELECT kind, id, document, files, checksum FROM records WHERE rowid"


@dataclass(slots=True)
class CatalogWalk:
    """What a catalog holds.

    Attributes:
        findings: What is wrong, each a sentence that says where.
        rows: The records that are as they were written.
        mark: How many changes it had seen.
        missing: How many durable changes the file does not have.
        stored: By kind, how many records there were, as far as the file says.

    """

    findings: list[str] = field(default_factory=list[str])
    rows: list[tuple[Any, ...]] = field(default_factory=list[tuple[Any, ...]])
    mark: Found = field(default_factory=lambda: Found(exists=False))
    missing: int = 0
    stored: dict[str, int] = field(default_factory=dict[str, int])

    def say(self, finding: str) -> None:
        """Note something that is wrong."""
        if len(self.findings) < FINDINGS_MAX:
            self.findings.append(finding)


def walk(path: Path) -> CatalogWalk:
    """Look at all of a catalog, which may be in use. Changes nothing.

    Raises:
        ServiceError: `unavailable`: it is of a format that this release does not read.
        OSError: A file cannot be read at all.

    """
    found = CatalogWalk(mark=read_mark(mark_path(path), LABEL))
    if not path.exists():
        if found.mark.exists:
            found.say(f"{path.name} is missing, with all its records.")
        return found
    if found.mark.doubt:
        found.say(f"{found.mark.doubt}.")
    try:
        address = f"{path.absolute().as_uri()}?mode=ro"
        with closing(sqlite3.connect(address, uri=True)) as connection:
            _look_at(connection, path, found)
    except _UNREADABLE as no:
        found.say(f"{path.name} cannot be read: {no}.")
    return found


def _look_at(connection: sqlite3.Connection, path: Path, found: CatalogWalk) -> None:
    connection.execute("BEGIN")  # One moment of a catalog that may be in use.
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    refuse_format(connection, path, version)
    changes = commits(connection) if version else 0
    found.missing = max(found.mark.first - changes, 0)
    if found.missing:
        found.say(f"{path.name} has seen {changes} changes of {found.mark.first}.")
        if where := log_damage(path):
            found.say(where)
    if not version:
        return
    for look in (_check, _look_at_records, _count):  # One that fails takes no other with it.
        try:
            look(connection, path, found)
        except _UNREADABLE as no:
            found.say(f"{path.name} cannot be read: {no}.")


def _check(connection: sqlite3.Connection, path: Path, found: CatalogWalk) -> None:
    for (line,) in connection.execute(f"PRAGMA integrity_check({FINDINGS_MAX})"):
        if line != "ok":
            found.say(f"{path.name}: {line}.")


def _count(connection: sqlite3.Connection, _: Path, found: CatalogWalk) -> None:
    found.stored = dict(connection.execute("SELECT kind, records FROM usage"))


def _look_at_records(connection: sqlite3.Connection, path: Path, found: CatalogWalk) -> None:
    for row in _rows(connection, path, found):
        kind, record_id, document, files, stored = row
        if not is_intact(kind, (record_id, document, files), stored):
            found.say(f"{path.name}: the {kind} {record_id!r} does not match its checksum.")
            continue
        if kind == "policy" and (doubt := _doubt(StoredRow(record_id, document, files))):
            found.say(f"{path.name}: {doubt}.")
        found.rows.append(row)
    for kind, rights in tallied(connection).items():
        if not all(rights):
            found.say(f"{path.name}: the records of kind {kind} are not those that were stored.")


def _doubt(row: StoredRow) -> str:
    try:
        stored_files(row, decode(row.document))
    except (ServiceError, msgspec.MsgspecError, KeyError) as no:
        return str(no)
    return ""


def _rows(
    connection: sqlite3.Connection, path: Path, found: CatalogWalk
) -> Iterator[tuple[Any, ...]]:
    (last,) = connection.execute("SELECT coalesce(max(rowid), 0) FROM records").fetchone()
    for start in range(0, last, 100):
        try:
            yield from connection.execute(
                f"{_SELECT} > ? AND rowid <= ? ORDER BY rowid", (start, start + 100)
            ).fetchall()
        except _UNREADABLE as no:
            found.say(f"{path.name}: not all of records {start} to {start + 100}: {no}.")
            for number in range(start + 1, start + 101):
                try:
                    yield from connection.execute(f"{_SELECT} = ?", (number,)).fetchall()
                except _UNREADABLE:
                    continue  # It was said of all of them.


def loss(found: CatalogWalk) -> list[str]:
    """Return one sentence for each kind: how many are lost."""
    if not found.findings:
        return []
    left, sentences = Counter(row[0] for row in found.rows), list[str]()
    if found.missing:
        sentences.append(f"the last {found.missing} changes, of documents, policies or aliases.")
    elif not found.mark.known:
        sentences.append("the last changes, if there is any that the file does not have.")
    if not found.stored:
        all_of_it = "" if found.rows else "every document, policy, alias and context: "
        sentences.append(f"{all_of_it}nothing says how much there was.")
    return sentences + [
        f"{count - left[kind]} of {count} records of kind {kind}."
        for kind, count in found.stored.items()
        if count > left[kind]
    ]


def kept(found: CatalogWalk) -> list[str]:
    """Return how much there is of each kind, each a sentence."""
    left = Counter(row[0] for row in found.rows)
    return [f"in the catalog: {count} of kind {kind}." for kind, count in sorted(left.items())]


def rebuild(path: Path, found: CatalogWalk) -> None:
    """Put a catalog of what is left in the place of a damaged one. Keep a copy of that first.

    Raises:
        OSError: A file cannot be written.
        sqlite3.Error: Likewise.

    """
    new = path.with_name(path.name + ".new")
    new.unlink(missing_ok=True)
    owner_only(new)
    with closing(sqlite3.connect(new, isolation_level=None)) as connection:
        new_file(connection)
        connection.execute("BEGIN")
        connection.executemany("INSERT OR IGNORE INTO records VALUES (?,?,?,?,?)", found.rows)
        connection.execute("UPDATE commits SET number = ?", (found.mark.first,))
        connection.execute("COMMIT")
    for end in ("-wal", "-shm"):  # They belong to the old one, and would be read into the new.
        path.with_name(path.name + end).unlink(missing_ok=True)
    new.replace(path)
    sync_directory(path.parent)
    DurableMark(mark_path(path), LABEL, found.mark.first, 0, found.mark.writes).close()
