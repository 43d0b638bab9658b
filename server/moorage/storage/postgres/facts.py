"""Stores the ledger in PostgreSQL: one statement checks the epoch and adds a batch of facts."""

import contextlib
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Final

import psycopg

from moorage.storage.base import (
    FENCING_BLOCK,
    Checkpoint,
    FactRow,
    Facts,
    OpenedFacts,
    SqlRow,
    SqlValue,
    StorageError,
    StorageFailed,
)
from moorage.storage.postgres.connection import Connection, translate_errors
from moorage.storage.postgres.leadership import LOOK_SECONDS, Leadership
from moorage.storage.postgres.leadership import SQL as SCHEMA
from moorage.storage.statements import read_statements

PRUNED_PER_STEP: Final = 1_000
"""Maximum facts that one transaction deletes."""
PARTS_PER_SWEEP: Final = 64
"""Maximum parts of dropped checkpoints that one transaction deletes."""
SQL: Final = read_statements(Path(__file__).with_name("facts.sql"))


class PostgresFactTables:
    """The tables of a ledger, on one connection; implements `storage.base.Facts`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def last_seq(self) -> int:
        return int(self._value("last"))

    def pruned_seq(self) -> int:
        return int(self._value("pruned"))

    def oldest_at(self) -> float:
        return float(self._value("oldest_at"))

    def chain_of(self, seq: int) -> int | None:
        if seq == 0:
            return 0
        row = self._run("chain", seq).fetchone()
        return None if row is None else int(row[0])

    def lost_ranges(self) -> list[tuple[int, int]]:
        """Return an empty list: no database is ever repaired by dropping lost facts."""
        return []

    def page(
        self, after: int, limit: int, bytes_max: int, subject: str | None = None
    ) -> list[FactRow]:
        rows = (
            self._run("after", after, limit, bytes_max)
            if subject is None
            else self._run("about", subject.encode(), after, limit, bytes_max)
        )
        return [
            FactRow(seq, at, kind, version, about.decode(), body.encode(), checksum, chain)
            for seq, at, kind, version, about, body, checksum, chain in rows
        ]

    def prune(self, limit: int, before: float, bytes_max: int) -> bool:
        oldest = self._run("oldest", limit, PRUNED_PER_STEP).fetchall()
        if int(self._value("used_bytes")) <= bytes_max:
            oldest = list(takewhile(lambda row: row[1] < before, oldest))
        if not oldest:
            return False
        last = oldest[-1][0]
        self._run("delete_to", last)
        self._run("set_pruned", last)
        return len(oldest) == PRUNED_PER_STEP

    def checkpoints(self) -> list[Checkpoint]:
        return [Checkpoint(*row) for row in self._run("checkpoints")]

    def checkpoint_parts(self, finished: Checkpoint) -> list[bytes] | None:
        parts = [bytes(body) for (body,) in self._run("parts", finished.number)]
        checksum = 0
        for part in parts:
            checksum = zlib.crc32(part, checksum)
        number, seq, _, _ = finished
        return parts if Checkpoint.of_parts(number, seq, len(parts), checksum) == finished else None

    def last_checkpoint_number(self) -> int:
        return int(self._value("last_checkpoint_number") or 0)

    def insert_part(self, checkpoint: int, number: int, body: bytes) -> None:
        self._run("insert_part", checkpoint, number, body)

    def finish_checkpoint(self, finished: Checkpoint, keep: int) -> None:
        self._run("insert_checkpoint", *finished)
        self._run("delete_old_checkpoints", keep)

    def drop_checkpoint(self, finished: Checkpoint) -> None:
        self._run("delete_checkpoint", finished.number)

    def sweep(self) -> bool:
        return bool(self._run("sweep", PARTS_PER_SWEEP).rowcount > 0)

    def _run(self, name: str, *values: object) -> "psycopg.Cursor[SqlRow]":
        return self._connection.execute(SQL[name], values)

    def _value(self, name: str) -> SqlValue:
        row = self._run(name).fetchone()
        return None if row is None else row[0]


class PostgresFacts:
    """The facts of a ledger in PostgreSQL; implements `storage.base.FactStore`."""

    is_local = False

    def __init__(self, leadership: Leadership) -> None:
        self._leadership = leadership
        self._writer: Connection | None = None
        self._reader: Connection | None = None
        self._reading = threading.Lock()
        self._fencing = self._used_fencing = 0

    @property
    def place(self) -> str:
        return self._leadership.place

    @property
    def is_full(self) -> bool:
        """Always False: a commit fails if the database's disk is full; see `FactStore.is_full`."""
        return False

    def open(self) -> OpenedFacts:
        self._leadership.take()
        try:
            with translate_errors(self.place):
                self._writer = writer = self._leadership.open_writer("ledger")
                self._reader = self._leadership.open("reader")
                row = writer.execute(SQL["fencing"]).fetchone()
        except BaseException:
            self._end_writer()
            self.close()
            raise
        assert row is not None
        self._fencing = self._used_fencing = int(row[0])
        return OpenedFacts(self._fencing, [])

    @contextlib.contextmanager
    def reading(self) -> Iterator[Facts]:
        with self._reading, translate_errors(self.place):
            if self._reader is None:
                raise StorageError(f"{self.place} is not open.")
            if self._reader.closed:  # The database ended this session; the next session may work.
                self._reader = self._leadership.open("reader")
            with self._reader.transaction():
                self._reader.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
                yield PostgresFactTables(self._reader)

    def commit(
        self, rows: Sequence[FactRow], fencing: int, works: Sequence[Callable[[Facts], object]]
    ) -> list[object]:
        self._leadership.check_failure()
        assert self._writer is not None
        try:
            with translate_errors(self.place):
                self._reserve(self._writer, fencing)
                results = self._transact(self._writer, rows, works)
        except StorageFailed as error:
            self._leadership.fail(str(error))
            raise
        self._leadership.check_failure()
        return results

    def _reserve(self, writer: Connection, number: int) -> None:
        """Store a higher limit for fencing numbers if needed, thousands of numbers at a time."""
        if number > self._fencing:
            reserved = number + FENCING_BLOCK
            done = writer.execute(SQL["set_fencing"], (self._leadership.epoch, reserved))
            if not done.rowcount:
                raise self._leadership.deposition()
            self._fencing = reserved
        self._used_fencing = max(self._used_fencing, number)

    def _transact(
        self,
        writer: Connection,
        rows: Sequence[FactRow],
        works: Sequence[Callable[[Facts], object]],
    ) -> list[object]:
        if not works:
            self._insert(writer, rows)
            return []
        with writer.transaction():
            if not writer.execute(SCHEMA["fence"], (self._leadership.epoch,)).rowcount:
                raise self._leadership.deposition()
            self._insert(writer, rows)
            tables = PostgresFactTables(writer)
            return [work(tables) for work in works]

    def _insert(self, writer: Connection, rows: Sequence[FactRow]) -> None:
        if rows and not insert_facts(writer, self._leadership.epoch, rows):
            raise self._leadership.deposition()

    def upkeep(self) -> float | None:
        self._leadership.look()
        return LOOK_SECONDS

    def end_writing(self, *, clean: bool) -> None:
        if clean and self._writer is not None and self._used_fencing < self._fencing:
            with contextlib.suppress(psycopg.Error):  # The numbers then stay unused.
                values = (self._leadership.epoch, self._used_fencing)
                self._writer.execute(SQL["set_fencing"], values)
        self._end_writer()

    def _end_writer(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def close(self) -> None:
        with self._reading:
            if self._reader is not None:
                self._reader.close()
                self._reader = None
        self._leadership.release()


def insert_facts(connection: Connection, epoch: int, rows: Sequence[FactRow]) -> bool:
    """Add facts if the database still has this epoch; return whether it has."""
    seqs, times, kinds, versions, subjects, bodies, checksums, chains = map(
        list, zip(*rows, strict=True)
    )
    done = connection.execute(
        SQL["insert"],
        (
            epoch,
            seqs,
            times,
            kinds,
            versions,
            [subject.encode() for subject in subjects],
            [body.decode() for body in bodies],
            checksums,
            chains,
        ),
        prepare=True,
    )
    return bool(done.rowcount == len(rows))
