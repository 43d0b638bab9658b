"""Each method of a pool of TPU slices works as documented, on a real Ray."""

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
import ray

from moorage.slices import (
    ActorPoolMember,
    HostTaskError,
    InsufficientSlicesError,
    SliceInfo,
    SlicesError,
    SliceTimeoutError,
)
from moorage.slices.results import collect
from tests.waiting import until

pytestmark = [pytest.mark.heavy, pytest.mark.ray]
TYPE = "v4-16"


def where():
    names = ("TPU_SLICE_NAME", "TPU_HOST_ID", "TPU_NUM_DEVICES", "TPU_VISIBLE_CHIPS", "MINE")
    node = ray.get_runtime_context().get_node_id()
    return node, os.getpid(), {name: os.environ.get(name) for name in names}


def names(pool):
    return [each.actor_info.slice_name for each in pool.get_all_pool_members()]


def sleeps(folder):
    (folder / str(os.getpid())).touch()
    time.sleep(600)  # The task's work.


def wait_until_gone(folder):
    until(lambda: not any(Path("/proc", each.name).exists() for each in folder.iterdir()), 30)


def test_each_slice_reports_its_info(make_pool, ready):
    pool = make_pool(TYPE)
    pool.scale_multislice(2)
    members = pool.get_all_pool_members()
    assert [each.actor_info.slice_name for each in members] == ["tpu-a", "tpu-b"]
    assert all(isinstance(each, ActorPoolMember) for each in members)
    assert members[0].actor_info.node_ids is None
    pool.prepare_all_slices()
    members = pool.get_all_pool_members()
    info = members[1].actor_info
    assert info == ray.get(members[1].actor.get_info.remote())
    assert isinstance(info, SliceInfo)
    assert (info.num_hosts, info.num_accelerators_per_host) == (2, 4)
    assert info.node_ids == [ready.node(2), ready.node(3)]
    assert info.host_infos[1] == {
        "ip": info.ip_address,
        "node_id": ready.node(3),
        "pod_name": "tpu-b",
        "num_devices": 4,
        "num_hosts": 2,
    }
    assert pool.get_actor_name_from_actor_info(info) == "tpu-b"
    assert ray.get(members[1].actor.get_actor_pool_name.remote()) == "SliceActor(tpu-b)"
    members.clear()
    pool.get_all_actors_in_pool().clear()
    assert len(pool.get_all_pool_members()) == 2
    assert [each.coordinator_ip for each in pool.multislice_infos()] == [info.ip_address] * 2


def test_each_host_of_a_slice_is_reserved_on_a_separate_node(make_pool):
    pool = make_pool(TYPE)
    pool.scale_multislice(1)
    pool.prepare_all_slices()
    groups = ray.util.placement_group_table().values()
    (group,) = (each for each in groups if len(each["bundles"]) == 2 and each["state"] == "CREATED")
    assert group["strategy"] == "STRICT_SPREAD"
    assert len(set(group["bundles_to_node_id"].values())) == 2
    assert group["bundles"][0] == {names(pool)[0]: 1, "TPU": 4}


def test_a_function_runs_on_each_host(make_pool, ready):
    pool = make_pool(TYPE)
    pool.scale_multislice(2)
    nested = pool.execute_on_each_slice(where, env={"MINE": 7}, runtime_env={})
    results = [ray.get(refs) for refs in nested]
    nodes = [[node for node, _, _ in hosts] for hosts in results]
    assert nodes == [[ready.node(0), ready.node(1)], [ready.node(2), ready.node(3)]]
    assert results[1][1][2] == {
        "TPU_SLICE_NAME": "tpu-b",
        "TPU_HOST_ID": "1",
        "TPU_NUM_DEVICES": "4",
        "TPU_VISIBLE_CHIPS": "0,1,2,3",
        "MINE": "7",
    }
    variables = {"env_vars": {"MINE": "env", "TPU_HOST_ID": "mine"}}
    flat = ray.get(pool.execute_on_each_host_flat(ray.remote(where), runtime_env=variables))
    assert [node for node, _, _ in flat] == [node for hosts in nodes for node in hosts]
    assert {(each["MINE"], each["TPU_HOST_ID"]) for _, _, each in flat} == {("env", "mine")}


