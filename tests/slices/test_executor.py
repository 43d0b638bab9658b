"""Tests of jobs on CPUs, GPUs and TPUs of a Ray: results, failures, retries, environment."""

import os
import re
import sys
import threading
import time

import pytest
import ray

from moorage.slices import (
    CpuAcceleratorConfig,
    GpuAcceleratorConfig,
    HostTaskError,
    InsufficientSlicesError,
    JobError,
    JobFailed,
    JobPreempted,
    JobSucceeded,
    RayExecutor,
    RetriesExhaustedError,
    SliceSettings,
    TpuAcceleratorConfig,
    autoscale_execute,
    autoscale_execute_resumable,
    device_remote,
    execute,
    execute_multislice,
    execute_multislice_resumable,
    execute_resumable,
)
from tests.waiting import until

pytestmark = [pytest.mark.heavy, pytest.mark.ray]
TYPE = "v4-16"
TPUS = TpuAcceleratorConfig(TYPE, pod_count=2)
CPUS = CpuAcceleratorConfig(core_count=1, worker_count=2)
ONE_CPU = CpuAcceleratorConfig(core_count=1)
GPU_HOST = GpuAcceleratorConfig(2)
"""A job on one host with two GPUs; for calls on slices, a slice of one host."""
SURROGATE = "half a \ud800 surrogate"
NAMES = [
    *("TPU_NAME", "TPU_VERSION", "TPU_ZONE", "TPU_POD_COUNT", "TPU_SLICE_NAME", "TPU_HOST_ID"),
    *("MEGASCALE_COORDINATOR_ADDRESS", "MEGASCALE_NUM_SLICES", "MEGASCALE_PORT"),
    *("MEGASCALE_SLICE_ID", "EXECUTOR_CALL_INDEX", "EXECUTOR_CALL_SLICE", "MINE"),
]


def read_environment():
    return {name: os.environ[name] for name in NAMES if name in os.environ}


@pytest.fixture(autouse=True)
def _bounds(ready, monkeypatch):
    for name, value in {
        "EFORMER_SCALE_POLL_S": "1",
        "EFORMER_SCALE_ADD_TIMEOUT_S": "30",
        "MOORAGE_HOST_HEALTH_WAIT_S": "20",
        "EFORMER_SCALE_RETRY_SLEEP_S": "0.1",
    }.items():
        monkeypatch.setenv(name, value)


def test_a_job_runs_on_cpus():
    status = RayExecutor.execute(lambda x, *, y: (x, y, read_environment()), CPUS, 1, y=2)
    assert isinstance(status, JobSucceeded)
    assert status.result == [
        (1, 2, {"EXECUTOR_CALL_INDEX": "0"}),
        (1, 2, {"EXECUTOR_CALL_INDEX": "1"}),
    ]
    assert (status.info.name, status.info.state) == (CPUS.runtime_name, "running")
    assert status.info.kind == "CPU"
    with pytest.raises(TypeError, match="not both"):
        RayExecutor.execute(read_environment, CPUS, 1, _fn_args=(2,))


def test_a_job_runs_on_gpus():
    config = GpuAcceleratorConfig(2, worker_count=2, execution_env={"env_vars": {"MINE": "1"}})

    @ray.remote
    def devices():
        names = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "MINE")
        return [os.environ[name] for name in names]

    status = RayExecutor.execute(devices, config)
    assert status.result == [["0,1", "PCI_BUS_ID", "1"]] * 2


def test_a_job_runs_on_one_slice():
    status = RayExecutor.execute(read_environment, TpuAcceleratorConfig(TYPE))
    (name,) = {each["TPU_SLICE_NAME"] for each in status.result}
    common = {"TPU_NAME": "EMPTY", "TPU_VERSION": TYPE, "TPU_ZONE": "EMPTY", "TPU_POD_COUNT": "1"}
    assert status.result == [
        {**common, "TPU_SLICE_NAME": name, "TPU_HOST_ID": index, "EXECUTOR_CALL_INDEX": index}
        for index in ("0", "1")
    ]
    one = RayExecutor.execute(read_environment, TpuAcceleratorConfig(TYPE, worker_count=1))
    assert len(one.result) == 1
    with pytest.raises(ValueError, match="should use 'execute_multislice'"):
        RayExecutor.execute(read_environment, TPUS)


