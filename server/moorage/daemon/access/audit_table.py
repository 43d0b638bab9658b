"""The audit log in the database of the server: the same lines and chain as in files."""

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress

import msgspec

from moorage.daemon.access.audit_chain import (
    ChainCheck,
    ChainEnd,
    ChainError,
    chain_lines,
    encode_entries,
    origin_of,
)
from moorage.daemon.access.audit_files import PRUNE_SECONDS
from moorage.records.audit import AuditEntry
from moorage.records.json_values import JsonObject
from moorage.storage.base import AuditEnd, AuditRows


class AuditTable:
    """Appends lines to the audit log in a database; several servers may append, one at a time.

    Args:
        rows: The rows of the audit log in the database.
        keep_seconds: Lines that are older are deleted.
        keep_bytes: Maximum bytes of all lines; beyond this, the oldest lines are deleted.
    """

    def __init__(self, rows: AuditRows, keep_seconds: float, keep_bytes: int) -> None:
        self._rows = rows
        self._keep_seconds = keep_seconds
        self._keep_bytes = keep_bytes
        self._pruned_at = 0.0
        self._has_begin = False

    def append(self, entries: Sequence[AuditEntry], now: float) -> None:
        """Append entries; see `append_lines`."""
        self.append_lines(encode_entries(entries), now)

    def append_lines(self, encoded: bytes, now: float) -> None:
        """Append entries as JSON lines, and delete lines that are too old or too many.

        Raises:
            StorageError: The lines cannot be written.
        """

        def link(end: AuditEnd) -> tuple[list[bytes], AuditEnd]:
            wanted, seq = list[bytes](), end.seq
            for line in encoded.splitlines(keepends=True):
                entry = msgspec.json.decode(line, type=_AboutFact)
                if entry.what == "server.started":
                    seq = entry.seq  # A restored ledger may repeat numbers.
                elif entry.seq and seq is not None and entry.seq <= seq:
                    continue  # The next server has already noted this fact.
                else:
                    seq = entry.seq or seq
                wanted.append(line)
            lines, last = chain_lines(b"".join(wanted), ChainEnd(end.number, end.hash))
            return lines, AuditEnd(last.number, last.hash, seq)

        self._rows.append(now, link)
        if not 0 <= now - self._pruned_at < PRUNE_SECONDS:
            self._pruned_at = now
            if not self._has_begin:
                self._note_begin()
            self._rows.prune(now - self._keep_seconds, self._keep_bytes)

    def _note_begin(self) -> None:
        """Note where the log of an older release begins; the log is taken as it is."""
        if self._rows.begin() is None and (first := next(self._rows.lines(0), None)):
            with suppress(msgspec.MsgspecError):  # `verify` reports the line.
                self._rows.note_begin(msgspec.json.encode(origin_of(first[1])))
        self._has_begin = True

    def last_seq(self) -> int | None:
        """Return the number of the last fact with an audit entry; None: no fact has an entry."""
        return self._rows.end().seq

    def close(self) -> None:
        """Close the connections to the database."""
        self._rows.close()


class _AboutFact(msgspec.Struct):
    what: str
    seq: int = 0


def read_rows(rows: AuditRows, after: int = 0) -> Iterator[JsonObject]:
    """Yield the lines of a database as JSON objects, the oldest first.

    Args:
        rows: The rows of the audit log in the database.
        after: Lines up to this number are left out.

    Raises:
        ChainError: A line is not a JSON object.
        StorageError: The database cannot be read.
    """
    for number, line in rows.lines(after):
        try:
            yield json.loads(line)
        except ValueError as error:
            raise ChainError(f"line {number}: not an audit entry: {error}") from None


def verify_rows(rows: AuditRows, noted: ChainEnd | None = None) -> tuple[int, ChainEnd]:
    """Check every line of a database; return the number of the first line, and the end.

    Args:
        rows: The rows of the audit log in the database.
        noted: The end of the log as an earlier call returned it; the log must still contain this
            last line.

    Raises:
        ChainError: A line was changed, or lines are missing.
        StorageError: The database cannot be read.
    """
    stored = rows.end()  # A server may append and delete lines meanwhile.
    check = ChainCheck(noted, ChainEnd(stored.number, stored.hash))
    for number, line in rows.lines(0):
        check.add(line, f"line {number}")
    check.finish(_deleted(rows))
    return check.first, check.end


def is_begin_known(rows: AuditRows) -> bool:
    """Return whether `verify_rows` finds lines that were removed at the beginning.

    Raises:
        StorageError: The database cannot be read.
    """
    return rows.begin() is not None


def _deleted(rows: AuditRows) -> ChainEnd | None:
    """Return the last line that a server deleted; None: unknown."""
    line = rows.begin()
    if line is None:
        return None
    try:
        return msgspec.json.decode(line, type=ChainEnd)
    except msgspec.MsgspecError as error:
        raise ChainError(f"line 0, the last deleted one: {error}") from None
