"""Tests of the embedded catalog, on SQLite and PostgreSQL: services, quick reads, restarts."""

import asyncio
import contextlib
import sqlite3

import msgspec
import pytest

from moorage.catalog.changes import (
    ClusterDeleted,
    ClusterPut,
    MetricsDeleted,
    MetricsPut,
    PolicyDeleted,
    PolicyPut,
)
from moorage.catalog.opening import open_catalog
from moorage.model import Code
from moorage.protocol.faults import ServiceError
from moorage.storage.sqlite.records import SqliteRecords

POLICY = "class AIOSv1PolicyRule:\n    pass\n"
URI = "first:1.0-beta"


def cluster(name, gpus=2, **more):
    node = {"id": "node-0", "gpus": {"count": gpus}, "vcpus": {"count": 4}, "memory": 1024}
    return {"id": name, "status": "live", "nodes": {"nodeData": [node]}, **more}


def metrics(name, free=5):
    return {"clusterId": name, "nodes": [{"id": "node-0", "gpu": {"totalFreeMem": free}}]}


class Opened:
    """A catalog that can be closed and opened again, and the changes that it reported."""

    def __init__(self, place):
        self.place = place
        self.changes = []

    async def open(self):
        self.catalog = await open_catalog(self.place.records())
        self.catalog.memory.listeners.append(self.changes.append)
        return self.catalog

    async def reopen(self):
        await self.catalog.close()
        self.changes.clear()
        return await self.open()


@pytest.fixture
async def open_place(place):
    opened = Opened(place)
    await opened.open()
    yield opened
    await opened.catalog.close()


@pytest.fixture
async def catalog(open_place):
    return open_place.catalog


@contextlib.contextmanager
def expect_refusal(code, field=None):
    with pytest.raises(ServiceError) as caught:
        yield
    assert caught.value.code is code
    assert field is None or caught.value.field == field


# Clusters ----------------------------------------------------------------------------------


async def test_a_cluster_is_created_changed_and_deleted(open_place):
    catalog = open_place.catalog
    created = await catalog.clusters.create(cluster("c1", vendor="kept"))
    assert created["vendor"] == "kept"
    assert created["gpus"]["count"] == 2
    assert await catalog.clusters.get("c1") == created
    with expect_refusal(Code.ALREADY_EXISTS, "id"):
        await catalog.clusters.create(cluster("c1"))
    changed = await catalog.clusters.update(
        "c1", {"$set": {"nodes.nodeData.0.gpus.count": 8, "x": 1}, "$unset": {"vendor": ""}}
    )
    # The server computed the total, so the total follows the nodes.
    assert changed["gpus"]["count"] == 8
    assert "vendor" not in changed
    replaced = await catalog.clusters.update("c1", cluster("c1", gpus=1, status="down"))
    assert (replaced["gpus"]["count"], replaced["x"]) == (1, 1), "fields that the change omits stay"
    assert await catalog.clusters.delete("c1") == replaced
    *puts, deleted = open_place.changes
    assert deleted == ClusterDeleted("c1")
    seen = [(type(put), put.live, len(put.cluster.nodes[0].gpus)) for put in puts]
    assert seen == [(ClusterPut, True, 2), (ClusterPut, True, 8), (ClusterPut, False, 1)]


async def test_every_request_for_an_unknown_cluster_raises_not_found(catalog):
    for name in ("c1", "../../admin", "", None, [], {"$ne": 1}):
        with expect_refusal(Code.NOT_FOUND):
            await catalog.clusters.get(name)
    with expect_refusal(Code.NOT_FOUND):
        await catalog.clusters.delete("c1")
    with expect_refusal(Code.NOT_FOUND):
        await catalog.clusters.update("c1", cluster("c1"))


async def test_a_not_found_error_suggests_the_nearest_name(catalog):
    await catalog.clusters.create(cluster("berlin"))
    document = {"policy_rule_uri": "packing:1-stable", "code": "x = 1\n"}
    await catalog.policies.register(await catalog.policies.prepare(document))
    clusters, policies = catalog.clusters, catalog.policies
    for request, near in (
        (clusters.get("berlim"), "berlin"),
        (clusters.update("berlni", {}), "berlin"),
        (clusters.delete("Berlin"), "berlin"),
        (policies.get("packing"), "packing:1-stable"),
        (policies.update("packing:1-stabel", {}), "packing:1-stable"),
        (policies.delete("pack:1-stable"), "packing:1-stable"),
    ):
        with pytest.raises(ServiceError, match=rf"\(did you mean {near}\?\)"):
            await request
    with pytest.raises(ServiceError, match=r"no policy 'shipping:1-stable' is registered; GET"):
        await policies.get("shipping:1-stable")  # Only the version is similar.
    with pytest.raises(ServiceError, match=r"no cluster 'somewhere' \(there is berlin\)$"):
        await clusters.get("somewhere")