def test_a_job_runs_on_two_slices(monkeypatch, ready):
    monkeypatch.setenv("COORD_PORT", "9191")
    monkeypatch.setenv("TPU_NAME", "mine")
    monkeypatch.setenv("TPU_ZONE", "here")
    config = TpuAcceleratorConfig(TYPE, 2, execution_env={"env_vars": {"MINE": "1"}})
    nested = RayExecutor.execute_multislice(read_environment, config, flatten=False).result
    assert [[each["TPU_SLICE_NAME"] for each in hosts] for hosts in nested] == [
        ["tpu-a", "tpu-a"],
        ["tpu-b", "tpu-b"],
    ]
    address = ready.hosts[0].node_ip_address
    assert nested[1][1] == {
        "TPU_NAME": "mine",
        "TPU_VERSION": TYPE,
        "TPU_ZONE": "here",
        "TPU_POD_COUNT": "2",
        "TPU_SLICE_NAME": "tpu-b",
        "TPU_HOST_ID": "1",
        "EXECUTOR_CALL_INDEX": "1",
        "EXECUTOR_CALL_SLICE": "1",
        "MEGASCALE_COORDINATOR_ADDRESS": f"{address}:9191",
        "MEGASCALE_NUM_SLICES": "2",
        "MEGASCALE_PORT": "9191",
        "MEGASCALE_SLICE_ID": "1",
        "MINE": "1",
    }


def test_a_job_runs_on_two_gpu_slices_one_in_each_rack():
    config = GpuAcceleratorConfig(2, worker_count=2, pod_count=2, slice_label="rack")
    results = RayExecutor.execute_multislice(read_environment, config).result
    assert [each["TPU_SLICE_NAME"] for each in results] == ["rack-a", "rack-a", "rack-b", "rack-b"]
    assert [each["MEGASCALE_SLICE_ID"] for each in results] == ["0", "0", "1", "1"]
    assert "TPU_VERSION" not in results[0]
    with pytest.raises(TypeError, match="slices have TPUs or GPUs"):
        RayExecutor.execute_multislice(read_environment, CPUS)


@pytest.mark.parametrize(
    ("run", "config"),
    [(RayExecutor.execute, CPUS), (RayExecutor.execute_multislice, GPU_HOST)],
    ids=["tasks", "slices"],
)
def test_a_failed_task_and_a_lost_host_have_different_statuses(run, config):
    def wrong():
        raise KeyError("a text with the word preempted")

    status = run(wrong, config)
    assert type(status) is JobError
    assert isinstance(status.error, KeyError)
    status = run(lambda: os._exit(3), config)
    assert type(status) is JobPreempted
    assert isinstance(status.error, ray.exceptions.WorkerCrashedError)


def test_a_job_that_cannot_be_pickled_has_failed():
    lock = threading.Lock()
    assert type(RayExecutor.execute_multislice(lambda: lock, GPU_HOST)) is JobFailed
    assert type(RayExecutor.execute(lambda: lock, GPU_HOST)) is JobFailed
    assert type(RayExecutor.execute(lambda x: x, GPU_HOST, x=lock)) is JobFailed


def test_a_job_that_does_not_fit_fails_at_its_time_limit(monkeypatch):
    quick = SliceSettings(scale_add_seconds_max=1, host_health_seconds_max=1)
    with pytest.raises(InsufficientSlicesError, match=r"one of \[5\], but only \d slices"):
        RayExecutor.execute_multislice(
            read_environment, TpuAcceleratorConfig(TYPE, 5), _settings=quick
        )
    with pytest.raises(InsufficientSlicesError, match="2 tasks with"):
        RayExecutor.execute(
            read_environment, CpuAcceleratorConfig(64, worker_count=2), _settings=quick
        )
    monkeypatch.setenv("EFORMER_SCALE_ADD_TIMEOUT_S", "1")
    with pytest.raises(RetriesExhaustedError, match="Preempted too many times"):
        RayExecutor.execute_resumable(read_environment, CpuAcceleratorConfig(64), 2, 9)


