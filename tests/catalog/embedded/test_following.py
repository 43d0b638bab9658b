"""The follower of a catalog that another process writes applies each change, by record."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from moorage.catalog.embedded.aliases import Alias, Aliases
from moorage.catalog.embedded.blocks import EmbeddedBlocks
from moorage.catalog.embedded.following import FollowedRecords, marks_of
from moorage.catalog.embedded.memory import Memory
from moorage.catalog.opening import open_catalog
from moorage.catalog.ports import Catalog

POLICY = "class AIOSv1PolicyRule:\n    pass\n"


def cluster(name: str, gpus: int = 2) -> dict[str, Any]:
    node = {"id": "node-0", "gpus": {"count": gpus}, "vcpus": {"count": 4}, "memory": 1024}
    return {"id": name, "status": "live", "nodes": {"nodeData": [node]}}


def policy(uri: str) -> dict[str, Any]:
    return {"policy_rule_uri": uri, "type": "python_class_v1", "code": POLICY}


@pytest.fixture
async def writer(place) -> AsyncIterator[Catalog]:
    catalog = await open_catalog(place.records())
    yield catalog
    await catalog.close()


async def everything(memory: Memory, aliases: Aliases, blocks: Any) -> list[Any]:
    """Return all documents that the catalog has in memory."""
    kinds = (memory.clusters, memory.metrics, memory.policies)
    found = [{name: each.document for name, each in kind.items()} for kind in kinds]
    lives = [memory.live_ids(), [alias.document() for alias in aliases.all()]]
    return [*found, *lives, *[await blocks.query(kind, {}) for kind in ("block", "block_metrics")]]


async def test_a_catalog_that_follows_another_applies_each_change(writer: Catalog) -> None:
    store = writer.executors._store  # Another process reads the same file.
    aliases, blocks = Aliases(store), EmbeddedBlocks(store)
    memory = Memory(aliases)
    followed = FollowedRecords(store, memory, aliases, blocks, await store.run(marks_of))
    changes: list[Any] = []
    memory.listeners.append(changes.append)

    async def is_same() -> bool:
        await followed.refresh()
        ours = await everything(writer.memory, writer.aliases, writer.blocks)
        return ours == await everything(memory, aliases, blocks)

    for name in ("a", "b", "c"):
        await writer.clusters.create(cluster(name), "ann")
        await writer.metrics.put({"clusterId": name, "load": 1})
        await writer.blocks.create({"id": name})
        await writer.blocks.put_metrics({"blockId": name})
    for uri in ("first:1.0-beta", "first:2.0-beta"):
        prepared = await writer.policies.prepare(policy(uri))
        await writer.policies.register(prepared, "ann")
    await writer.aliases.change("first:stable", lambda _: Alias("first:stable", "first:1.0-beta"))
    assert await is_same()
    assert memory.owner("a") == "ann"
    assert memory.policy("first") is not None
    changes.clear()
    await followed.refresh()
    assert changes == []
    await writer.clusters.update("a", {"status": "maintenance"})
    await writer.metrics.put({"clusterId": "b", "load": 2})
    await writer.policies.update("first:1.0-beta", {"description": "the first"}, "ann")
    await writer.aliases.change("first:stable", lambda _: Alias("first:stable", "first:2.0-beta"))
    assert await is_same()
    assert len(changes) == 3
    for part in (writer.clusters, writer.metrics):
        await part.delete("b")
    for kind in ("block", "block_metrics"):
        await writer.blocks.delete(kind, "b")
    await writer.aliases.delete("first:stable")
    await writer.policies.delete("first:1.0-beta", "ann")
    assert await is_same()
    assert not aliases.all()
    memory.forget()
    assert not memory.clusters


async def test_a_catalog_that_follows_another_can_become_its_writer(place) -> None:
    written = await open_catalog(place.records())
    await written.clusters.create(cluster("a"), "ann")
    followed = await open_catalog(place.followed(), follows=True)
    await written.clusters.create(cluster("b"), "ann")
    await written.close()
    catalog = await followed.lead(place.records())
    assert catalog is not None
    assert catalog.following is None
    assert catalog.memory.live_ids() == ("a", "b")
    await catalog.clusters.create(cluster("c"), "ann")
    await catalog.close()
    again = await open_catalog(place.records())
    assert again.memory.live_ids() == ("a", "b", "c")
    assert await again.lead(place.records()) is None, "it followed no other process"
    await again.close()
