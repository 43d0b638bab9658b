"""Reads a whole data folder while no server uses it, and fills a folder from another storage."""

import contextlib
import os
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import msgspec

from moorage.storage.base import AuditEnd, Contents, StorageCorrupt, StorageError, TokenRow
from moorage.storage.sqlite import (
    AGENTS_FILE,
    AUDIT_FOLDER,
    AUDIT_MARK,
    CATALOG_FILE,
    LEDGER_FILE,
    SECRET_FILE,
    TOKENS_FILE,
    facts,
    records,
)
from moorage.storage.sqlite.fact_tables import FactTables
from moorage.storage.sqlite.fencing import LABEL as FENCING
from moorage.storage.sqlite.fencing import fencing_path
from moorage.storage.sqlite.files import OWNER_ONLY, read_file, translate_errors, write_durably
from moorage.storage.sqlite.lock import WriterLock
from moorage.storage.sqlite.marks import Found, read_mark
from moorage.storage.sqlite.shared_file import SqliteAgents, SqliteTokens
from moorage.storage.sqlite.storage import read_secret, write_secret


@contextlib.contextmanager
def reading(folder: Path) -> Iterator[Contents]:
    """Yield the contents of a data folder; no server can use it during the block.

    Raises:
        StorageLocked: A server uses the folder.
        StorageCorrupt: A part of the data is missing or damaged.
        StorageError: The folder is not a data folder of this release.
    """
    ledger, catalog = folder / LEDGER_FILE, folder / CATALOG_FILE
    if not ledger.exists():
        raise StorageError(f"{folder} has no {LEDGER_FILE}: expected a server's data folder.")
    lock = WriterLock(ledger)
    lock.acquire()
    try:
        with translate_errors(str(folder), values=False):
            facts.look(ledger)
            if not catalog.exists():
                raise StorageCorrupt(str(folder), f"{CATALOG_FILE} is missing")
            records.look(catalog)
            fencing = read_mark(fencing_path(ledger), FENCING)
            if not fencing.known:
                raise StorageCorrupt(str(folder), fencing.doubt)
            secret = folder / SECRET_FILE
            with facts.looking(ledger) as fact_tables, records.looking(catalog) as record_tables:
                yield Contents(
                    str(folder),
                    fact_tables,
                    record_tables,
                    _tokens(folder / TOKENS_FILE),
                    _agents(folder / AGENTS_FILE),
                    read_secret(secret) if secret.exists() else b"",
                    fencing.first,
                    partial(_audit, folder / AUDIT_FOLDER),
                    _audit_begin(folder / AUDIT_MARK),
                )
    finally:
        lock.release()


def _tokens(path: Path) -> list[TokenRow]:
    with closing(SqliteTokens(path)) as tokens:
        return [] if tokens.version() is None else tokens.rows()


def _agents(path: Path) -> dict[str, bytes]:
    if not path.exists():
        return {}
    with closing(SqliteAgents(path)) as agents:
        return agents.rows()


def _audit(folder: Path) -> Iterator[bytes]:
    for path in sorted(folder.glob("[0-9]*.jsonl")):
        with path.open("rb") as file:
            yield from (line for line in file if line.endswith(b"\n"))


class _Line(msgspec.Struct):
    number: int
    hash: str


class _Mark(msgspec.Struct):
    """The file `audit.mark`, which `daemon.access.audit_mark` describes."""

    deleted: _Line
    end: _Line


class _FirstLine(msgspec.Struct):
    number: int
    prev: str


def _audit_begin(mark: Path) -> AuditEnd | None:
    # `moored audit verify` reports a damaged mark.
    with contextlib.suppress(FileNotFoundError, msgspec.MsgspecError):
        deleted = msgspec.json.decode(read_file(mark), type=_Mark).deleted
        return AuditEnd(deleted.number, deleted.hash, None)
    return None


def fill(folder: Path, source: Contents) -> None:
    """Write all data of another storage into an empty folder.

    Raises:
        StorageError: A file cannot be written.
    """
    ledger, last = folder / LEDGER_FILE, source.facts.last_seq()
    with translate_errors(str(folder), values=False):
        numbers = (last, source.facts.chain_of(last) or 0, 0)
        facts.rebuild(ledger, partial(_fill_facts, source), numbers, (source.fencing, 0))
        rows = ((kind, *row) for kind, row in source.records_by_age())
        records.rebuild(folder / CATALOG_FILE, Found(exists=False), rows)
        if source.tokens:
            with closing(SqliteTokens(folder / TOKENS_FILE)) as tokens:
                for row in source.tokens:
                    tokens.insert(row)
        if source.agents:
            with closing(SqliteAgents(folder / AGENTS_FILE)) as agents, agents.change() as there:
                there.update(source.agents)
        if source.secret:
            write_secret(folder / SECRET_FILE, source.secret)
        _fill_audit(folder, source)


def _fill_audit(folder: Path, source: Contents) -> None:
    lines = source.audit()
    first = last = next(lines, None)
    if first is None or last is None:
        return
    folder.joinpath(AUDIT_FOLDER).mkdir(mode=0o700)
    with folder.joinpath(AUDIT_FOLDER, "00000001.jsonl").open("xb") as file:
        os.fchmod(file.fileno(), OWNER_ONLY)
        file.write(first)
        for last in lines:
            file.write(last)
        file.flush()
        os.fsync(file.fileno())
    if (begin := source.audit_begin) is None:  # As a server does that finds no mark.
        oldest = msgspec.json.decode(first, type=_FirstLine)
        begin = AuditEnd(oldest.number - 1, oldest.prev, None)
    mark = _Mark(_Line(begin.number, begin.hash), msgspec.json.decode(last, type=_Line))
    write_durably(folder / AUDIT_MARK, msgspec.json.encode(mark))


def _fill_facts(source: Contents, tables: FactTables) -> None:
    for rows in source.fact_pages():
        tables.insert(rows)
    tables.write_pruned_seq(source.facts.pruned_seq())
    for number, (finished, parts) in enumerate(source.checkpoints(), 1):
        for part, body in enumerate(parts):
            tables.insert_part(finished.number, part, body)
        tables.finish_checkpoint(finished, number)