async def test_refused_changes_change_nothing(open_place):
    catalog = open_place.catalog
    before = await catalog.clusters.create(cluster("c1"))
    with expect_refusal(Code.BAD_MESSAGE, "id"):
        await catalog.clusters.update("c1", {"$set": {"id": "c2"}})
    with expect_refusal(Code.BAD_MESSAGE, "nodes.nodeData[0].memory"):
        await catalog.clusters.update("c1", {"$set": {"nodes.nodeData.0.memory": -1}})
    with expect_refusal(Code.BAD_MESSAGE):
        await catalog.clusters.create(cluster("c3", big=2**70))
    assert await catalog.clusters.get("c1") == before
    assert len(open_place.changes) == 1
    reopened = await open_place.reopen()
    assert reopened.memory.live_ids() == ("c1",)


async def test_a_cluster_has_the_same_owner_until_it_is_deleted(open_place):
    clusters = open_place.catalog.clusters
    document = await clusters.create(cluster("c1"), "ann")
    await clusters.add_nodes("c2", cluster("c2"), "bob")
    await clusters.create(cluster("old"))
    assert "ann" not in str(document)
    await clusters.update("c1", {"reputation": 3})
    await clusters.add_nodes("c2", cluster("c2", gpus=3))
    await clusters.add_nodes("old", cluster("old"), "bob")
    names = ("c1", "c2", "old", "none")
    owners = ["ann", "bob", "", ""]
    assert [open_place.catalog.memory.owner(name) for name in names] == owners
    again = await open_place.reopen()
    assert [again.memory.owner(name) for name in names] == owners
    await again.clusters.delete("c1")
    await again.clusters.create(cluster("c1"), "bob")
    assert again.memory.owner("c1") == "bob"


async def test_if_two_tenants_register_one_cluster_one_of_them_fails(catalog):
    """Both tenants passed the check, since the cluster did not exist when they began."""
    done = await asyncio.gather(
        *(catalog.clusters.add_nodes("c1", cluster("c1"), who) for who in ("ann", "ann", "bob")),
        return_exceptions=True,
    )
    assert [done[0][1], done[1][1]] == [True, False]
    assert done[2].code is Code.CONFLICT
    assert catalog.memory.owner("c1") == "ann"


async def test_a_change_of_the_callers_document_does_not_change_the_catalog(catalog):
    document = cluster("c1", tags=["a"])
    await catalog.clusters.create(document)
    document["tags"].append("b")
    assert (await catalog.clusters.get("c1"))["tags"] == ["a"]


async def test_queries_return_matching_documents(catalog):
    for name, gpus in (("c2", 2), ("c1", 1), ("c3", 3)):
        await catalog.clusters.create(cluster(name, gpus))
    found = await catalog.clusters.query({"gpus.count": {"$gte": "2"}})
    assert [document["id"] for document in found] == ["c2", "c3"]
    assert len(await catalog.clusters.query({})) == 3
    with expect_refusal(Code.UNSUPPORTED, "$where"):
        await catalog.clusters.query({"$where": "1"})
    for query in ([], "x"):
        with expect_refusal(Code.BAD_MESSAGE, "query"):
            await catalog.clusters.query(query)


async def test_a_change_is_reported_once_it_is_durable(tmp_path):
    path = tmp_path / "catalog.db"
    seen = []

    def on_change(change):
        other = sqlite3.connect(path)
        seen.extend(other.execute("SELECT id FROM records").fetchall())
        other.close()

    catalog = await open_catalog(SqliteRecords(path))
    catalog.memory.listeners.append(on_change)
    await catalog.clusters.create(cluster("c1"))
    assert seen == [("c1",)]
    await catalog.close()


async def test_after_a_cancelled_change_memory_and_disk_are_equal(open_place):
    creating = asyncio.create_task(open_place.catalog.clusters.create(cluster("c1")))
    await asyncio.sleep(0)  # The change has submitted its job.
    creating.cancel()
    await asyncio.gather(creating, return_exceptions=True)
    with expect_refusal(Code.NOT_FOUND):
        await open_place.catalog.clusters.update("none", {})  # Runs after the first job.
    assert open_place.catalog.memory.knows("c1")
    assert [type(change) for change in open_place.changes] == [ClusterPut]


