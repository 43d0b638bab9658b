"""Tests of the bounds of block requests: clusters, turns and tasks, with built-in policies."""

import asyncio
import contextlib
import itertools
import json

import msgspec
import pytest

from moorage.catalog.documents.clusters import cluster_model
from moorage.catalog.opening import open_catalog
from moorage.catalog.ports import Catalog
from moorage.daemon.blocks import placement, tasks
from moorage.daemon.blocks.placement import BlockPlacement
from moorage.daemon.blocks.tasks import BlockServices
from moorage.daemon.policies.finder import Finder
from moorage.daemon.requests.services import CatalogReader
from moorage.model import Code, Tenant
from moorage.policy import Fleet
from moorage.protocol.faults import ServiceError
from moorage.sandbox.host.sandbox import Sandbox
from moorage.storage.sqlite.records import SqliteRecords

HERE, THERE = Tenant("here"), Tenant("there")


class House:
    """The service of blocks over a real catalog; no block names a policy, so no cell starts."""

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        self.fleet = Fleet()
        self.tasks: set[asyncio.Task[None]] = set()
        self.sandbox = Sandbox(
            fleet=self.fleet, services=CatalogReader(catalog), deliver=lambda event: None
        )

    def blocks(self, clusters_max: int = 10_000) -> BlockPlacement:
        return BlockPlacement(
            catalog=self.catalog,
            finder=Finder(self.catalog, self.sandbox),
            sandbox=self.sandbox,
            fleet=lambda: self.fleet,
            clusters_max=clusters_max,
        )

    def spawn(self, work) -> None:
        self.tasks.add(asyncio.ensure_future(work))

    async def register(self, *names: str) -> None:
        for name in names:
            row = {"id": f"{name}-0", "vcpus": {"count": 8}, "memory": 1024}
            await self.catalog.clusters.create({"id": name, "nodes": {"nodeData": [row]}})
        documents = await self.catalog.clusters.query({})
        self.fleet.install(cluster_model(each) for each in documents)


@pytest.fixture
async def house(tmp_path):
    catalog = await open_catalog(SqliteRecords(tmp_path / "catalog.db"))
    house = House(catalog)
    yield house
    await house.sandbox.close()
    await catalog.close()


async def refusal(work) -> ServiceError:
    with pytest.raises(ServiceError) as refused:
        await work
    return refused.value


async def test_a_block_without_registered_clusters_is_refused(house):
    error = await refusal(house.blocks().place(HERE, {}, "dry_run"))
    assert error.code is Code.UNKNOWN_CLUSTERS
    assert "no cluster is registered and live" in error.reason


async def test_surplus_clusters_are_cut_off_with_a_warning(house):
    await house.register("c", "a", "b")
    outcome = await house.blocks(2).place(HERE, {}, "select_clusters")
    assert [each["id"] for each in outcome.result["clusters"]] == ["a", "b"]
    assert outcome.warnings == ["Only the first 2 of 3 clusters were considered."]
    assert (await house.blocks(3).place(HERE, {}, "dry_run")).warnings == []


async def test_a_block_request_beyond_the_limit_is_refused_and_other_requests_are_served(house):
    await house.register("a")
    placing = house.blocks()
    many = placement.RUNNING_MAX + placement.WAITING_MAX  # Includes one turn for other tenants.
    answers = await asyncio.gather(
        *(placing.place(HERE, {"n": n}, "dry_run") for n in range(many)), return_exceptions=True
    )
    refused = [each for each in answers if isinstance(each, ServiceError)]
    assert [each.code for each in refused] == [Code.BUSY]
    assert (await placing.place(HERE, {}, "dry_run")).result["id"] == "a"


async def test_a_flood_of_blocks_by_one_tenant_causes_no_refusal_of_another_tenant(house):
    await house.register("a")
    placing = house.blocks()
    many = placement.RUNNING_MAX + placement.WAITING_MAX + 9
    flood = [asyncio.ensure_future(placing.place(HERE, {}, "dry_run")) for _ in range(many)]
    await asyncio.sleep(0)
    assert (await placing.place(THERE, {}, "dry_run")).result["id"] == "a"
    assert sum(each.done() for each in flood) < many // 2
    answers = await asyncio.gather(*flood, return_exceptions=True)
    refused = [each for each in answers if isinstance(each, ServiceError)]
    assert {each.code for each in refused} == {Code.BUSY}