def test_failures_and_preemptions_are_counted_separately(tmp_path):
    def unlucky(folder, deaths, errors):
        count = len(list(folder.iterdir()))
        (folder / str(count)).touch()
        if count < deaths:
            os._exit(3)
        if count < deaths + errors:
            raise KeyError(count)
        return count

    run = RayExecutor.execute_resumable
    assert run(unlucky, ONE_CPU, 3, 3, folder=tmp_path, deaths=2, errors=2) == [4]
    with pytest.raises(RuntimeError, match="Failed too many times") as caught:
        run(unlucky, ONE_CPU, 3, 2, folder=tmp_path, deaths=0, errors=9)
    assert isinstance(caught.value.__cause__, KeyError)
    assert len(list(tmp_path.iterdir())) == 7
    with pytest.raises(RuntimeError, match="Preempted too many times"):
        run(unlucky, ONE_CPU, 1, 9, folder=tmp_path, deaths=99, errors=0)
    assert len(list(tmp_path.iterdir())) == 8


def test_a_job_keeps_its_slices_between_attempts(tmp_path):
    def second_time(folder):
        name = f"{os.environ['TPU_SLICE_NAME']}-{os.environ['TPU_HOST_ID']}"
        if not (folder / name).exists():
            (folder / name).touch()
            raise KeyError(name)
        return name

    config = TpuAcceleratorConfig(TYPE)
    names = RayExecutor.execute_multislice_resumable(second_time, config, 1, 5, folder=tmp_path)
    assert names == sorted(each.name for each in tmp_path.iterdir())
    assert len(names) == 2, "one of the two slices"


def test_a_repeated_job_takes_more_slices_if_available(make_pool, tmp_path, monkeypatch):
    """The next attempt uses capacity that another pool has freed."""
    monkeypatch.setattr("moorage.slices.manager.SCALE_UP_SECONDS_MIN", 0)
    monkeypatch.setenv("EFORMER_SCALE_ADD_TIMEOUT_S", "6")
    monkeypatch.setenv("EFORMER_SCALE_POLL_S", "20")  # A slice's process starts in half this time.
    other = make_pool(TYPE)
    other.scale_multislice(1)

    def count(folder):
        (folder / "started").touch()
        if os.environ["TPU_POD_COUNT"] == "1":
            while not (folder / "free").exists():
                time.sleep(0.02)  # No event reports this.
            raise KeyError("again")
        return os.environ["TPU_POD_COUNT"]

    def free():
        until((tmp_path / "started").exists)
        other.drain_actor_pool()
        (tmp_path / "free").touch()

    thread = threading.Thread(target=free)
    thread.start()
    config = TpuAcceleratorConfig(TYPE, pod_count=[1, 2])
    assert RayExecutor.execute_multislice_resumable(count, config, folder=tmp_path) == ["2"] * 4
    thread.join()


def test_decorated_functions_run_as_jobs():
    @execute(ONE_CPU)
    def one(x):
        return x

    @execute_resumable(ONE_CPU)
    @ray.remote
    def two(x):
        return x + 1

    @execute_multislice(GPU_HOST)
    def three(x):
        return x + 2

    @execute_multislice_resumable(GPU_HOST)
    def four(x):
        return x + 3

    assert one(1).result == [1]
    assert two(x=1) == [2]
    assert three(1).result == [3]
    assert four(1) == [4]
    assert one.__name__ == "one"


def test_a_resource_configuration_makes_decorators_and_changed_copies():
    config = CPUS.with_environment_variables({"MINE": "1"}, TPU_NAME="2")
    assert ray.get(config.create_remote_decorator()(read_environment).remote()) == {
        "MINE": "1",
        "TPU_NAME": "2",
    }
    assert CPUS.execution_env == {}
    assert GpuAcceleratorConfig(1, "H100").resources()["accelerator_type:H100"] == 0.001


