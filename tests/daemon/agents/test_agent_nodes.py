"""Nodes of agents that arrive together are written together into their cluster's document."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from moorage.catalog.changes import CatalogChange, ClusterPut
from moorage.catalog.opening import open_catalog
from moorage.catalog.ports import Catalog
from moorage.daemon.agents.agent_nodes import AgentNodes
from moorage.model import ClusterId, Code, NodeId
from moorage.protocol.faults import ServiceError
from moorage.records.json_values import JsonObject
from moorage.storage.sqlite.records import SqliteRecords

MACHINES = 100
WRITES_MAX = 10
"""Maximum writes of a document while a hundred machines join: fewer than one for each machine."""


@pytest.fixture
async def catalog(tmp_path: Path) -> AsyncIterator[Catalog]:
    catalog = await open_catalog(SqliteRecords(tmp_path / "catalog.db"))
    yield catalog
    await catalog.close()


@pytest.fixture
def writes(catalog: Catalog) -> list[CatalogChange]:
    found: list[CatalogChange] = []
    catalog.memory.listeners.append(found.append)
    return found


def place(name: str, cluster: str = "lab") -> tuple[ClusterId, NodeId]:
    return ClusterId(cluster), NodeId(name)


def node(name: str, **more: object) -> JsonObject:
    return {"id": name, "vcpus": {"count": 1}, "memory": 1024, **more}


async def test_machines_that_join_together_share_one_write(catalog, writes) -> None:
    nodes = AgentNodes(catalog.clusters)
    names = [f"box-{number}" for number in range(MACHINES)]
    await asyncio.gather(*(nodes.put(place(each), node(each)) for each in names))
    assert {each.id for each in writes[-1].cluster.nodes} == set(names)
    assert len(writes) <= WRITES_MAX
    written = len(writes)
    await asyncio.gather(*(nodes.put(place(each), node(each)) for each in names))
    assert len(writes) == written, "an unchanged node causes no write"


async def test_a_refused_node_does_not_stop_the_other_nodes_of_its_write(catalog, writes) -> None:
    nodes = AgentNodes(catalog.clusters)
    await nodes.put(place("here", "other"), node("here", machineId="m"))
    nodes_of_lab = {"a": node("a"), "twin": node("twin", machineId="m"), "b": node("b")}
    done = await asyncio.gather(
        nodes.put(place("first"), node("first")),
        *(nodes.put(place(name), each) for name, each in nodes_of_lab.items()),
        return_exceptions=True,
    )
    refused = done.pop(2)
    assert isinstance(refused, ServiceError)
    assert refused.code is Code.CONFLICT
    assert done == [None] * 3
    assert isinstance(writes[-1], ClusterPut)
    assert {each.id for each in writes[-1].cluster.nodes} == {"first", "a", "b"}


async def test_changes_of_one_node_are_made_in_order(catalog) -> None:
    nodes = AgentNodes(catalog.clusters)
    lost = {"unavailable": "it is lost"}
    await asyncio.gather(
        nodes.put(place("first"), node("first")),
        nodes.put(place("box"), node("box")),
        nodes.change(place("box"), lambda known: known and known | lost),
        nodes.change(place("no-such"), lambda known: known and known | lost),
    )
    assert await nodes.get(place("box")) == node("box", unavailable="it is lost")
    assert await nodes.get(place("no-such")) is None
    await nodes.take_out(place("box"))
    assert await nodes.get(place("box")) is None
    assert await nodes.get(place("box", "no-such-cluster")) is None


async def test_a_cancelled_registration_of_a_machine_cancels_no_other_registration(catalog) -> None:
    nodes = AgentNodes(catalog.clusters)
    names = [f"box-{number}" for number in range(20)]
    putting = [asyncio.create_task(nodes.put(place(each), node(each))) for each in names]
    await asyncio.sleep(0)  # The first call writes, all others wait.
    for each in putting[:2]:
        each.cancel()
    await asyncio.gather(*putting, return_exceptions=True)
    assert [each.cancelled() for each in putting] == [True] * 2 + [False] * 18
    for each in names[2:]:
        assert await nodes.get(place(each)) is not None