async def test_an_unserializable_task_is_refused(house):
    await house.register("a")
    for value in (1 << 70, nest(100_000)):
        error = await refusal(house.blocks().place(HERE, {"value": value}, "dry_run"))
        assert (error.code, error.field) == (Code.BAD_MESSAGE, "input")


async def test_a_task_belongs_to_its_tenant_and_shows_its_state(house):
    await house.register("a")
    services = BlockServices(house.blocks(), house.spawn)
    task_id = await services.allocate({}, "here")
    assert await services.task(task_id, "here") == {"task_id": task_id, "status": "pending"}
    assert (await refusal(services.task(task_id, "there"))).code is Code.NOT_FOUND
    await asyncio.gather(*house.tasks)
    done = await services.task(task_id, "here")
    assert (done["status"], json.loads(bytes(done["result"]))["id"]) == ("completed", "a")


async def test_finished_tasks_of_blocks_make_room_and_pending_tasks_do_not(house):
    await house.register("a")
    services = BlockServices(house.blocks(), house.spawn)
    first = await services.allocate({"policies": "wrong"}, "here")
    await asyncio.gather(*house.tasks)
    failed = await services.task(first, "here")
    assert (failed["status"], failed["error"]["field"]) == ("failed", "input.policies")
    for _ in range(tasks.TASKS_MAX):
        await services.allocate({}, "here")
    assert (await refusal(services.task(first, "here"))).code is Code.NOT_FOUND
    assert (await refusal(services.allocate({}, "here"))).code is Code.BUSY
    await asyncio.gather(*house.tasks)
    assert await services.allocate({}, "here")
    await asyncio.gather(*house.tasks)


async def test_the_tenant_with_most_tasks_of_blocks_makes_room(house):
    await house.register("a")
    services = BlockServices(house.blocks(), house.spawn)
    first = await services.allocate({}, "there")
    await asyncio.gather(*house.tasks)
    for _ in range(tasks.TASKS_MAX + 9):
        await services.allocate({}, "here")
        await asyncio.gather(*house.tasks)
        house.tasks.clear()
    assert (await services.task(first, "there"))["status"] == "completed"
    for _ in range(tasks.TASKS_MAX):
        with contextlib.suppress(ServiceError):
            await services.allocate({}, "here")
    assert (await refusal(services.allocate({}, "here"))).code is Code.BUSY
    assert await services.allocate({}, "there")
    await asyncio.gather(*house.tasks)


def nest(levels: int) -> dict:
    deep: dict = {}
    for _ in range(levels):
        deep = {"deeper": deep}
    return deep


def packs(value: dict) -> bool:
    try:
        msgspec.msgpack.encode(value)
    except RecursionError:
        return False
    return True


async def test_a_task_with_a_deeply_nested_block_ends(house):
    await house.register("a")
    services = BlockServices(house.blocks(), house.spawn)
    # Python 3.11 fails at 1,000 levels, including frames of the stack; 3.13 at 10,000.
    too_deep = next(levels for levels in itertools.count(100, 100) if not packs(nest(levels)))
    ends = []
    for levels in range(too_deep - 300, too_deep + 100):
        task_id = await services.allocate(nest(levels), "here")
        await asyncio.gather(*house.tasks)
        house.tasks.clear()
        ends.append((await services.task(task_id, "here"))["status"])
    assert (ends[0], ends[-1]) == ("completed", "failed")
    assert set(ends) == {"completed", "failed"}


async def test_stored_results_are_bounded_in_bytes(house):
    await house.register("a")
    services = BlockServices(house.blocks(), house.spawn)
    large = {"pad": "x" * (8 << 20)}
    ids = []
    for _ in range(tasks.TASKS_BYTES_MAX // (8 << 20) + 1):
        ids.append(await services.allocate(large, "here"))
        await asyncio.gather(*house.tasks)
    assert (await refusal(services.task(ids[0], "here"))).code is Code.NOT_FOUND
    assert (await services.task(ids[-1], "here"))["status"] == "completed"
