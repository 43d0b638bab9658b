"""Tests of the document store: transactions, order, limits in the database, and a clean end."""

import asyncio
import sqlite3
import threading

import pytest

from moorage.catalog.embedded.store import AT_ONCE_MAX, JOBS_MAX, DocumentStore, StoredRow
from moorage.model import Code
from moorage.protocol.faults import ServiceError
from moorage.storage.sqlite.records import SqliteRecords


@pytest.fixture
async def store(place):
    store = await DocumentStore.open(place.records())
    yield store
    await store.close()


async def test_records_survive_closing_the_store(place):
    first = await DocumentStore.open(place.records())
    await first.run(lambda db: db.put("policy", StoredRow("p", b"{}", b"files")))
    await first.close()
    second = await DocumentStore.open(place.records())
    assert await second.run(lambda db: db.get("policy", "p")) == StoredRow("p", b"{}", b"files")
    assert await second.run(lambda db: db.get("cluster", "p")) is None
    await second.close()


async def test_the_usage_of_the_catalog_follows_every_change(store):
    def change(db):
        db.put("cluster", StoredRow("a", b"12345"))
        db.put("cluster", StoredRow("b", b"123"))
        db.put("policy", StoredRow("p", b"1", b"22"))
        db.put("cluster", StoredRow("a", b"1"))
        db.remove("cluster", "b")
        return db.usage()

    found = await store.run(change)
    assert (found["cluster"], found["policy"]) == ((1, 1), (1, 3))


async def test_a_job_of_the_store_that_raises_changes_nothing(store):
    def put_and_raise(db):
        db.put("cluster", StoredRow("a", b"1"))
        raise KeyError("no")

    published = []
    with pytest.raises(KeyError):
        await store.run(put_and_raise, published.append)
    assert not await store.run(lambda db: db.has("cluster", "a"))
    assert (await store.run(lambda db: db.usage()))["cluster"] == (0, 0)
    assert published == []


async def test_jobs_are_published_in_order_on_the_loop_even_if_they_are_not_awaited(store):
    published = []
    loop_thread = threading.get_ident()

    def publish(number):
        published.append((number, threading.get_ident()))

    holding = threading.Event()
    tasks = [asyncio.create_task(store.run(lambda _: holding.wait(60) and 0, publish))]
    tasks += [
        asyncio.create_task(store.run(lambda _, number=number: number, publish))
        for number in range(1, 20)
    ]
    await asyncio.sleep(0)  # The first calls have submitted their jobs; the others wait.
    for task in (*tasks[2 : AT_ONCE_MAX - 1], tasks[15]):
        task.cancel()
    holding.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    await store.run(lambda db: None)
    assert published == [(number, loop_thread) for number in range(20) if number != 15]


async def test_more_jobs_than_the_queue_holds_are_refused(store):
    started, holding = threading.Event(), threading.Event()

    def hold(_):
        started.set()
        holding.wait(60)

    first = asyncio.create_task(store.run(hold))
    await asyncio.to_thread(started.wait, 60)
    many = JOBS_MAX + AT_ONCE_MAX - 2  # One tenant never gets all turns of the thread.
    tasks = [asyncio.create_task(store.run(lambda db: None)) for _ in range(many)]
    await asyncio.sleep(0)
    with pytest.raises(ServiceError) as caught:
        await store.run(lambda db: None)
    holding.set()
    assert caught.value.code is Code.BUSY
    await asyncio.gather(first, *tasks)


async def test_close_of_the_store_finishes_accepted_jobs_and_refuses_later_jobs(tmp_path):
    store = await DocumentStore.open(SqliteRecords(tmp_path / "catalog.db"))
    accepted = asyncio.create_task(store.run(lambda db: db.put("cluster", StoredRow("a", b"1"))))
    await asyncio.sleep(0)
    await asyncio.gather(store.close(), store.close(), accepted)
    with pytest.raises(ServiceError) as caught:
        await store.run(lambda db: None)
    assert caught.value.code is Code.SHUTTING_DOWN


async def test_files_that_are_not_a_catalog_are_refused(tmp_path):
    (tmp_path / "text.db").write_text("not a database, but long enough to look at" * 50)
    with pytest.raises(ServiceError) as caught:
        await DocumentStore.open(SqliteRecords(tmp_path / "text.db"))
    assert caught.value.code is Code.UNAVAILABLE
    with pytest.raises(ServiceError, match="cannot be opened"):
        await DocumentStore.open(SqliteRecords(tmp_path / "missing" / "catalog.db"))


async def test_a_file_of_a_newer_release_is_refused(tmp_path):
    path = tmp_path / "catalog.db"
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.raises(ServiceError, match=r"catalog\.db has format 99, .* moored of a newer"):
        await DocumentStore.open(SqliteRecords(path))


async def test_writes_are_in_wal_mode_and_durable(tmp_path):
    store = await DocumentStore.open(SqliteRecords(tmp_path / "catalog.db"))
    await store.run(lambda db: db.put("cluster", StoredRow("a", b"1")))
    other = sqlite3.connect(tmp_path / "catalog.db")
    assert other.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert other.execute("SELECT id FROM records").fetchall() == [("a",)]
    other.close()
    await store.close()
