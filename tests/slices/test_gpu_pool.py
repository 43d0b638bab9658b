"""Tests of pools of GPU slices on a real Ray, and of their leftovers."""

import os
import subprocess
import sys
import tempfile

import pytest
import ray

from moorage.slices import DeviceHostActor, GpuSlices, InsufficientSlicesError, SliceActor
from moorage.slices.shapes import TpuSlices

pytestmark = [pytest.mark.heavy, pytest.mark.ray]
RACKS = GpuSlices(gpus_per_host=2, hosts=2, label="rack")


def where():
    return ray.get_runtime_context().get_node_id(), os.environ["CUDA_VISIBLE_DEVICES"]


def test_all_hosts_of_a_slice_are_in_one_rack(make_pool, ready):
    pool = make_pool(shape=RACKS)
    assert pool.get_actor_pool_name() == "SlicePool(GPU)"
    pool.scale_multislice(2)
    assert [each.actor_info.slice_name for each in pool.get_all_pool_members()] == [
        "rack-a",
        "rack-b",
    ]
    found = pool.execute_on_each_host(where, timeout=60)
    racks = [{ready.node(0), ready.node(1)}, {ready.node(2), ready.node(3)}]
    assert [{node for node, _ in hosts} for hosts in found] == racks
    assert {devices for hosts in found for _, devices in hosts} == {"0,1"}
    infos = [each.actor_info for each in pool.get_all_pool_members()]
    assert [infos[0].num_hosts, infos[0].num_accelerators_per_host] == [2, 2]
    assert [node for node, _ in found[0]] == infos[0].node_ids


def test_a_pool_can_take_slices_by_a_ray_resource_and_refuses_an_unknown_model(make_pool):
    pool = make_pool(shape=GpuSlices(gpus_per_host=1, hosts=3, resource="spare"))
    pool.scale_multislice([1, 2])
    assert len(pool.get_all_pool_members()) == 1
    found = pool.execute_on_each_host(where, timeout=60)
    assert len({node for node, _ in found[0]}) == 3
    assert {len(devices) for _, devices in found[0]} == {1}
    other = make_pool(shape=GpuSlices(gpus_per_host=1, gpu_model="H100"))
    with pytest.raises(InsufficientSlicesError, match=r"SlicePool\(H100\); .*room for 0 in all"):
        other.scale_multislice(1, timeout=60)


def test_two_pools_of_slices_never_share_a_gpu(make_pool):
    one = make_pool(shape=GpuSlices(gpus_per_host=2))
    one.scale_multislice(3)
    two = make_pool(shape=GpuSlices(gpus_per_host=1))
    two.scale_multislice([3, 2], timeout=4)
    assert len(two.get_all_pool_members()) == 2
    taken = [node for hosts in one.execute_on_each_host(where, timeout=60) for node, _ in hosts]
    also = [node for hosts in two.execute_on_each_host(where, timeout=60) for node, _ in hosts]
    assert set(taken) & set(also) == set()
    assert len(set(also)) == 1


def test_tasks_have_the_resources_of_their_slice(make_pool):
    pool = make_pool(shape=GpuSlices(gpus_per_host=1, host_resources={"CPU": 2, "memory": 1 << 30}))
    pool.scale_multislice(1)

    def resources():
        return ray.get_runtime_context().get_assigned_resources()

    ((found,),) = pool.execute_on_each_host(resources, timeout=60)
    assert found | {"CPU": 2, "GPU": 1, "memory": 1 << 30} == found
    (member,) = pool.get_all_pool_members()
    (host,) = ray.get(member.actor.get_all_actors_in_pool.remote())
    assert ray.get(host.run_remote_fn.remote(resources, num_cpus=1), timeout=60)["CPU"] == 2

    def order_of_a_nested_task():
        nested = ray.remote(num_cpus=0)(lambda: os.environ["CUDA_DEVICE_ORDER"])
        return ray.get(nested.remote())

    assert pool.execute_on_each_host(order_of_a_nested_task, timeout=60) == [["PCI_BUS_ID"]]
    with pytest.raises(ValueError, match="cannot take 4 of CPU: have the pool reserve it"):
        ray.get(host.run_remote_fn.remote(resources, num_cpus=4), timeout=60)