def test_results_are_returned_for_each_host(make_pool):
    pool = make_pool(TYPE)
    pool.scale_multislice(1)

    def add(first, second, *, third):
        return first + second + third + int(os.environ["MINE"])

    results = pool.execute_on_each_host(add, 1, ray.put(2), env={"MINE": "4"}, third=8, timeout=60)
    assert results == [[15, 15]]
    ((error, _),) = pool.execute_on_each_host(lambda: ValueError("a result"))
    assert isinstance(error, ValueError)


def test_growth_of_a_pool_does_not_disturb_running_tasks(make_pool, tmp_path):
    pool = make_pool(TYPE)
    pool.scale_multislice(1)
    gate = tmp_path / "gate"

    def waits():
        while not gate.exists():
            time.sleep(0.02)  # No event reports this.
        return os.environ["TPU_SLICE_NAME"]

    refs = pool.schedule_on_each_host(waits)
    assert ray.wait(refs, timeout=0.5)[0] == []
    pool.scale_multislice(2)
    gate.touch()
    assert ray.get(refs, timeout=60) == names(pool)[:1] * 2
    assert len(names(pool)) == 2


def test_the_first_failure_of_a_task_names_its_host_and_ends_the_tasks_on_other_hosts(
    make_pool, ready, tmp_path
):
    pool = make_pool(TYPE)
    pool.scale_multislice(2)

    def one_fails(folder):
        (folder / str(os.getpid())).touch()
        while len(list(folder.iterdir())) < 4:
            time.sleep(0.02)  # No event reports this.
        if (os.environ["TPU_SLICE_NAME"], os.environ["TPU_HOST_ID"]) == ("tpu-b", "1"):
            raise KeyError("broken")
        time.sleep(600)  # The task's work.

    with pytest.raises(HostTaskError, match="broken") as caught:
        pool.execute_on_each_host(one_fails, tmp_path, timeout=60)
    assert (caught.value.slice_index, caught.value.slice_name) == (1, "tpu-b")
    assert caught.value.host_id == 1
    assert isinstance(caught.value.cause, KeyError)
    wait_until_gone(tmp_path)


def test_a_time_limit_of_a_call_ends_the_tasks_on_all_hosts(make_pool, tmp_path, settings):
    pool = make_pool(TYPE)
    pool.scale_multislice(1)

    def first_ends(folder):
        if os.environ["TPU_HOST_ID"] == "1":
            sleeps(folder)

    calls = pool.start_on_hosts(first_ends, (tmp_path,))
    ray.get(calls[0][0].ref, timeout=60)
    until(lambda: any(tmp_path.iterdir()))
    with pytest.raises(SliceTimeoutError, match=r"slice 0 \(tpu-.\), host 1") as caught:
        collect(calls, 0.5, settings.task_cancel_seconds_max)
    assert "host 0" not in str(caught.value)
    wait_until_gone(tmp_path)
    with pytest.raises(SliceTimeoutError, match="host 0"):
        pool.execute_on_each_host(sleeps, tmp_path, timeout=0.5)
    refs = pool.execute_on_each_host_flat(lambda: time.sleep(600), timeout=1)  # The task's work.
    for ref in refs:
        with pytest.raises(SliceTimeoutError, match="its task took more than 1 s"):
            ray.get(ref, timeout=60)


def test_a_new_task_on_a_host_cancels_the_previous_task(make_pool, tmp_path):
    pool = make_pool(TYPE)
    pool.scale_multislice(1)
    refs = pool.schedule_on_each_host(lambda: time.sleep(600), env={})  # The task's work.
    assert pool.execute_on_each_host(lambda: 2, timeout=60) == [[2, 2]]
    for ref in refs:
        with pytest.raises(ray.exceptions.TaskCancelledError):
            ray.get(ref, timeout=60)
    refs = pool.schedule_on_each_host(lambda: sleeps(tmp_path))
    until(lambda: len([*tmp_path.iterdir()]) == 2)
    for ref in refs:
        ray.cancel(ref)
    wait_until_gone(tmp_path)


def test_invalid_sizes_of_a_pool_are_refused(make_pool):
    pool = make_pool(TYPE)
    for sizes in (0, -1, [2, 0], [-3], "2", 1.5, None, [1.5]):
        with pytest.raises(ValueError, match="must be > 0"):
            pool.scale_multislice(sizes)
    with pytest.raises(ValueError, match="valid sizes list is empty"):
        pool.scale_multislice([])
    with pytest.raises(SlicesError, match="No SliceActors available"):
        pool.prepare_all_slices()


