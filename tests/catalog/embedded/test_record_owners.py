"""No tenant can fill the catalog so that other tenants get no space."""

import asyncio
import threading

import pytest

from moorage.catalog.embedded.contexts import CONTEXTS_MAX
from moorage.catalog.embedded.record_owners import OwnedRecord, RecordOwners
from moorage.catalog.embedded.store import AT_ONCE_MAX, DocumentStore, StoredRow
from moorage.catalog.limits import CLUSTERS_MAX, EXECUTORS_MAX, STORE_BYTES_MAX
from moorage.catalog.opening import open_catalog
from moorage.core.state.tenant_loads import OVERFLOW_SHARE, TENANT_SHARE
from moorage.model import Code
from moorage.protocol.faults import ServiceError
from moorage.protocol.on_behalf import ON_BEHALF_OF
from moorage.storage.sqlite.records import SqliteRecords


class Catalog:
    """The owners of records, without a database."""

    def __init__(self):
        self.owners = RecordOwners()
        self.records = self.bytes = 0

    def put(self, owner, size=1, name=None):
        """Store a cluster; after a failure, the cluster is not stored."""
        self.owners.begin()
        self.records, self.bytes = self.records + 1, self.bytes + size
        usage = {"cluster": (self.records, self.bytes), "history": (1, STORE_BYTES_MAX)}
        name = name or f"c{self.records}"
        try:
            self.owners.put("cluster", name, OwnedRecord(owner, size), lambda: usage)
        except ServiceError as error:
            self.owners.undo()
            self.records, self.bytes = self.records - 1, self.bytes - size
            return error
        return None


def fill(catalog, owner, size=1):
    """Store clusters until the tenant's limit; return their number and the refusal."""
    many = 0
    while (error := catalog.put(owner, size)) is None:
        many += 1
    return many, error


def test_one_tenant_may_fill_the_catalog_and_other_tenants_still_get_a_part():
    catalog = Catalog()
    many, error = fill(catalog, "mallory")
    assert many == CLUSTERS_MAX
    assert (error.code, error.field) == (Code.TOO_LARGE, "id")
    assert "10001 cluster records, 10001 of them of tenant “mallory”" in error.reason
    assert "delete some" in error.reason
    assert error.details == {"of_all": 10_001, "of_tenant": 10_001, "most": CLUSTERS_MAX}
    assert fill(catalog, "bob")[0] == fill(catalog, "cay")[0] == CLUSTERS_MAX // TENANT_SHARE
    assert fill(catalog, "dan")[0] == 0
    assert catalog.records == CLUSTERS_MAX + CLUSTERS_MAX // OVERFLOW_SHARE


def test_stored_bytes_are_bounded_and_the_last_part_is_for_small_tenants():
    catalog, size = Catalog(), STORE_BYTES_MAX // 64
    many, error = fill(catalog, "mallory", size)
    assert many == 64
    assert "bytes of documents" in error.reason
    assert fill(catalog, "bob", size)[0] == 64 // TENANT_SHARE


async def add(catalog, tenant, *names):
    ON_BEHALF_OF.set(tenant)
    for name in names:
        await catalog.executors.create({"executor_id": name}, tenant)


async def test_owners_outlast_a_restart_and_deletions_make_room(tmp_path):
    catalog = await open_catalog(SqliteRecords(tmp_path / "catalog.db"))
    await add(catalog, "mallory", *(f"e{number}" for number in range(EXECUTORS_MAX)))
    await catalog.close()
    catalog = await open_catalog(SqliteRecords(tmp_path / "catalog.db"))
    with pytest.raises(ServiceError) as caught:
        await add(catalog, "mallory", "more")
    assert caught.value.details["of_tenant"] == EXECUTORS_MAX + 1
    await catalog.executors.update("e0", {"description": "a change adds none"})
    await add(catalog, "bob", "his")
    with pytest.raises(ServiceError):
        await add(catalog, "mallory", "more")
    for name in ("e0", "e1"):
        await catalog.executors.delete(name)
    await add(catalog, "mallory", "more")
    await catalog.close()


async def test_contexts_of_one_tenant_leave_room_for_contexts_of_other_tenants(catalog):
    await catalog.contexts.save(((f"p{n}", "mallory"), 0, b"x") for n in range(CONTEXTS_MAX + 9))
    await catalog.contexts.save([(("p", "bob"), 0, b"x"), (("p0", "mallory"), 1, b"y")])
    found = {key: packed for key, _, packed in await catalog.contexts.load()}
    assert len(found) == CONTEXTS_MAX + 1
    assert (found["p", "bob"], found["p0", "mallory"]) == (b"x", b"y")


async def test_a_tenant_that_floods_the_catalog_does_not_hold_up_another_tenant(tmp_path):
    store = await DocumentStore.open(SqliteRecords(tmp_path / "catalog.db"))
    holding, done = threading.Event(), []

    async def job(tenant, name):
        ON_BEHALF_OF.set(tenant)
        await store.run(lambda db: (holding.wait(60), db.put("alias", StoredRow(name, b"{}"))))
        done.append(tenant)

    flood = [asyncio.create_task(job("mallory", f"m{number}")) for number in range(100)]
    await asyncio.sleep(0)
    other = asyncio.create_task(job("bob", "b"))
    await asyncio.sleep(0)
    holding.set()
    await asyncio.gather(other, *flood)
    assert done.index("bob") <= AT_ONCE_MAX
    await store.close()
