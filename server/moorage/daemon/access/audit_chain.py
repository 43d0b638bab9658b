"""The chain of the audit log: each line has a number and the hash of all before it.

The hash of a line is SHA-256 of the hash before it and the line without its own hash, so that no
line can be changed, dropped or moved without a trace. Entries that were cut off at the end are only
noticed with a number and hash that were stored elsewhere.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
from msgspec.structs import asdict

from moorage.records.audit import AuditEntry

_HASH_CHARS: Final = 64
_NO_HASH: Final = "0" * _HASH_CHARS
_HASH_FIELD: Final = b',"hash":"'
_EMPTY: Final = hashlib.sha256()
_encode_lines: Final = msgspec.json.Encoder().encode_lines


@dataclass(frozen=True, slots=True)
class ChainEnd:
    """The end of the log: the number and the hash of its last line."""

    number: int = 0
    hash: str = _NO_HASH


class ChainError(Exception):
    """A line was changed, or lines are missing; the text says where."""


def check_line(line: bytes, place: str, before: ChainEnd, *, begins: bool) -> ChainEnd:
    """Check a line after `before`, or the oldest line (`begins`); return its number and hash."""
    body, found, tail = line.rpartition(_HASH_FIELD)
    try:
        entry = msgspec.json.decode(line, type=Sealed)
    except msgspec.MsgspecError as error:
        raise ChainError(f"{place}: not an audit entry: {error}") from None
    if not found or len(tail) != _HASH_CHARS + len('"}\n'):
        raise ChainError(f"{place}: the hash is not at the end of the line")
    if not begins and entry.number != before.number + 1:
        missing = f"expected entry {before.number + 1}, found {entry.number}"
        raise ChainError(f"{place}: {missing}; lines are missing or in the wrong order")
    origin = entry.prev if begins else before.hash
    digest = hashlib.sha256(origin.encode() + body).hexdigest()
    if entry.prev != origin or entry.hash != digest:
        raise ChainError(f"{place}: entry {entry.number} was changed")
    return ChainEnd(entry.number, entry.hash)


def is_beyond_end(line: bytes) -> bool:
    """Return whether a line, even without its newline, already has its complete hash field."""
    _, found, tail = line.rpartition(_HASH_FIELD)
    return bool(found) and len(tail) >= _HASH_CHARS + len('"}\n')


class Sealed(msgspec.Struct):
    """The fields of a line by which the chain is checked."""

    number: int
    prev: str
    hash: str


def encode_entries(entries: Sequence[AuditEntry]) -> bytes:
    """Return entries as JSON lines, not chained yet. Runs on the hot path."""
    try:
        return _encode_lines(entries)
    except (ValueError, OverflowError):  # Half a surrogate pair, or a large number.
        whole = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
        return "".join(whole(asdict(each)) + "\n" for each in entries).encode(errors="replace")


def chain_lines(encoded: bytes, end: ChainEnd) -> tuple[list[bytes], ChainEnd]:
    """Add number and hash to JSON lines; return them and the chain's end. Runs on the hot path."""
    lines = list[bytes]()
    number, former = end.number, end.hash.encode()
    for text in encoded[1:-2].split(b"}\n{") if encoded else ():
        number += 1
        body = b'{"number":%d,%b,"prev":"%b"' % (number, text, former)
        digest = _EMPTY.copy()  # A copy is quicker than a new hash.
        digest.update(former)
        digest.update(body)
        former = digest.hexdigest().encode()
        lines.append(b'%b,"hash":"%b"}\n' % (body, former))
    return lines, ChainEnd(number, former.decode())


def check_note(noted: ChainEnd | None, first: int, end: ChainEnd) -> None:
    """Check that the log from line `first` to `end` contains the noted line.

    Raises:
        ChainError: The noted line is missing, or its hash differs.
    """
    if noted is not None and noted.number > end.number:
        reason = f"the log ends at entry {end.number}, before the noted entry {noted.number}"
        raise ChainError(reason)
    if noted is not None and noted.number < first:
        reason = f"the log begins at entry {first}, after the noted entry {noted.number}"
        raise ChainError(reason)