# Metrics -----------------------------------------------------------------------------------


async def test_metrics_are_stored_changed_and_deleted(open_place):
    catalog = open_place.catalog
    stored, created = await catalog.metrics.put(metrics("c1"))
    assert created
    assert stored["cluster"]["gpu"]["totalFreeMem"] == 5
    _, created = await catalog.metrics.put(metrics("c1", free=6))
    assert not created
    changed, created = await catalog.metrics.update("c1", {"nodes.0.gpu.totalFreeMem": 7})
    assert not created
    assert changed["cluster"]["gpu"]["totalFreeMem"] == 7
    assert await catalog.metrics.get("c1") == changed
    found = await catalog.metrics.query({"cluster.gpu.totalFreeMem": {"$gt": 6}})
    assert found == [changed]
    assert await catalog.metrics.query() == [changed]
    assert await catalog.metrics.delete("c1") == changed
    with expect_refusal(Code.NOT_FOUND):
        await catalog.metrics.get("c1")
    assert open_place.changes == [MetricsPut("c1")] * 3 + [MetricsDeleted("c1")]


# Policies ----------------------------------------------------------------------------------


async def publish(catalog, **more):
    document = {"policy_rule_uri": URI, "code": POLICY, **more}
    return await catalog.policies.register(await catalog.policies.prepare(document))


async def test_a_policy_is_published_changed_and_deleted(open_place):
    catalog = open_place.catalog
    prepared = await catalog.policies.prepare({"policy_rule_uri": URI, "code": POLICY})
    assert catalog.memory.policy(URI) is None
    record = await catalog.policies.register(prepared)
    assert catalog.memory.policy(URI) is record
    assert record.files == {"function.py": POLICY.encode()}
    assert await publish(catalog) is record
    assert catalog.memory.policy_uris() == [URI]
    described = await catalog.policies.update(URI, {"$set": {"description": "new"}})
    assert described == await catalog.policies.get(URI) == {**record.document, "description": "new"}
    assert catalog.memory.policy(URI).ref == record.ref
    assert await catalog.policies.query({"description": "new"}) == [described]
    assert await catalog.policies.query() == [described]
    await catalog.policies.delete(URI)
    assert catalog.memory.policy(URI) is None
    with expect_refusal(Code.UNKNOWN_POLICY):
        await catalog.policies.get(URI)
    assert open_place.changes == [PolicyPut(URI), PolicyPut(URI), PolicyDeleted(URI)]


async def test_other_content_under_a_registered_uri_is_refused(catalog):
    record = await publish(catalog)
    for more in ({"code": POLICY + "#"}, {"policy_settings": {"a": 1}}, {"description": "x"}):
        with expect_refusal(Code.ALREADY_EXISTS, "policy_rule_uri"):
            await publish(catalog, **more)
    for change in (
        {"$set": {"code": POLICY + "#"}},
        {"$set": {"policy_parameters.p": 1}},
        {"policy_rule_uri": "other:1-b"},
    ):
        with pytest.raises(ServiceError):
            await catalog.policies.update(URI, change)
    assert catalog.memory.policy(URI) is record
    assert (await publish(catalog, policy_rule_uri="first:1.1-beta")).ref.digest == (
        record.ref.digest
    )


# The hot path ------------------------------------------------------------------------------


async def test_only_live_clusters_may_be_candidates(catalog):
    assert (catalog.memory.live_ids(), list(catalog.memory.models())) == ((), [])
    await catalog.clusters.create(cluster("b"))
    await catalog.clusters.create(cluster("a"))
    await catalog.clusters.create(cluster("down", status="maintenance"))
    assert catalog.memory.live_ids() == ("a", "b")
    assert [found.id for found in catalog.memory.models()] == ["a", "b"]
    assert catalog.memory.knows("down")
    assert not catalog.memory.knows("nobody")
    await catalog.clusters.update("down", {"$set": {"status": "Live"}})
    await catalog.clusters.update("b", {"$set": {"status": "down"}})
    assert catalog.memory.live_ids() == ("a", "down")
    await catalog.clusters.delete("a")
    assert catalog.memory.live_ids() == ("down",)


def unpack(blobs):
    return [(name, version, msgspec.msgpack.decode(blob)) for name, version, blob in blobs]


