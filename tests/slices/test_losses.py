"""Tests of hosts that a pool on a real Ray loses, gets late, or must return."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

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
from tests.waiting import until

pytestmark = [pytest.mark.heavy, pytest.mark.ray]
TYPE = "v4-16"
SLICE = TpuAcceleratorConfig(TYPE)
RACKS = GpuSlices(gpus_per_host=2, hosts=2, label="rack")
WITHOUT_HOST_1 = pytest.mark.parametrize("ready", [[1]], indirect=True, ids=["without-host-1"])


def names(pool):
    return [each.actor_info.slice_name for each in pool.get_all_pool_members()]


def hosts(name):
    """Return the numbers of the hosts of a slice or a rack."""
    return (0, 1) if name.endswith("a") else (2, 3)


@pytest.fixture
def beside():
    """Run a function in a thread, since only the main thread may start nodes."""
    with ThreadPoolExecutor() as threads:
        yield threads.submit


def stays(folder):
    (folder / os.environ["TPU_SLICE_NAME"]).mkdir(exist_ok=True)
    (folder / os.environ["TPU_SLICE_NAME"] / os.environ["TPU_HOST_ID"]).touch()
    time.sleep(600)  # The task's work.


def at_work(folder):
    """Wait until both hosts of a slice work, and return the slice's name."""
    until(lambda: len([*folder.glob("*/*")]) == 2)
    (name,) = {each.parent.name for each in folder.glob("*/*")}
    return name


def test_a_killed_raylet_preempts_the_job(ready, settings, tmp_path, beside):
    job = beside(RayExecutor.execute, stays, SLICE, _fn_args=(tmp_path,), _settings=settings)
    name = at_work(tmp_path)
    ready.kill(hosts(name)[1], noticed=False)
    status = job.result(60)
    assert isinstance(status, JobPreempted)
    assert status.info.kind == "TPU"
    assert any(f"slice 0 ({name}), host 1" in note for note in status.error.__notes__)


def test_a_resumable_job_continues_after_a_raylet_was_killed(ready, settings, tmp_path, beside):
    def once(folder):
        if (folder / "lost").exists():
            return os.environ["TPU_SLICE_NAME"], os.environ["EXECUTOR_CALL_INDEX"]
        return stays(folder)

    run = RayExecutor.execute_multislice_resumable
    more = {"flatten": False, "_fn_args": (tmp_path,), "_settings": settings}
    job = beside(run, once, SLICE, 5, 1, **more)
    name = at_work(tmp_path)
    (tmp_path / "lost").touch()
    ready.kill(hosts(name)[0], noticed=False)
    other = ({"tpu-a", "tpu-b"} - {name}).pop()
    assert job.result(120) == [[(other, "0"), (other, "1")]]


def test_a_job_whose_task_fails_because_another_host_is_lost_counts_as_preempted(
    ready, settings, tmp_path, beside
):
    """A collective operation fails at the loss of any host, long before Ray notices the loss."""

    def collective(folder):
        if os.environ["TPU_HOST_ID"] == "1":
            stays(folder)
        (folder / os.environ["TPU_SLICE_NAME"]).mkdir(exist_ok=True)
        (folder / os.environ["TPU_SLICE_NAME"] / "0").touch()
        while not (folder / "gone").exists():
            time.sleep(0.02)  # No event reports this.
        raise RuntimeError("connection reset by peer")

    job = beside(RayExecutor.execute, collective, SLICE, _fn_args=(tmp_path,), _settings=settings)
    ready.kill(hosts(at_work(tmp_path))[1], noticed=False)
    (tmp_path / "gone").touch()
    status = job.result(60)
    assert isinstance(status, JobPreempted), status


def test_the_replacement_of_a_lost_slice_gets_the_same_number(make_pool, ready):
    pool = make_pool(TYPE)
    pool.scale_multislice(2)
    pool.prepare_all_slices()
    ready.kill(0)
    with pytest.raises(InsufficientSlicesError, match=r"one of \[2\], but only 1 slices"):
        pool.scale_multislice(2, timeout=1)
    assert names(pool) == ["tpu-b"]
    ready.add(0)
    pool.scale_multislice(2)
    assert names(pool) == ["tpu-a", "tpu-b"]