def test_a_slice_of_a_single_host_takes_chips_of_its_node(ready):
    host = DeviceHostActor.options(label_selector={"ray.io/node-id": ready.node(1)}).remote(
        3, "mine", 4
    )

    def resources():
        return os.environ["TPU_HOST_ID"], ray.get_runtime_context().get_assigned_resources()

    call = host.run_remote_fn.remote(resources, memory_bytes=1 << 30, extra_resources={"spare": 1})
    number, found = ray.get(call, timeout=60)
    assert number == "3"
    assert found | {"TPU": 4, "memory": 1 << 30, "spare": 1} == found
    info = ray.get(host.get_info.remote())
    assert (info.host_id, info.num_devices, info.healthy, info.failed) == (3, 4, True, False)
    assert info.node_id == ready.node(1)
    ray.get(host.shutdown.remote())
    assert not ray.get(host.healthy.remote())
    assert ray.get(host.get_info.remote()).failed
    with pytest.raises(RuntimeError, match="Host 3 unhealthy or preempted"):
        ray.get(host.run_remote_fn.remote(resources), timeout=60)


def test_the_error_names_an_unknown_slice(ready):
    head = ready.cluster.head_node.node_id
    actor = SliceActor.options(label_selector={"ray.io/node-id": head}).remote()
    with pytest.raises(RuntimeError, match="Slice info not initialized"):
        ray.get(actor.get_info.remote(), timeout=60)
    assert not ray.get(actor.healthy.remote(), timeout=60)
    name = ray.get(actor.get_actor_pool_name.remote(), timeout=60)
    assert name == "SliceActor(uninitialized)"


def test_a_pool_that_grows_and_shrinks_leaves_no_actors_behind(make_pool, ready):
    pool = make_pool(shape=GpuSlices(gpus_per_host=2))
    for _ in range(3):
        pool.scale_multislice(4)
        pool.prepare_all_slices()
        pool.scale_multislice(1)
    assert len(ready.left()["groups"]) == 1
    pool.drain_actor_pool()
    ready.is_clean()


@pytest.mark.parametrize("shape", [RACKS, TpuSlices("v4-16")])
def test_a_pool_that_finds_no_free_hosts_gets_them_when_another_pool_ends(make_pool, shape):
    """Neither pool may hold a part of its hosts and wait forever for the rest."""
    one, two = make_pool(shape=shape), make_pool(shape=shape)
    one.scale_multislice(2)
    with pytest.raises(RuntimeError, match="only 0 slices"):
        two.scale_multislice(2, timeout=1)
    one.drain_actor_pool()
    two.scale_multislice(2)


NEVER = """
import ray

ray.init(address="local", num_cpus=1, num_gpus=0, include_dashboard=False, log_to_driver=False)
from moorage.slices import GpuSlices, InsufficientSlicesError, SlicePoolManager

pool = SlicePoolManager(shape=GpuSlices(gpus_per_host=1))
try:
    pool.scale_multislice([1, 2])
except InsufficientSlicesError as error:
    print(error)
"""


def test_a_pool_that_never_fits_is_refused_even_on_a_new_ray():
    """Ray's monitor reports only after some seconds; until then a pool would wait."""
    short = tempfile.TemporaryDirectory("", "ray-", "/tmp", ignore_cleanup_errors=True)
    with short as folder:  # Paths of Ray's sockets must be short.
        done = subprocess.run(
            [sys.executable, "-c", NEVER],
            env=os.environ
            | {"HOME": folder, "RAY_TMPDIR": folder, "AUTOSCALER_UPDATE_INTERVAL_S": "1"},
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
        )
    assert done.stdout.endswith("the cluster has room for 0 in all\n"), done.stderr
