"""Reads a whole database while no server uses it, and fills a database from another storage."""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from functools import partial
from itertools import islice
from typing import Final

import msgspec

from moorage.storage.base import AuditEnd, Contents, TokenRow
from moorage.storage.postgres.audit import SQL as AUDIT
from moorage.storage.postgres.audit import insert_lines, page_of
from moorage.storage.postgres.connection import Connection, translate_errors
from moorage.storage.postgres.facts import SQL as FACTS
from moorage.storage.postgres.facts import PostgresFactTables, insert_facts
from moorage.storage.postgres.leadership import SQL, Leadership
from moorage.storage.postgres.records import PostgresRecordTable
from moorage.storage.postgres.shared_table import AGENTS_SQL, COUNT_CHANGE, TOKENS_SQL

_UNHURRIED: Final = "SET LOCAL idle_in_transaction_session_timeout = 0"
"""Turns off the timeout of idle transactions: reading the other storage may be slow."""
_PAGE_LINES: Final = 1_000


@contextlib.contextmanager
def reading(address: str) -> Iterator[Contents]:
    """Yield the contents of a database, and let no server use it during the block.

    Raises:
        StorageLocked: A server uses the database.
        StorageError: The database cannot be read.
    """
    leadership = Leadership(address)
    leadership.take()
    try:
        with (
            translate_errors(leadership.place),
            closing(leadership.open("copy")) as connection,
            connection.transaction(),
        ):
            connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
            connection.execute(_UNHURRIED)
            yield _contents(connection, leadership.place)
    finally:
        leadership.release()


def fill(address: str, source: Contents, check: Callable[[Contents], None]) -> bool:
    """Write the contents of another storage into an empty database, in one transaction.

    Until this succeeds, no server uses the database, because of a sign in it.

    Args:
        address: Address of the database.
        source: The contents to write.
        check: Compares the filled database with `source`; raises an error if they differ.

    Returns:
        False if the database already had these contents.

    Raises:
        StorageLocked: A server uses the database.
        StorageError: The database cannot be written, or has other contents.
    """
    leadership = Leadership(address, copies=True)
    leadership.take()
    try:
        with (
            translate_errors(leadership.place),
            closing(leadership.open_writer("copy")) as connection,
        ):
            if _contents(connection, leadership.place).is_empty():
                connection.execute(SQL["begin_copy"])  # `moored storage prepare` made the tables.
            with connection.transaction():
                connection.execute(_UNHURRIED)
                there = _contents(connection, leadership.place)
                is_new = there.is_empty()
                if is_new:
                    _write(connection, leadership, source, there.fencing)
                check(_contents(connection, leadership.place))
                connection.execute(SQL["end_copy"])
            leadership.check_failure()
    finally:
        leadership.release()
    return is_new


def _contents(connection: Connection, place: str) -> Contents:
    fencing = connection.execute(FACTS["fencing"]).fetchone()
    secret = connection.execute(SQL["secret"]).fetchone()
    assert fencing is not None
    return Contents(
        place,
        PostgresFactTables(connection),
        PostgresRecordTable(connection),
        [TokenRow(*row) for row in connection.execute(TOKENS_SQL["rows"])],
        {key: bytes(document) for key, document in connection.execute(AGENTS_SQL["rows"])},
        b"" if secret is None else bytes(secret[0]),
        int(fencing[0]),
        partial(_audit, connection),
        _audit_begin(connection),
    )


def _audit(connection: Connection) -> Iterator[bytes]:
    after = 0
    while page := page_of(connection, after):
        yield from (line for _, line in page)
        after = page[-1][0]


def _audit_begin(connection: Connection) -> AuditEnd | None:
    row = connection.execute(AUDIT["begin"]).fetchone()
    with suppress(msgspec.MsgspecError):  # `moored audit verify` reports the line.
        if row is not None:
            begin = msgspec.json.decode(row[0], type=_Deleted)
            return AuditEnd(begin.number, begin.hash, None)
    return None


def _write_audit(connection: Connection, source: Contents) -> None:
    if (begin := source.audit_begin) is not None:
        line = msgspec.json.encode(_Deleted(begin.number, begin.hash))
        connection.execute(AUDIT["note_begin"], (line,))
    seq, lines = None, source.audit()
    while page := list(islice(lines, _PAGE_LINES)):
        read = [msgspec.json.decode(line, type=_AuditLine) for line in page]
        seq = next((each.seq for each in reversed(read) if each.seq is not None), seq)
        end = AuditEnd(read[-1].number, read[-1].hash, seq)
        insert_lines(connection, read[0].number - 1, read[-1].at, page, end)


class _Deleted(msgspec.Struct):
    number: int
    hash: str


class _AuditLine(msgspec.Struct):
    number: int
    at: float
    hash: str
    seq: int | None = None


def _write(connection: Connection, leadership: Leadership, source: Contents, fencing: int) -> None:
    if not connection.execute(SQL["fence"], (leadership.epoch,)).rowcount:
        raise leadership.deposition()
    facts, records = PostgresFactTables(connection), PostgresRecordTable(connection)
    for rows in source.fact_pages():
        if not insert_facts(connection, leadership.epoch, rows):
            raise leadership.deposition()
    connection.execute(FACTS["set_pruned"], (source.facts.pruned_seq(),))
    for number, (finished, parts) in enumerate(source.checkpoints(), 1):
        for part, body in enumerate(parts):
            facts.insert_part(finished.number, part, body)
        facts.finish_checkpoint(finished, number)
    connection.execute(FACTS["set_fencing"], (leadership.epoch, max(fencing, source.fencing)))
    for kind, row in source.records_by_age():
        records.put(kind, row)
    with connection.cursor() as cursor:
        cursor.executemany(TOKENS_SQL["insert"], source.tokens)
        cursor.executemany(AGENTS_SQL["put"], list(source.agents.items()))
    for counter, is_used in (("tokens", source.tokens), ("agents", source.agents)):
        if is_used:
            connection.execute(COUNT_CHANGE, (counter,))
    _write_audit(connection, source)
    if source.secret:
        connection.execute(SQL["put_secret"], (source.secret,))
