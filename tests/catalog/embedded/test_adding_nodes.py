"""All machines that join a cluster at the same time are in its document afterwards."""

import asyncio
import threading
from typing import ClassVar

import pytest

from moorage.catalog.opening import open_catalog
from moorage.model import Code
from moorage.protocol.faults import ServiceError
from moorage.storage.sqlite.records import SqliteRecords


def machine(name, cpus=8, **more):
    return {"id": name, "vcpus": {"count": cpus}, "memory": 1024, **more}


def farm(*nodes, **more):
    return {"id": "farm", "nodes": {"nodeData": list(nodes)}, **more}


@pytest.fixture
async def clusters(tmp_path):
    catalog = await open_catalog(SqliteRecords(tmp_path / "catalog.db"))
    yield catalog.clusters
    await catalog.close()


async def test_machines_that_join_at_the_same_time_are_all_registered(clusters):
    names = [f"m{number}" for number in range(16)]
    done = await asyncio.gather(*(clusters.add_nodes("farm", farm(machine(n))) for n in names))
    assert sum(new for _, new in done) == 1
    document = await clusters.get("farm")
    assert sorted(node["id"] for node in document["nodes"]["nodeData"]) == sorted(names)
    assert (document["nodes"]["count"], document["vcpus"]["count"]) == (16, 16 * 8)


async def test_machines_that_leave_do_not_remove_machines_that_join(clusters):
    await clusters.add_nodes("farm", farm(*(machine(f"old{number}") for number in range(8))))
    changes = []
    for number in range(8):
        changes.append(clusters.remove_nodes("farm", [f"old{number}", "none"]))
        changes.append(clusters.add_nodes("farm", farm(machine(f"new{number}"))))
    await asyncio.gather(*changes)
    document = await clusters.get("farm")
    assert {node["id"] for node in document["nodes"]["nodeData"]} == {f"new{n}" for n in range(8)}
    assert (document["nodes"]["count"], document["vcpus"]["count"]) == (8, 8 * 8)
    with pytest.raises(ServiceError, match="far"):
        await clusters.remove_nodes("far", ["old1"])


class Noting(dict):
    """A document that records which threads read it."""

    threads: ClassVar[set[int]] = set()

    def get(self, *words):
        self.threads.add(threading.get_ident())
        return super().get(*words)


async def test_joining_nodes_are_parsed_outside_of_the_event_loop(clusters):
    await clusters.add_nodes("farm", farm(Noting(machine("a"))))
    assert Noting.threads
    assert threading.get_ident() not in Noting.threads


async def test_adding_nodes_replaces_nodes_of_equal_ids_and_no_other_fields(clusters):
    await clusters.create(farm(machine("a"), machine("b"), region="eu", status="live"))
    given = {"nodes": {"nodeData": [machine("b", 16)]}, "region": "us", "status": "down"}
    document, new = await clusters.add_nodes("farm", given)
    assert not new
    assert (document["region"], document["status"]) == ("eu", "live")
    assert document["vcpus"]["count"] == 24
    await asyncio.gather(
        clusters.update("farm", {"clusterMetadata": {"name": "the farm"}}),
        clusters.add_nodes("farm", farm(machine("c"))),
    )
    document = await clusters.get("farm")
    assert document["clusterMetadata"] == {"name": "the farm"}
    assert [node["id"] for node in document["nodes"]["nodeData"]] == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("given", "field"),
    [
        (farm(machine("a"), id="other"), "id"),
        ({"nodes": {"nodeData": [{"vcpus": 3}]}}, "nodes.nodeData[0].vcpus"),
        ({"nodes": {"nodeData": {}}}, "nodes.nodeData"),
        ({"nodes": {"nodeData": [machine("a"), machine("a")]}}, "nodes.nodeData[1].id"),
        (farm(machine("../x")), "nodes.nodeData[0].id"),
    ],
)
async def test_an_invalid_node_is_refused_with_its_name(clusters, given, field):
    await clusters.create(farm(machine("there")))
    with pytest.raises(ServiceError) as refused:
        await clusters.add_nodes("farm", given)
    assert (refused.value.code, refused.value.field) == (Code.BAD_MESSAGE, field)
    assert len((await clusters.get("farm"))["nodes"]["nodeData"]) == 1


async def test_a_machine_registered_as_another_node_is_refused(clusters):
    await clusters.create({"id": "old", "nodes": {"nodeData": [machine("a", machineId="x")]}})
    with pytest.raises(ServiceError) as refused:
        await clusters.add_nodes("farm", farm(machine("b", machineId="x")))
    assert refused.value.code == Code.CONFLICT
