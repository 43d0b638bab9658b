"""Checks by checksums that records of the catalog are intact.

Each record has a checksum. For each kind, the number of records and the sum of their checksums are
stored.
"""

import zlib

from moorage.model import Code
from moorage.protocol.faults import ServiceError
from moorage.storage.base import RecordRow, RecordTable, StorageCorrupt, StorageError


def checksum(kind: str, record_id: str, document: bytes, files: bytes) -> int:
    """Return the checksum of a record."""
    named = f"{kind}\0{record_id}\0{len(document)}".encode()
    return zlib.crc32(files, zlib.crc32(document, zlib.crc32(named)))


def is_intact(kind: str, row: RecordRow) -> bool:
    """Return whether a record matches its checksum; damaged values may be of any type."""
    try:
        return bool(checksum(kind, row.id, row.document, row.files) == row.checksum)
    except (TypeError, ValueError):
        return False


def check_tallies(records: RecordTable, place: str, kinds: frozenset[str]) -> list[str]:
    """Return the kinds with a wrong sum of checksums; refuse a wrong number of records.

    Raises:
        ServiceError: `unavailable`: records of some kind are missing, or there are too many.
    """
    found = records.tallies()
    wrong = [kind for kind, tally in found.items() if tally.records != tally.records_there]
    wrong = sorted(kinds - found.keys()) + wrong
    if wrong:
        kinds_shown = ", ".join(wrong)
        finding = f"records are missing, or there are too many, of these kinds: {kinds_shown}"
        raise damage_error(place, finding)
    return [kind for kind, tally in found.items() if tally.checksums != tally.checksums_there]


def damage_error(place: str, finding: str) -> ServiceError:
    """Return the error for a damaged catalog."""
    return unavailable(StorageCorrupt(place, finding))


def unavailable(error: StorageError) -> ServiceError:
    """Return the error for a refusal by the storage."""
    return ServiceError(Code.UNAVAILABLE, str(error))