async def test_blobs_for_cells_have_the_documents_with_their_metrics_and_versions(catalog):
    one = await catalog.clusters.create(cluster("c1"))
    two = await catalog.clusters.create(cluster("c2"))
    first = unpack(catalog.memory.blobs(["c2", "nobody", "c1"]))
    assert [(name, content) for name, _, content in first] == [
        ("c2", {"data": two, "cluster_metrics": None}),
        ("c1", {"data": one, "cluster_metrics": None}),
    ]
    again = catalog.memory.blobs(["c1"])
    assert catalog.memory.blobs(["c1"])[0][2] is again[0][2]
    reported, _ = await catalog.metrics.put(metrics("c1"))
    ((_, version, content),) = unpack(catalog.memory.blobs(["c1"]))
    assert content == {"data": one, "cluster_metrics": reported}
    assert version > again[0][1]
    assert catalog.memory.version == version
    assert catalog.memory.blobs(["c2"])[0][1] == first[0][1]
    await catalog.metrics.delete("c1")
    ((_, later, content),) = unpack(catalog.memory.blobs(["c1"]))
    assert (later > version, content["cluster_metrics"]) == (True, None)


async def test_the_packed_documents_equal_the_documents_that_get_returns(catalog):
    assert catalog.memory.packed("cluster", ["c1"]) == {}
    await catalog.clusters.create(cluster("c1"))
    await catalog.metrics.put(metrics("c1"))
    for _ in range(2):
        packed = [
            catalog.memory.packed(kind, ["c2", "c1"])["c1"] for kind in ("cluster", "metrics")
        ]
        read = await catalog.clusters.get("c1"), await catalog.metrics.get("c1")
        assert tuple(map(msgspec.msgpack.decode, packed)) == read
        await catalog.clusters.update("c1", {"$set": {"tags": ["new"]}})
    await catalog.metrics.delete("c1")
    assert catalog.memory.packed("metrics", ["c1"]) == {}


async def test_a_cluster_registered_again_has_a_new_version(catalog):
    await catalog.clusters.create(cluster("c1"))
    ((_, before, _),) = catalog.memory.blobs(["c1"])
    await catalog.clusters.delete("c1")
    assert catalog.memory.blobs(["c1"]) == []
    await catalog.clusters.create(cluster("c1"))
    ((_, after, _),) = catalog.memory.blobs(["c1"])
    assert after > before


# Restarts and limits -----------------------------------------------------------------------


async def test_all_documents_are_there_after_a_restart(open_place):
    catalog = open_place.catalog
    document = await catalog.clusters.create(cluster("c1"))
    await catalog.clusters.create(cluster("c2", status="down"))
    reported, _ = await catalog.metrics.put(metrics("c1"))
    record = await publish(catalog, policy_settings={"s": 1})
    again = await open_place.reopen()
    assert await again.clusters.get("c1") == document
    assert again.memory.live_ids() == ("c1",)
    assert await again.metrics.get("c1") == reported
    assert again.memory.policy(URI) == record
    assert await publish(again, policy_settings={"s": 1}) == record
    assert open_place.changes == []


async def test_a_warning_at_start_names_a_damaged_record(open_place):
    await open_place.catalog.clusters.create(cluster("c1"))
    await open_place.catalog.close()
    open_place.place.spoil(b'{"id": 7}')
    await open_place.open()
    assert not open_place.catalog.memory.knows("c1")
    (warning,) = open_place.catalog.warnings
    assert "the cluster c1 in" in warning
    assert "was set aside" in warning


async def test_the_limits_of_the_catalog_are_enforced(catalog):
    with expect_refusal(Code.TOO_LARGE):
        await catalog.clusters.create(cluster("c1", blob="x" * (16 * 1024 * 1024)))
    with expect_refusal(Code.TOO_LARGE, "nodes.nodeData"):
        await catalog.clusters.create({"id": "c1", "nodes": {"nodeData": [{}] * 20_001}})
    assert not catalog.memory.knows("c1")


async def test_a_change_invalidates_documents_read_at_start(tmp_path):
    first = await open_catalog(SqliteRecords(tmp_path / "c.db"))
    node = {"id": "n", "gpus": {"count": 2}}
    for name in ("a", "b"):
        await first.clusters.create({"id": name, "nodes": {"nodeData": [node]}})
    await first.close()
    catalog = await open_catalog(SqliteRecords(tmp_path / "c.db"))
    more = {"id": "n", "gpus": {"count": 3}}
    await catalog.clusters.update("a", {"$set": {"nodes": {"nodeData": [more]}}})
    for _ in range(2):
        assert [len(each.nodes[0].gpus) for each in catalog.memory.models()] == [3, 2]
    await catalog.close()