def test_a_job_that_exits_fails_and_its_exit_is_reported(make_pool):
    for code, text in [
        ("bad arguments", "SystemExit: bad arguments"),
        (2, "SystemExit: exit status 2"),
        (SURROGATE, r"half a \\ud800 surrogate"),
    ]:
        status = RayExecutor.execute(sys.exit, ONE_CPU, code)
        assert type(status) is JobError
        assert re.search(text, str(status.error))
    assert RayExecutor.execute(sys.exit, ONE_CPU, 0).result == [None]
    with pytest.raises(RetriesExhaustedError, match="Failed") as caught:
        RayExecutor.execute_resumable(sys.exit, ONE_CPU, 9, 1, _fn_args=("bad arguments",))
    assert "bad arguments" in str(caught.value.__cause__)
    pool = make_pool(shape=GPU_HOST.slices())
    pool.scale_multislice(1)
    with pytest.raises(HostTaskError, match=r"half a \\ud800 surrogate"):
        pool.execute_on_each_host(sys.exit, SURROGATE)
    assert pool.execute_on_each_host(sys.exit) == [[None]]


def test_a_job_that_dies_at_once_repeatedly_has_failed(tmp_path):
    def dies(folder):
        (folder / str(len(list(folder.iterdir())))).touch()
        os.abort()

    with pytest.raises(RetriesExhaustedError, match="Failed") as caught:
        RayExecutor.execute_resumable(dies, ONE_CPU, max_retries_failure=2, folder=tmp_path)
    assert isinstance(caught.value.__cause__, ray.exceptions.WorkerCrashedError)
    assert len(list(tmp_path.iterdir())) == 4


def test_a_warm_function_keeps_its_slices(monkeypatch, ready):
    monkeypatch.setenv("MINE", "here")
    config = GpuAcceleratorConfig(2, pod_count=2).with_environment_variables(MINE="there")

    @device_remote(accelerator_config=config, flatten=False)
    def find(first, *, second):
        return first + second, os.environ["MINE"], read_environment()["MEGASCALE_SLICE_ID"]

    try:
        assert find(1, second=2) == [[(3, "there", "0")], [(3, "there", "1")]]
        actors = ready.left()["actors"]
        assert ray.get([ref for refs in find.remote(1, second=3) for ref in refs])[1][0] == 4
        assert ready.left()["actors"] == actors
        assert find.__name__ == "find"
    finally:
        find.close()
    assert ready.left()["actors"] == []


def test_methods_of_a_warm_class_run_on_each_host():
    @device_remote(accelerator_config=GpuAcceleratorConfig(2, worker_count=2))
    class Model:
        """A model with state."""

        def __init__(self, size, *, scale=1):
            self.size = size * scale

        def train(self, more):
            self.size += more
            return self.size, os.environ["CUDA_VISIBLE_DEVICES"]

        def fail(self):
            raise KeyError("broken")

    model = Model(2, scale=3)
    try:
        assert model.train(1) == [(7, "0,1")] * 2
        assert ray.get(model.train.remote(2), timeout=60) == [(8, "0,1")] * 2
        with pytest.raises(HostTaskError, match="broken"):
            model.fail()
        with pytest.raises(AttributeError, match="Model has no method 'tarin'"):
            model.tarin(1)
        assert Model.__doc__ == "A model with state."
    finally:
        model.close()
    with pytest.raises(TypeError, match="a function or a class, not 7"):
        device_remote(accelerator_config=TPUS)(7)


def test_device_remote_can_decorate_a_remote_function_of_ray():
    @device_remote(accelerator_config=GPU_HOST)
    @ray.remote
    def plain():
        return os.environ["TPU_HOST_ID"]

    try:
        assert plain() == ["0"]
    finally:
        plain.close()


def test_decorators_for_slices_have_an_old_and_a_new_name():
    assert autoscale_execute is execute_multislice
    assert autoscale_execute_resumable is execute_multislice_resumable
