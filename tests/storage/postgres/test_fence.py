"""The database stores no write of a deposed server, and each fence is necessary."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from moorage.core.state.facts import Renewed
from moorage.ledger.codec import seal
from moorage.model import RequestId
from moorage.storage.base import FactStore, RecordRow, RecordStore, StorageFailed

pytestmark = [pytest.mark.heavy, pytest.mark.postgres]
pytest.importorskip("psycopg", reason="the extra `postgres` is not installed")

from moorage.storage.postgres import facts as fact_store  # noqa: E402  # After the skip.
from moorage.storage.postgres import leadership  # noqa: E402  # As above.
from moorage.storage.postgres.storage import PostgresStorage  # noqa: E402  # As above.

ROW = seal(1, 1.0, Renewed(RequestId("r"), 2.0), 0)
RECORD = RecordRow("a", b"{}", b"", 1)
THERE = """SELECT (SELECT count(*) FROM moorage.fact), (SELECT count(*) FROM moorage.record),
    (SELECT count(*) FROM moorage.checkpoint_part),
    (SELECT value FROM moorage.meta WHERE name = 'fencing')"""

Write = Callable[[FactStore, RecordStore], object]
WRITES: dict[str, tuple[Write, dict[str, str], str]] = {
    "facts": (lambda facts, _: facts.commit([ROW], 0, []), fact_store.SQL, "insert"),
    "numbers": (lambda facts, _: facts.commit([], 1, []), fact_store.SQL, "set_fencing"),
    "checkpoints": (
        lambda facts, _: facts.commit([], 0, [lambda table: table.insert_part(1, 1, b"x")]),
        leadership.SQL,
        "fence",
    ),
    "records": (
        lambda _, records: records.transact(
            lambda table: table.put("cluster", RECORD), durable=True
        ),
        leadership.SQL,
        "fence",
    ),
}
"""By kind of write: the call, and the SQL statement that fences it."""


@contextlib.contextmanager
def replaced_server(postgres: Any, address: str) -> Iterator[tuple[FactStore, RecordStore]]:
    """Yield the stores of a server that has been replaced and does not know it yet."""
    storage = PostgresStorage(address)
    facts, records = storage.facts(), storage.records()
    facts.open()
    records.open()
    postgres.execute("UPDATE moorage.epoch SET epoch = epoch + 1", address.rpartition("/")[2])
    try:
        yield facts, records
    finally:
        records.close()
        facts.end_writing(clean=False)
        facts.close()


def write_after_takeover(postgres: Any, what: str) -> None:
    address = postgres.database()
    write, _, _ = WRITES[what]
    with replaced_server(postgres, address) as stores:
        with pytest.raises(StorageFailed, match="another server has written to"):
            write(*stores)
        assert postgres.execute(THERE, address.rpartition("/")[2]) == [(0, 0, 0, 0)]


@pytest.mark.parametrize("what", WRITES)
def test_a_replaced_server_writes_nothing(postgres, what: str):
    write_after_takeover(postgres, what)


@pytest.mark.parametrize("what", WRITES)
def test_without_the_fence_in_a_statement_a_deposed_server_would_write(
    postgres, what: str, monkeypatch: pytest.MonkeyPatch
):
    _, statements, name = WRITES[what]
    fenced = statements[name]
    mutant = fenced.replace("epoch = %s", "%s > 0")
    assert mutant != fenced
    monkeypatch.setitem(statements, name, mutant)
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        write_after_takeover(postgres, what)
