"""Pools on a real Ray whose hosts are leases of a real server never share a GPU."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import ray

from moorage.slices import GpuSlices, InsufficientSlicesError, LeasedHosts, SlicePoolManager
from moorage.testing.daemon_process import daemon
from moorage_client import BlockingClient
from moorage_policies import catalog
from tests.waiting import until

pytestmark = [pytest.mark.heavy, pytest.mark.ray]

POLICY = "first_fit:1.0-stable"
PAIRS = GpuSlices(gpus_per_host=2, hosts=2)
ONES = GpuSlices(gpus_per_host=1, hosts=1)


def where():
    lease = os.environ["MOORAGE_LEASE_ID"], os.environ["MOORAGE_FENCING"]
    return ray.get_runtime_context().get_node_id(), os.environ["CUDA_VISIBLE_DEVICES"], lease


@pytest.fixture(scope="module")
def server(world, tmp_path_factory) -> Iterator[str]:
    environment = {
        "MOORAGE_BACKENDS": "ray,memory",
        "MOORAGE_RAY_ADDRESS": world.address,
        "MOORAGE_LOG_LEVEL": "error",
    }
    with daemon(tmp_path_factory.mktemp("data"), environment=environment) as running:
        with httpx.Client(base_url=running.http, timeout=30) as http:
            http.post("/policy", json=catalog.document("first_fit")).raise_for_status()
            until(lambda: http.get("/clusters/ray").status_code == 200)
            until(lambda: http.get("/clusters/ray").json()["gpus"]["count"] == 8)
        yield running.ws


@pytest.fixture
def client(server) -> Iterator[BlockingClient]:
    with BlockingClient(server) as connected:
        yield connected


@pytest.fixture
def make_pool(ready, client, settings) -> Iterator[Callable[..., SlicePoolManager]]:
    """Return a function that makes pools, drained before their client closes."""
    pools: list[SlicePoolManager] = []

    def make(**options) -> SlicePoolManager:
        pools.append(SlicePoolManager(settings=settings, **options))
        return pools[-1]

    yield make
    for pool in pools:
        pool.drain_actor_pool()


def held_leases(client) -> list:
    return [each for each in client.leases() if each.state != "ended"]


def test_two_pools_that_want_the_same_gpus_never_share_one(make_pool, client):
    one = make_pool(shape=PAIRS, hosts=LeasedHosts(client=client, policy=POLICY))
    two = make_pool(shape=PAIRS, hosts=LeasedHosts(client=client, policy=POLICY))
    with ThreadPoolExecutor() as threads:
        scaled = [threads.submit(pool.scale_multislice, [2, 1], 40) for pool in (one, two)]
        outcomes = [each.exception() for each in scaled]
    sizes = [len(pool.get_all_pool_members()) for pool in (one, two)]
    assert sum(sizes) == 2, outcomes
    assert [isinstance(each, InsufficientSlicesError) for each in outcomes] == [
        not size for size in sizes
    ]
    assert len(held_leases(client)) == 2
    found = [
        place
        for pool, size in zip((one, two), sizes, strict=True)
        if size
        for hosts in pool.execute_on_each_host(where, timeout=60)
        for place in hosts
    ]
    assert len({node for node, _, _ in found}) == 4, "each host is in one slice"
    leases = {each.id: each for each in held_leases(client)}
    for node, devices, (lease, fencing) in found:
        share = next(each for each in leases[lease].placement if each.node_id == node)
        assert devices == ",".join(share.gpus)
        assert int(fencing) == leases[lease].fencing
    for pool in (one, two):
        pool.drain_actor_pool()
    assert held_leases(client) == []


def test_slices_get_exactly_the_gpus_of_their_leases(make_pool, client):
    with client.lease(POLICY, resources={"gpus": 1}, clusters=["ray"], wait_seconds=30) as other:
        (share,) = other.placement
        pool = make_pool(shape=ONES, hosts=LeasedHosts(client=client, policy=POLICY))
        pool.scale_multislice(1)
        ((node, devices, _),) = pool.execute_on_each_host(where, timeout=60)[0]
        assert (node, devices) != (share.node_id, share.gpus[0])
        (mine,) = [each for each in held_leases(client) if each.id != other.id]
        assert (node, devices) == (mine.placement[0].node_id, mine.placement[0].gpus[0])


def test_a_lost_lease_ends_its_slice_and_another_slice_replaces_it(make_pool, client, server):
    pool = make_pool(shape=ONES, hosts=LeasedHosts(client=client, policy=POLICY, ttl_seconds=6))
    pool.scale_multislice(1)
    (before,) = pool.get_all_pool_members()
    ((_, _, (lease, _)),) = pool.execute_on_each_host(where, timeout=60)[0]
    token = next(iter(pool._reservations)).lease._held.token
    with BlockingClient(server) as another:
        another.release(lease, token)

    def is_dead() -> bool:
        try:
            ray.get(before.actor.get_info.remote(), timeout=60)
        except ray.exceptions.RayActorError:
            return True
        return False

    until(is_dead)
    ((_, _, (again, _)),) = pool.execute_on_each_host(where, timeout=60)[0]
    assert again != lease


def test_slices_that_a_lease_cannot_hold_are_refused(settings):
    hosts = LeasedHosts(client=None, policy=POLICY)
    for wrong in ({"tpu_type": "v4-8"}, {"shape": GpuSlices(gpus_per_host=1, label="zone")}):
        with pytest.raises(ValueError, match="slices on leases"):
            SlicePoolManager(**wrong, settings=settings, hosts=hosts)
