"""Stores the audit log in PostgreSQL; `moored token` and `moored agent` write it, too."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from moorage.storage.base import AuditEnd, StorageError
from moorage.storage.postgres.connection import Connection
from moorage.storage.postgres.shared_table import SharedTable
from moorage.storage.statements import read_statements

SQL: Final = read_statements(Path(__file__).with_name("audit.sql"))
_REMOVED: Final = (
    "lost the end of the audit log, and perhaps the whole log: put back its tables "
    "moorage.audit_line and moorage.audit_end from a backup; or begin a new log by `DELETE FROM "
    "moorage.audit_line; INSERT INTO moorage.audit_end VALUES (1, 0, repeat('0', 64), NULL, 0)`"
)


class PostgresAudit(SharedTable):
    """The audit log in PostgreSQL; implements `storage.base.AuditRows`."""

    counter = "audit"

    def append(
        self, now: float, make: Callable[[AuditEnd], tuple[Sequence[bytes], AuditEnd]]
    ) -> None:
        with self.connection() as connection, connection.transaction():
            before = self._end(connection, "lock_end")
            lines, after = make(before)
            insert_lines(connection, before.number, now, lines, after)

    def lines(self, after: int) -> Iterator[tuple[int, bytes]]:
        while True:
            with self.connection() as connection:
                page = page_of(connection, after)
            if not page:
                return
            yield from page
            after = page[-1][0]

    def end(self) -> AuditEnd:
        with self.connection() as connection:
            return self._end(connection, "end")

    def begin(self) -> bytes | None:
        with self.connection() as connection:
            row = connection.execute(SQL["begin"]).fetchone()
            return None if row is None else bytes(row[0])

    def note_begin(self, line: bytes) -> None:
        with self.connection() as connection:
            connection.execute(SQL["note_begin"], (line,))

    def prune(self, before: float, bytes_max: int) -> None:
        with self.connection() as connection:
            for statement, bound in (("prune_old", before), ("prune_more", bytes_max)):
                while connection.execute(SQL[statement], (bound,)).rowcount > 0:
                    pass

    def _end(self, connection: Connection, statement: str) -> AuditEnd:
        row = connection.execute(SQL[statement]).fetchone()
        if row is None:
            raise StorageError(f"{self.place} {_REMOVED}")
        return AuditEnd(*row)


def page_of(connection: Connection, after: int) -> list[tuple[int, bytes]]:
    """Return one page of the lines after number `after`, with their numbers."""
    rows = connection.execute(SQL["page"], (after,))
    return [(int(number), bytes(line)) for number, line in rows]


def insert_lines(
    connection: Connection, before: int, now: float, lines: Sequence[bytes], end: AuditEnd
) -> None:
    """Append lines after number `before`, and store the new end of the log."""
    values = {"after": before, "at": now, "lines": list(lines)}
    connection.execute(SQL["insert"], values)
    connection.execute(SQL["set_end"], (*end, sum(map(len, lines))))
