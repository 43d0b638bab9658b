"""The history of a policy is stored with each change, and bounded."""

import contextlib
import sqlite3

import pytest

from moorage.catalog.embedded import history
from moorage.catalog.embedded.store import DocumentStore, StoredRow
from moorage.catalog.opening import open_catalog
from moorage.model import Code
from moorage.protocol.faults import ServiceError
from moorage.protocol.on_behalf import ON_BEHALF_OF
from moorage.storage.sqlite.records import SqliteRecords

URI = "a:1-b"
POLICY = "class AIOSv1PolicyRule: ...\n"


async def publish(catalog, who="ann", **more):
    document = {"policy_rule_uri": URI, "code": POLICY, **more}
    return await catalog.policies.register(await catalog.policies.prepare(document), who)


async def test_the_history_has_author_and_time_of_every_change(catalog):
    record = await publish(catalog)
    await publish(catalog, "bob")
    change = {"$set": {"description": "x", "tags": "y"}}
    await catalog.policies.update(URI, change, "cid")
    await catalog.policies.delete(URI, "dan")
    again = await publish(catalog, "eve", policy_parameters={"p": 1})
    changes = await catalog.policies.history(URI)
    assert [(each["who"], each["what"]) for each in changes] == [
        ("ann", "registered"),  # Bob registered the same content again.
        ("cid", "described"),
        ("dan", "removed"),
        ("eve", "registered"),
    ]
    assert changes[1]["fields"] == ("description", "tags")
    assert [each["digest"] for each in changes] == [record.ref.digest] * 3 + [again.ref.digest]
    times = [each["at"] for each in changes]
    assert times == sorted(times)


async def test_a_refused_change_is_not_in_the_history_of_a_policy(catalog):
    await publish(catalog)
    with pytest.raises(ServiceError):
        await publish(catalog, "bob", policy_parameters={"p": 1})
    with pytest.raises(ServiceError):
        await catalog.policies.update(URI, {"$set": {"code": "x\n"}}, "bob")
    assert len(await catalog.policies.history(URI)) == 1


async def test_an_unknown_policy_has_no_history(catalog):
    with pytest.raises(ServiceError) as caught:
        await catalog.policies.history("none:1-x")
    assert caught.value.code is Code.UNKNOWN_POLICY


async def test_the_history_of_a_policy_survives_a_restart(catalog, tmp_path):
    await publish(catalog)
    await catalog.policies.delete(URI, "dan")
    await catalog.close()
    again = await open_catalog(SqliteRecords(tmp_path / "catalog.db"))
    assert [each["what"] for each in await again.policies.history(URI)] == ["registered", "removed"]
    await again.close()


async def test_the_history_keeps_the_first_change_of_a_policy_however_many_follow(tmp_path):
    store = await DocumentStore.open(SqliteRecords(tmp_path / "catalog.db"))

    def work(database):
        history.note(database, URI, "ann", "registered", "d")
        for number in range(history.CHANGES_MAX + 5):
            history.note(database, URI, str(number), "described", "d")
        return history.history_of(database, URI)

    changes = await store.run(work)
    await store.close()
    assert len(changes) == history.CHANGES_MAX
    assert changes[0]["who"] == "ann"
    assert changes[-1]["who"] == str(history.CHANGES_MAX + 4)


async def test_the_history_bounds_the_names_of_changed_fields(tmp_path):
    store = await DocumentStore.open(SqliteRecords(tmp_path / "catalog.db"))
    fields = tuple(f"{number}" * 1_000_000 for number in range(9)) + ("f",) * 1_000

    def work(database):
        history.note(database, URI, "ann", "described", "d", fields)
        return database.get("history", URI)

    assert len((await store.run(work)).document) < 10_000
    await store.close()


async def test_the_tenant_with_most_histories_loses_its_oldest_history_without_a_policy(tmp_path):
    store = await DocumentStore.open(SqliteRecords(tmp_path / "catalog.db"))

    async def add(tenant, *uris, live=False):
        def work(database):
            for uri in uris:
                history.note(database, uri, tenant, "registered", "d")
                if live:
                    database.put("policy", StoredRow(uri, b"{}"))

        ON_BEHALF_OF.set(tenant)
        await store.run(work)

    def forget(database):
        database.forget_history()
        return {row.id for row in database.rows("history")}

    hers = {f"hers:{number}-a" for number in range(9)}
    await add("ann", "gone:1-a")
    await add("cid", *hers, live=True)
    await add("bob", "gone:3-a", "gone:2-a", "gone:4-a")
    assert await store.run(forget) == {"gone:1-a", "gone:2-a", "gone:4-a", *hers}
    await store.close()
    store = await DocumentStore.open(SqliteRecords(tmp_path / "catalog.db"))
    await store.run(lambda database: database.rows("policy"))
    assert await store.run(forget) == {"gone:1-a", "gone:4-a", *hers}
    await store.close()
    with contextlib.closing(sqlite3.connect(tmp_path / "catalog.db")) as file:
        rows = file.execute("SELECT records FROM usage WHERE kind = 'history'").fetchone()
    assert rows == (11,)


async def test_a_failed_deletion_of_histories_leaves_their_count_unchanged(tmp_path):
    store = await DocumentStore.open(SqliteRecords(tmp_path / "catalog.db"))

    def fail(database):
        history.note(database, "b:1-a", "ann", "registered", "d")
        database.forget_history()
        raise LookupError

    await store.run(lambda database: history.note(database, "a:1-a", "ann", "registered", "d"))
    with pytest.raises(LookupError):
        await store.run(fail)
    assert await store.run(lambda database: database.ids("history")) == ["a:1-a"]
    await store.run(lambda database: database.forget_history())
    assert await store.run(lambda database: database.ids("history")) == []
    await store.close()