def test_a_rack_that_lost_a_host_is_replaced_by_another_rack(make_pool, ready):
    pool = make_pool(shape=RACKS)
    pool.scale_multislice(1)
    pool.prepare_all_slices()
    (name,) = names(pool)
    ready.kill(hosts(name)[1])
    pool.prepare_all_slices()
    assert {name, *names(pool)} == {"rack-a", "rack-b"}


def test_an_actor_that_died_is_replaced_before_the_next_task(make_pool):
    pool = make_pool(shape=GpuSlices(gpus_per_host=2))
    pool.scale_multislice(2)
    first, second = pool.get_all_pool_members()
    before, (host,) = ray.get([each.actor.ensure_host_pool.remote() for each in (first, second)])
    ray.kill(host)
    assert pool.execute_on_each_host(lambda: 1, timeout=60) == [[1], [1]]
    assert ray.get(first.actor.get_all_actors_in_pool.remote()) == before
    ray.kill(first.actor)
    assert pool.execute_on_each_host(lambda: 1, timeout=60) == [[1], [1]]
    assert pool.get_all_pool_members()[1].actor == second.actor


def test_a_lost_slice_that_may_not_be_replaced_is_an_error(make_pool, settings):
    pool = make_pool(TYPE, settings=replace(settings, safe_gather=False))
    pool.scale_multislice(1)
    (member,) = pool.get_all_pool_members()
    ray.kill(member.actor)
    with pytest.raises(SlicesError, match=f"has lost {member.actor_info.slice_name}"):
        pool.prepare_all_slices()


def test_the_error_of_a_dead_process_names_its_host(make_pool):
    pool = make_pool(TYPE)
    pool.scale_multislice(1)

    def dies():
        if os.environ["TPU_HOST_ID"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)  # The task's work.

    with pytest.raises(HostTaskError, match="host 1") as caught:
        pool.execute_on_each_host(dies, timeout=60)
    assert isinstance(caught.value.cause, ray.exceptions.WorkerCrashedError)
    info = JobInfo("job", "running", "TPU")
    assert isinstance(handle_ray_error(info, caught.value.cause), JobPreempted)
    system = ray.exceptions.RaySystemError("broken")
    assert isinstance(handle_ray_error(info, system), JobError)


def test_a_host_about_to_be_preempted_gets_no_task(make_pool, ready, settings):
    pool = make_pool(TYPE, settings=replace(settings, host_health_seconds_max=10))
    pool.scale_multislice(2)
    second = pool.get_all_pool_members()[1]
    actors = ray.get(second.actor.ensure_host_pool.remote(), timeout=60)
    assert not ray.get(second.actor.is_being_preempted.remote(), timeout=60)
    ready.metadata[3].preempted = True
    assert [ray.get(each.healthy.remote()) for each in actors] == [True, False]
    assert ray.get(second.actor.is_being_preempted.remote(), timeout=60)
    assert not ray.get(second.actor.healthy.remote(), timeout=60)
    with pytest.raises(HostUnhealthyError, match="Host 1 unhealthy or preempted"):
        ray.get(actors[1].run_remote_fn.remote(lambda: 1), timeout=60)
    with pytest.raises(
        HostUnhealthyError, match=r"slice 1 \(tpu-b\): host 1 of slice tpu-b is not"
    ):
        pool.execute_on_each_host(lambda: 1, timeout=60)
    ready.metadata[3].preempted = False
    assert pool.execute_on_each_host(lambda: 1, timeout=60) == [[1, 1], [1, 1]]