def test_an_impossible_size_of_a_pool_is_skipped_at_once(make_pool):
    pool = make_pool(TYPE)
    deadline = time.monotonic() + 30
    pool.scale_multislice([1, 2, 8], timeout=600)
    assert time.monotonic() < deadline
    before = pool.get_all_actors_in_pool()
    assert len(before) == 2
    says = r"one of \[3, 5\], but only 2 slices .*; the cluster has room for 2 in all"
    with pytest.raises(InsufficientSlicesError, match=says):
        pool.scale_multislice([5, 3], timeout=1)
    assert pool.get_all_actors_in_pool() == before


def test_a_pool_that_can_never_fit_fails_at_once(make_pool, settings):
    patient = replace(settings, host_health_seconds_max=600)
    says = r"\[1\], but only 0 slices available .*; the cluster has room for 0 in all"
    with pytest.raises(InsufficientSlicesError, match=says):
        make_pool("v9-512", settings=patient).scale_multislice(1, timeout=600)


def test_a_smaller_size_is_tried_after_the_larger_size_has_had_its_time(make_pool):
    other = make_pool(TYPE)
    other.scale_multislice(1)
    pool = make_pool(TYPE)
    pool.scale_multislice([2, 1], timeout=6)
    first = names(pool)
    with pytest.raises(InsufficientSlicesError, match=r"one of \[2\], but only 1 slices"):
        pool.scale_multislice(2, timeout=1)
    assert names(pool) == first
    other.drain_actor_pool()
    pool.scale_multislice([2, 1])
    assert names(pool)[:1] == first
    assert len(names(pool)) == 2


def test_a_pool_that_shrinks_frees_reserved_hosts(make_pool):
    pool = make_pool(TYPE)
    pool.scale_multislice(2)
    pool.prepare_all_slices()
    pool.scale_multislice(1)
    assert names(pool) == ["tpu-a"]
    other = make_pool(TYPE)
    other.scale_multislice(1, timeout=20)
    other.prepare_all_slices(timeout=20)
    assert names(other) == ["tpu-b"]


def test_the_autoscaler_gets_requests_for_all_missing_hosts(make_pool):
    def autoscaler_requests():
        from ray.experimental.internal_kv import _internal_kv_get  # noqa: PLC0415  # Ray's own API.

        return _internal_kv_get("autoscaler_resource_request")

    pool = make_pool(TYPE)
    with pytest.raises(InsufficientSlicesError):
        pool.scale_multislice(3, timeout=1)
    assert autoscaler_requests() == b"[]"
    pool.scale_multislice(2)
    assert autoscaler_requests() == b'[{"TPU-v4-16-head": 1}, {"TPU-v4-16-head": 1}]'
    pool.prepare_all_slices()
    assert autoscaler_requests() == b'[{"tpu-a": 1}, {"tpu-a": 1}, {"tpu-b": 1}, {"tpu-b": 1}]'
    pool.drain_actor_pool()
    assert autoscaler_requests() == b"[]"


def test_the_actor_of_a_host_can_be_created_directly(make_pool):
    pool = make_pool(TYPE)
    actor = pool.create_actor()
    assert ray.get(actor.get_info.remote(), timeout=60).num_hosts == 2
    assert ray.get(actor.healthy.remote(), timeout=60)
    refs = ray.get(actor.run_remote_fn.remote(lambda: 5), timeout=60)
    assert ray.get(refs, timeout=60) == [5, 5]
    hosts = ray.get(actor.get_all_actors_in_pool.remote(), timeout=60)
    assert [each.host_id for each in ray.get([host.get_info.remote() for host in hosts])] == [0, 1]
    assert pool.get_all_pool_members() == []
    ray.get(actor.shutdown.remote(), timeout=60)
    ray.kill(actor)
    pool.scale_multislice(2, timeout=20)


def test_a_larger_size_is_tried_again_after_a_minute(make_pool):
    pool = make_pool(TYPE)
    assert pool.should_scale_up_multislice([1, 2])
    pool.scale_multislice(1)
    assert not pool.should_scale_up_multislice([1, 2])
    pool._last_scale_ts -= 60
    assert pool.should_scale_up_multislice([1, 2])
    assert not pool.should_scale_up_multislice([1])
