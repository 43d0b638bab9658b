"""The chain of the audit log: each line has a number and the hash of all before it.

The hash of a line is SHA-256 of the hash before it and the line without its own hash, so that no
line can be changed, dropped or moved without a trace. Lines that were removed at the beginning or
the end are noticed with numbers and hashes that the writer stores beside the log.
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
_CUT: Final = b'"what":"audit.cut"'
_encode_lines: Final = msgspec.json.Encoder().encode_lines


@dataclass(frozen=True, slots=True)
class ChainEnd:
    """The end of the log: the number and the hash of its last line."""

    number: int = 0
    hash: str = _NO_HASH


class ChainError(Exception):
    """A line was changed, or lines are missing; the text says where."""


class ChainCheck:
    """Checks the lines of a log, one after the other, and then its beginning and its end.

    Args:
        noted: A line that the log must still contain, as the user noted it.
        written: A line that was once the last one, as the writer noted it beside the log.

    Attributes:
        first: Number of the first line; 0: there is none yet.
        end: The last line so far.
    """

    def __init__(self, noted: ChainEnd | None, written: ChainEnd | None) -> None:
        self._noted = noted
        self._written = written or ChainEnd()
        self._origin = self.end = ChainEnd()
        self.first = 0
        self._findings: list[str] = []

    def add(self, line: bytes, place: str) -> None:
        """Check the next line.

        Raises:
            ChainError: The line was changed, or lines before it are missing.
        """
        before, self.end = self.end, check_line(line, place, self.end, begins=not self.first)
        number, digest = self.end.number, self.end.hash
        if not self.first:
            self.first, self._origin = number, origin_of(line)
        if self._noted is not None and self._noted.number == number and self._noted.hash != digest:
            raise ChainError(f"entry {number} is not the one that you noted")
        if self._written.number == number and self._written.hash != digest:
            raise ChainError(f"{place}: entry {number} is not the one that was written first")
        if _CUT in line and (lost := _lost_before(line)) > before.number:
            former = _run(before.number + 1, lost)
            self._findings.append(f"former {former} missing, as entry {number} (audit.cut) says")

    def finish(self, deleted: ChainEnd | None) -> None:
        """Check that the log has its first and its last line.

        Args:
            deleted: The last line that the log's writer deleted; None: unknown.

        Raises:
            ChainError: Lines are missing.
        """
        check_note(self._noted, self.first, self.end)
        last, written = self.end.number, self._written.number
        if self.first > 1 and deleted is not None:  # The first line of all needs no note.
            if self.first > deleted.number + 1:
                missing = _run(deleted.number + 1, self.first - 1)
                self._findings.insert(0, f"the log begins at entry {self.first}: {missing} missing")
            elif self.first == deleted.number + 1 and self._origin != deleted:
                raise ChainError(f"entry {self.first} does not follow the last deleted entry")
        if last < written:
            ends = f"the log ends at entry {last}, although entry {written} was written"
            # Lines that the writer deleted are not missing.
            accounted = max(last, deleted.number) if deleted is not None else last
            self._findings.append(f"{ends}: {_run(accounted + 1, written)} missing")
        if self._findings:
            rest = f"; entries {self.first} to {last} are unchanged" if last else ""
            raise ChainError("; ".join(self._findings) + rest)


class _Cut(msgspec.Struct):
    """The fields of an entry that say which lines were cut off before it."""

    what: str
    about: dict[str, object] = {}  # msgspec copies it.


def _lost_before(line: bytes) -> int:
    """Return the number of the last line that was cut off before an entry; 0: none."""
    cut = msgspec.json.decode(line, type=_Cut)
    noted = cut.about.get("noted")
    return noted if cut.what == "audit.cut" and isinstance(noted, int) else 0


def _run(first: int, last: int) -> str:
    return f"entry {first} is" if first == last else f"entries {first} to {last} are"


def origin_of(line: bytes) -> ChainEnd:
    """Return the end of the chain before a line.

    Raises:
        msgspec.MsgspecError: The line is not an audit entry.
    """
    sealed = msgspec.json.decode(line, type=Sealed)
    return ChainEnd(sealed.number - 1, sealed.prev)


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