def test_a_slice_about_to_be_preempted_does_not_count_as_available(make_pool, ready):
    pool = make_pool(TYPE)
    pool.scale_multislice(2)
    second = pool.get_all_pool_members()[1].actor
    ready.metadata[2].preempted = True
    answers = [second.is_being_preempted.remote(), second.healthy.remote()]
    assert ray.get(answers, timeout=60) == [True, False]
    pool.scale_multislice([1, 2], timeout=6)
    assert names(pool) == ["tpu-a"]
    with pytest.raises(InsufficientSlicesError, match="slice tpu-b is being preempted"):
        pool.scale_multislice(2, timeout=4)
    ready.metadata[2].preempted = False
    pool.scale_multislice(2)
    assert names(pool) == ["tpu-a", "tpu-b"]


def test_a_smaller_size_is_tried_after_a_preempted_slice_is_gone(
    make_pool, ready, settings, beside
):
    pool = make_pool(TYPE, settings=replace(settings, scale_add_seconds_max=1000))
    ready.metadata[2].preempted = True
    scaled = beside(pool.scale_multislice, [1, 2])
    until(lambda: len(ready.left()["actors"]) == 2)
    ready.kill(2)
    scaled.result(60)
    assert names(pool) == ["tpu-a"]


@pytest.mark.parametrize("ready", [[2]], indirect=True, ids=["without-host-2"])
def test_the_pool_waits_for_a_late_host(make_pool, ready, beside):
    pool = make_pool(TYPE)
    scaled = beside(pool.scale_multislice, 2)
    until(lambda: len(ready.left()["actors"]) == 2)
    ready.add(2)
    scaled.result(60)
    assert names(pool) == ["tpu-a", "tpu-b"]


def test_a_slice_that_lost_a_host_is_incomplete(make_pool, ready, settings):
    pool = make_pool(TYPE, settings=replace(settings, host_health_seconds_max=2))
    pool.scale_multislice(2)
    ready.kill(1)
    with pytest.raises(SliceDegraded, match="slice tpu-a has 1 of its 2 hosts") as caught:
        pool.prepare_all_slices()
    assert isinstance(caught.value, InsufficientSlicesError)
    (degraded,) = ray.get(ray.put(caught.value)).slices
    assert (degraded.slice_name, degraded.num_hosts) == ("tpu-a", 2)
    assert degraded.hosts == (ready.hosts[0].node_ip_address,)
    pool.scale_multislice([1, 2])
    assert names(pool) == ["tpu-b"]
    with pytest.raises(SliceDegraded, match=r"one of \[2\], but only 1 slices .* tpu-a has 1 of"):
        pool.scale_multislice(2, timeout=1)


@WITHOUT_HOST_1
def test_a_slice_runs_on_its_remaining_hosts_if_configured(make_pool, settings):
    pool = make_pool(TYPE, settings=replace(settings, moderate=True))
    pool.scale_multislice(2)
    assert pool.execute_on_each_host(lambda: 1, timeout=60) == [[1], [1, 1]]


@WITHOUT_HOST_1
def test_a_complete_slice_is_preferred_to_a_slice_that_lost_a_host(make_pool):
    pool = make_pool(TYPE)
    pool.scale_multislice([1, 2])
    assert names(pool) == ["tpu-b"]


def test_the_error_names_a_lost_host_before_ray_notices(make_pool, ready, settings):
    pool = make_pool(TYPE, settings=replace(settings, host_health_seconds_max=8))
    pool.scale_multislice(2)
    second = pool.get_all_pool_members()[1]
    ray.kill(ray.get(second.actor.ensure_host_pool.remote())[1])
    ready.kill(3, noticed=False)
    with pytest.raises(SliceDegraded, match="slice tpu-b has 1 of its 2 hosts"):
        pool.execute_on_each_host(lambda: 1, timeout=60)


def test_a_rack_without_a_replacement_host_is_an_error(make_pool, ready, settings):
    pool = make_pool(shape=RACKS, settings=replace(settings, host_health_seconds_max=2))
    pool.scale_multislice(2)
    ready.kill(1)
    with pytest.raises(SliceDegraded, match="slice rack-a has 1 of its 2 hosts") as caught:
        pool.execute_on_each_host(lambda: 1, timeout=60)
    assert len(caught.value.slices[0].lost) == 1
    pool.scale_multislice([2, 1])
    assert names(pool) == ["rack-b"]
