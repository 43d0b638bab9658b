"""Hosts that are lost, late, or taken back while a pool has them, on a real Ray."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import ray

from moorage.slices import (
    GpuSlices,
    HostTaskError,
    HostUnhealthyError,
    InsufficientSlicesError,
    RayExecutor,
    SliceDegraded,
    SlicesError,
    TpuAcceleratorConfig,
    handle_ray_error,
)
from moorage.slices.jobs.statuses import JobError, JobInfo, JobPreempted

pytestmark = [pytest.mark.heavy, pytest.mark.ray]
TYPE = "v4-16"
SLICES = TpuAcceleratorConfig(TYPE, pod_count=2)


def pids(folder):
    return [int(each.name) for each in folder.iterdir() if each.name.isdigit()]


def until(holds):
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline, "this has not come about"
        time.sleep(0.05)  # Nothing tells.


@pytest.fixture
def beside():
    """Run something beside the test: nodes are started by the main thread alone."""
    with ThreadPoolExecutor() as threads:
        yield threads.submit


def stays(folder):
    (folder / str(os.getpid())).touch()
    time.sleep(600)  # Its work.


def test_a_raylet_that_is_killed_preempts_the_job(ready, settings, tmp_path, beside):
    run = RayExecutor.execute_multislice
    job = beside(run, stays, SLICES, _fn_args=(tmp_path,), _settings=settings)
    until(lambda: len(pids(tmp_path)) == 4)
    ready.kill(3, noticed=False)
    status = job.result(60)
    assert isinstance(status, JobPreempted)
    assert status.info.kind == "TPU"
    assert any("slice 1 (tpu-b), host 1" in note for note in status.error.__notes__)


def test_a_resumable_job_goes_on_when_a_raylet_was_killed(ready, settings, tmp_path, beside):
    def once(folder):
        if (folder / "lost").exists():
            return os.environ["MEGASCALE_SLICE_ID"], os.environ["EXECUTOR_CALL_INDEX"]
        return stays(folder)

    run = RayExecutor.execute_multislice_resumable
    more = {"flatten": False, "_fn_args": (tmp_path,), "_settings": settings}
    job = beside(run, once, SLICES, 5, 1, **more)
    until(lambda: len(pids(tmp_path)) == 4)
    (tmp_path / "lost").touch()
    ready.kill(2, noticed=False)
    ready.add(2)
    results = job.result(120)
    assert results == [[("0", "0"), ("0", "1")], [("1", "0"), ("1", "1")]]


def test_a_host_that_fails_because_another_is_lost_counts_as_lost(
    ready, settings, tmp_path, beside
):
    """As a collective operation does, long before Ray notices the lost node."""

    def collective(folder):
        (folder / str(os.getpid())).touch()
        if os.environ["TPU_SLICE_NAME"] == "tpu-b":
            time.sleep(600)  # Its work.
        while not (folder / "gone").exists():
            time.sleep(0.02)  # Nothing tells.
        raise RuntimeError("connection reset by peer")

    run = RayExecutor.execute_multislice
    job = beside(run, collective, SLICES, _fn_args=(tmp_path,), _settings=settings)
    until(lambda: len(pids(tmp_path)) == 4)
    ready.kill(2, noticed=False)
    ready.kill(3, noticed=False)
    (tmp_path / "gone").touch()
    status = job.result(60)
    assert isinstance(status, JobPreempted), status


def test_a_lost_slice_is_replaced_in_its_slot(made, ready):
    pool = made(TYPE)
    pool.scale_multislice(2)
    pool.prepare_all_slices()
    ready.kill(0)
    with pytest.raises(InsufficientSlicesError, match=r"one of \[2\], but only 1 slices"):
        pool.scale_multislice(2, timeout=5)
    assert [each.actor_info.slice_name for each in pool.get_all_pool_members()] == ["tpu-b"]
    ready.add(0)

    def index():
        return os.environ["TPU_SLICE_NAME"], os.environ["TPU_HOST_ID"]

    pool.scale_multislice(2)
    assert pool.execute_on_each_host(index, timeout=60) == [
        [("tpu-a", "0"), ("tpu-a", "1")],
        [("tpu-b", "0"), ("tpu-b", "1")],
    ]


def test_a_rack_that_lost_a_host_is_replaced_by_another(made, ready):
    pool = made(shape=GpuSlices(gpus_per_host=2, hosts=2, label="rack"))
    pool.scale_multislice(1)
    pool.prepare_all_slices()
    (name,) = [each.actor_info.slice_name for each in pool.get_all_pool_members()]
    ready.kill(1 if name == "rack-a" else 3)
    pool.prepare_all_slices()
    (other,) = [each.actor_info.slice_name for each in pool.get_all_pool_members()]
    assert {name, other} == {"rack-a", "rack-b"}
    assert pool.execute_on_each_host(lambda: 1, timeout=60) == [[1, 1]]


def test_an_actor_that_died_is_replaced_before_the_next_task(made, ready):
    pool = made(TYPE)
    pool.scale_multislice(2)
    assert pool.execute_on_each_host(lambda: 1, timeout=60) == [[1, 1], [1, 1]]
    second = pool.get_all_pool_members()[1]
    hosts = ray.get(second.actor.get_all_actors_in_pool.remote())
    ray.kill(hosts[0])
    assert pool.execute_on_each_host(lambda: 1, timeout=60) == [[1, 1], [1, 1]]
    assert ray.get(second.actor.get_all_actors_in_pool.remote())[1] == hosts[1]
    first = pool.get_all_pool_members()[0]
    ray.kill(first.actor)

    def name():
        return os.environ["TPU_SLICE_NAME"]

    assert pool.execute_on_each_host(name, timeout=60) == [["tpu-a"] * 2, ["tpu-b"] * 2]
    assert pool.get_all_pool_members()[1].actor == second.actor


def test_a_lost_slice_is_an_error_where_it_may_not_be_replaced(made, ready, settings):
    pool = made(TYPE, settings=replaced(settings, safe_gather=False))
    pool.scale_multislice(1)
    (member,) = pool.get_all_pool_members()
    ray.kill(member.actor)
    with pytest.raises(SlicesError, match=f"has lost {member.actor_info.slice_name}"):
        pool.prepare_all_slices()


def test_a_process_that_dies_names_its_host(made, ready):
    pool = made(TYPE)
    pool.scale_multislice(1)

    def dies():
        if os.environ["TPU_HOST_ID"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)  # Its work.

    with pytest.raises(HostTaskError, match="host 1") as caught:
        pool.execute_on_each_host(dies, timeout=60)
    assert isinstance(caught.value.cause, ray.exceptions.WorkerCrashedError)
    info = JobInfo("job", "running", "TPU")
    assert isinstance(handle_ray_error(info, caught.value.cause), JobPreempted)
    system = ray.exceptions.RaySystemError("broken")
    assert isinstance(handle_ray_error(info, system), JobError)


def test_a_host_that_is_taken_back_takes_no_task(made, ready, settings):
    pool = made(TYPE, settings=replaced(settings, host_health_seconds_max=12))
    pool.scale_multislice(2)
    pool.prepare_all_slices()
    second = pool.get_all_pool_members()[1]
    hosts = ray.get(second.actor.ensure_host_pool.remote(), timeout=60)
    assert not ray.get(second.actor.is_being_preempted.remote(), timeout=60)
    ready.metadata[3].preempted = True
    assert [ray.get(each.healthy.remote()) for each in hosts] == [True, False]
    assert ray.get(second.actor.is_being_preempted.remote(), timeout=60)
    assert not ray.get(second.actor.healthy.remote(), timeout=60)
    with pytest.raises(HostUnhealthyError, match="Host 1 unhealthy or preempted"):
        ray.get(hosts[1].run_remote_fn.remote(lambda: 1), timeout=60)
    with pytest.raises(
        HostUnhealthyError, match=r"slice 1 \(tpu-b\): host 1 of slice tpu-b is not"
    ):
        pool.execute_on_each_host(lambda: 1, timeout=60)
    ready.metadata[3].preempted = False
    assert pool.execute_on_each_host(lambda: 1, timeout=60) == [[1, 1], [1, 1]]


def test_a_host_that_is_late_is_waited_for(made, ready, beside):
    ready.kill(2)
    pool = made(TYPE)
    scaled = beside(pool.scale_multislice, 2)
    until(lambda: len(ready.left()["actors"]) == 2)
    ready.add(2)
    scaled.result(60)
    assert pool.execute_on_each_host(lambda: 1, timeout=60) == [[1, 1], [1, 1]]


def test_a_slice_goes_with_the_hosts_that_are_there_where_that_is_set(made, ready, settings):
    ready.kill(3)
    pool = made(TYPE, settings=replaced(settings, moderate=True))
    pool.scale_multislice(2)
    assert pool.execute_on_each_host(lambda: 1, timeout=60) == [[1, 1], [1]]


def test_a_slice_that_lost_a_host_is_not_whole(made, ready, settings):
    pool = made(TYPE, settings=replaced(settings, host_health_seconds_max=5))
    pool.scale_multislice(2)
    ready.kill(3)
    with pytest.raises(SliceDegraded, match="slice tpu-b has 1 of its 2 hosts") as caught:
        pool.prepare_all_slices()
    assert isinstance(caught.value, InsufficientSlicesError)
    (degraded,) = ray.get(ray.put(caught.value)).slices
    assert (degraded.slice_name, degraded.num_hosts) == ("tpu-b", 2)
    assert degraded.hosts == (ready.hosts[2].node_ip_address,)
    assert pool.execute_on_each_host(lambda: 1, timeout=60) == [[1, 1]]
    pool.scale_multislice([1, 2])
    assert [each.actor_info.slice_name for each in pool.get_all_pool_members()] == ["tpu-a"]
    with pytest.raises(SliceDegraded, match=r"one of \[2\], but only 1 slices .* tpu-b has 1 of"):
        pool.scale_multislice(2, timeout=3)
    ready.add(3)
    pool.scale_multislice(2)
    assert pool.execute_on_each_host(lambda: 1, timeout=60) == [[1, 1], [1, 1]]


def test_a_whole_slice_is_taken_before_one_that_lost_a_host(made, ready):
    ready.kill(1)
    pool = made(TYPE)
    pool.scale_multislice([1, 2])
    assert [each.actor_info.slice_name for each in pool.get_all_pool_members()] == ["tpu-b"]
    assert pool.execute_on_each_host(lambda: 1, timeout=60) == [[1, 1]]


def test_a_host_that_is_lost_unnoticed_is_said(made, ready, settings):
    pool = made(TYPE, settings=replaced(settings, host_health_seconds_max=8))
    pool.scale_multislice(2)
    assert pool.execute_on_each_host(lambda: 1, timeout=60) == [[1, 1], [1, 1]]
    second = pool.get_all_pool_members()[1]
    ray.kill(ray.get(second.actor.get_all_actors_in_pool.remote())[1])
    ready.kill(3, noticed=False)
    with pytest.raises(SliceDegraded, match="slice tpu-b has 1 of its 2 hosts"):
        pool.execute_on_each_host(lambda: 1, timeout=60)


def test_a_rack_that_lost_a_host_and_has_no_other_says_so(made, ready, settings):
    pool = made(
        shape=GpuSlices(gpus_per_host=2, hosts=2, label="rack"),
        settings=replaced(settings, host_health_seconds_max=5),
    )
    pool.scale_multislice(2)
    ready.kill(1)
    with pytest.raises(SliceDegraded, match="slice rack-a has 1 of its 2 hosts") as caught:
        pool.execute_on_each_host(lambda: 1, timeout=60)
    assert len(caught.value.slices[0].lost) == 1
    pool.scale_multislice([2, 1])
    assert pool.execute_on_each_host(lambda: 1, timeout=60) == [[1, 1]]


def test_a_slow_host_is_waited_for_or_not(made, ready):
    pool = made(TYPE)
    pool.scale_multislice(1)

    def slow():
        time.sleep(3 if os.environ["TPU_HOST_ID"] == "0" else 0)  # Its work.
        return os.environ["TPU_HOST_ID"]

    assert pool.execute_on_each_host(slow, timeout=60) == [["0", "1"]]


def replaced(settings, **changes):
    return type(settings)(**{**vars(settings), **changes})
