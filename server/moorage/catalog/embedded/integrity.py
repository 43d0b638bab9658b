"""Is the catalog's file as it was written? `store` asks when it opens and reads it.

Each record has a checksum; each kind has the number of its records and the sum of their checksums;
and `catalog.mark` beside the file says how many durable changes there were. So it shows where a
record was changed, where one went missing, and where the file as a whole fell back.
"""

import sqlite3
import zlib
from contextlib import closing
from pathlib import Path
from typing import Any, Final

from moorage.durability import Format, Found, log_lost, read_mark
from moorage.model import Code
from moorage.protocol.faults import ServiceError

__all__ = ["FORMAT", "LABEL", "check_tallies", "checksum", "is_intact", "look", "mark_path"]

FORMAT: Final = Format(1, {})
"""Of the tables; it is the file's `user_version`."""
LABEL: Final = "catalog"
"""Of the mark."""
_TALLIES: Final = """
SELECT kind, usage.records, usage.checksums, count(id), coalesce(sum(checksum), 0)
FROM usage LEFT JOIN records USING (kind) GROUP BY kind
"""


def mark_path(path: Path) -> Path:
    """Return where it is written down how many changes a catalog has seen."""
    return path.with_suffix(".mark")


def checksum(kind: str, record_id: str, document: bytes, files: bytes) -> int:
    """Return the checksum of a record."""
    named = f"{kind}\0{record_id}\0{len(document)}".encode()
    return zlib.crc32(files, zlib.crc32(document, zlib.crc32(named)))


def is_intact(kind: str, values: tuple[Any, Any, Any], stored: Any) -> bool:
    """Return whether a record is as it was written; a damaged page may hold values of any type."""
    try:
        return bool(checksum(kind, *values) == stored)
    except (TypeError, ValueError):
        return False


def look(path: Path) -> Found:
    """Return a catalog's mark, once all is there that it speaks of. Changes nothing.

    Raises:
        ServiceError: `unavailable`: changes are missing, nothing says whether they are, or another
            release wrote it.
        sqlite3.Error: It cannot be read.

    """
    found = read_mark(mark_path(path), LABEL)
    address = f"{path.absolute().as_uri()}?mode=ro"
    with closing(sqlite3.connect(address, uri=True)) as connection:
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        refuse_format(connection, path, version)
        changes = commits(connection) if version else 0
    if (found.exists or version) and not found.known:
        raise damaged(path, f"{found.doubt}, and nothing else says how many changes it has seen")
    if changes < found.first:
        raise damaged(
            path,
            f"it has seen {changes} changes of {found.first} that were durable; its write-ahead"
            " log, or the file itself, is damaged, cut or gone",
        )
    if lost := log_lost(path):
        raise damaged(path, lost.rstrip("."))
    return found


def refuse_format(connection: sqlite3.Connection, path: Path, version: int) -> None:
    """Refuse a catalog whose format this release does not read; 0 is that of an empty file.

    Raises:
        ServiceError: `unavailable`: it does not.

    """
    if version and (refusal := FORMAT.refusal(connection, version)):
        raise _unavailable(path, f"{refusal}. Nothing was changed")


def commits(connection: sqlite3.Connection) -> int:
    """Return how many durable changes a catalog has seen."""
    return int(connection.execute("SELECT number FROM commits").fetchone()[0])


def tallied(connection: sqlite3.Connection) -> dict[str, tuple[bool, bool]]:
    """Return by kind whether the number of its records is right, and whether their sum is."""
    return {
        kind: (records == there, sums == summed)
        for kind, records, sums, there, summed in connection.execute(_TALLIES)
    }


def check_tallies(connection: sqlite3.Connection, path: Path, kinds: frozenset[str]) -> list[str]:
    """Return the kinds with a record whose checksum is another one now.

    Raises:
        ServiceError: `unavailable`: records of some kind are missing, or there are too many.

    """
    found = tallied(connection)
    wrong = sorted(kinds - found.keys()) + [kind for kind, (right, _) in found.items() if not right]
    if wrong:
        raise damaged(path, f"records are missing, or too many, of: {', '.join(wrong)}")
    return [kind for kind, (_, right) in found.items() if not right]


def damaged(path: Path, finding: str) -> ServiceError:
    """Return what is raised where a catalog is not whole."""
    return _unavailable(
        path,
        f"is damaged: {finding}. Nothing was changed. Check the disk, and restore the data"
        " directory from a backup. `moored ledger verify` says what is damaged;"
        " `moored ledger repair` goes on without it, once you accept the loss",
    )


def _unavailable(path: Path, finding: str) -> ServiceError:
    return ServiceError(Code.UNAVAILABLE, f"the catalog {path} {finding}")
