"""Jobs on CPUs, GPUs and TPUs of a real Ray: results, failures, budgets, what tasks are told."""

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

pytestmark = [pytest.mark.heavy, pytest.mark.ray]
TYPE = "v4-16"
TPUS = TpuAcceleratorConfig(TYPE, pod_count=2)
CPUS = CpuAcceleratorConfig(core_count=1, worker_count=2)
NAMES = [
    *("TPU_NAME", "TPU_VERSION", "TPU_ZONE", "TPU_POD_COUNT", "TPU_SLICE_NAME", "TPU_HOST_ID"),
    *("MEGASCALE_COORDINATOR_ADDRESS", "MEGASCALE_NUM_SLICES", "MEGASCALE_PORT"),
    *("MEGASCALE_SLICE_ID", "EXECUTOR_CALL_INDEX", "EXECUTOR_CALL_SLICE", "MINE"),
]


def told():
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


def test_a_job_on_cpus():
    status = RayExecutor.execute(lambda x, *, y: (x, y, told()), CPUS, 1, y=2)
    assert isinstance(status, JobSucceeded)
    assert status.result == [
        (1, 2, {"EXECUTOR_CALL_INDEX": "0"}),
        (1, 2, {"EXECUTOR_CALL_INDEX": "1"}),
    ]
    assert (status.info.name, status.info.state) == (CPUS.runtime_name, "running")
    assert status.info.kind == "CPU"
    with pytest.raises(TypeError, match="not both"):
        RayExecutor.execute(told, CPUS, 1, _fn_args=(2,))


def test_a_job_on_gpus():
    config = GpuAcceleratorConfig(2, worker_count=4, execution_env={"env_vars": {"MINE": "1"}})

    @ray.remote
    def devices():
        return os.environ["CUDA_VISIBLE_DEVICES"], os.environ["MINE"]

    status = RayExecutor.execute(devices, config)
    assert status.result == [("0,1", "1")] * 4


def test_a_job_on_one_slice():
    status = RayExecutor.execute(told, TpuAcceleratorConfig(TYPE))
    (name,) = {each["TPU_SLICE_NAME"] for each in status.result}
    common = {"TPU_NAME": "EMPTY", "TPU_VERSION": TYPE, "TPU_ZONE": "EMPTY", "TPU_POD_COUNT": "1"}
    assert status.result == [
        {**common, "TPU_SLICE_NAME": name, "TPU_HOST_ID": index, "EXECUTOR_CALL_INDEX": index}
        for index in ("0", "1")
    ]
    one = RayExecutor.execute(told, TpuAcceleratorConfig(TYPE, worker_count=1))
    assert len(one.result) == 1
    with pytest.raises(ValueError, match="should use 'execute_multislice'"):
        RayExecutor.execute(told, TPUS)


def test_a_job_on_two_slices(monkeypatch, ready):
    monkeypatch.setenv("COORD_PORT", "9191")
    monkeypatch.setenv("TPU_NAME", "mine")
    monkeypatch.setenv("TPU_ZONE", "here")
    config = TpuAcceleratorConfig(TYPE, 2, execution_env={"env_vars": {"MINE": "1"}})
    nested = RayExecutor.execute_multislice(told, config, flatten=False).result
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


def test_a_gang_on_two_racks():
    config = GpuAcceleratorConfig(2, worker_count=2, pod_count=2, slice_label="rack")
    found = RayExecutor.execute_multislice(told, config).result
    assert [each["TPU_SLICE_NAME"] for each in found] == ["rack-a", "rack-a", "rack-b", "rack-b"]
    assert [each["MEGASCALE_SLICE_ID"] for each in found] == ["0", "0", "1", "1"]
    assert "TPU_VERSION" not in found[0]
    with pytest.raises(TypeError, match="slices have TPUs or GPUs"):
        RayExecutor.execute_multislice(told, CPUS)


def test_errors_are_told_apart():
    def wrong():
        raise KeyError("preempted, it says")

    for config in (CPUS, TpuAcceleratorConfig(TYPE)):
        status = RayExecutor.execute(wrong, config)
        assert type(status) is JobError
        assert isinstance(status.error, KeyError)
        status = RayExecutor.execute(lambda: os._exit(3), config)
        assert type(status) is JobPreempted
        assert isinstance(status.error, ray.exceptions.WorkerCrashedError)
    lock = threading.Lock()
    status = RayExecutor.execute_multislice(lambda: lock, TpuAcceleratorConfig(TYPE))
    assert type(status) is JobFailed


def test_too_little_room_is_an_error_in_time(monkeypatch):
    quick = SliceSettings(scale_add_seconds_max=1, host_health_seconds_max=1)
    with pytest.raises(InsufficientSlicesError, match=r"one of \[5\], but only \d slices"):
        RayExecutor.execute_multislice(told, TpuAcceleratorConfig(TYPE, 5), _settings=quick)
    with pytest.raises(InsufficientSlicesError, match="2 tasks with"):
        RayExecutor.execute(told, CpuAcceleratorConfig(64, worker_count=2), _settings=quick)
    monkeypatch.setenv("EFORMER_SCALE_ADD_TIMEOUT_S", "1")
    with pytest.raises(RetriesExhaustedError, match="Preempted too many times"):
        RayExecutor.execute_resumable(told, CpuAcceleratorConfig(64), 2, 9)


def test_budgets_are_counted_apart(tmp_path):
    def unlucky(folder, deaths, errors):
        count = len(list(folder.iterdir()))
        (folder / str(count)).touch()
        if count < deaths:
            os._exit(3)
        if count < deaths + errors:
            raise KeyError(count)
        return count

    one = CpuAcceleratorConfig(core_count=1)
    run = RayExecutor.execute_resumable
    assert run(unlucky, one, 3, 3, folder=tmp_path, deaths=2, errors=2) == [4]
    with pytest.raises(RuntimeError, match="Failed too many times") as caught:
        run(unlucky, one, 3, 2, folder=tmp_path, deaths=0, errors=9)
    assert isinstance(caught.value.__cause__, KeyError)
    assert len(list(tmp_path.iterdir())) == 7
    with pytest.raises(RuntimeError, match="Preempted too many times"):
        run(unlucky, one, 1, 9, folder=tmp_path, deaths=99, errors=0)
    assert len(list(tmp_path.iterdir())) == 8


def test_slices_are_kept_between_attempts(tmp_path):
    def second_time(folder):
        name = f"{os.environ['TPU_SLICE_NAME']}-{os.environ['TPU_HOST_ID']}"
        if not (folder / name).exists():
            (folder / name).touch()
            raise KeyError(name)
        return name

    found = RayExecutor.execute_multislice_resumable(second_time, TPUS, 1, 5, folder=tmp_path)
    assert found == ["tpu-a-0", "tpu-a-1", "tpu-b-0", "tpu-b-1"]


def test_between_attempts_more_slices_are_taken(made, tmp_path, monkeypatch):
    """What another pool frees meanwhile is used by the next attempt."""
    monkeypatch.setattr("moorage.slices.manager.SCALE_UP_SECONDS_MIN", 0)
    monkeypatch.setenv("EFORMER_SCALE_ADD_TIMEOUT_S", "6")
    monkeypatch.setenv("EFORMER_SCALE_POLL_S", "20")  # A process of the slice starts in half of it.
    other = made(TYPE)
    other.scale_multislice(1)

    def count(folder):
        (folder / "started").touch()
        if os.environ["TPU_POD_COUNT"] == "1":
            while not (folder / "free").exists():
                time.sleep(0.02)  # Nothing tells.
            raise KeyError("again")
        return os.environ["TPU_POD_COUNT"]

    def free():
        deadline = time.monotonic() + 60
        while not (tmp_path / "started").exists() and time.monotonic() < deadline:
            time.sleep(0.05)  # Nothing tells.
        other.drain_actor_pool()
        (tmp_path / "free").touch()

    thread = threading.Thread(target=free)
    thread.start()
    config = TpuAcceleratorConfig(TYPE, pod_count=[1, 2])
    assert RayExecutor.execute_multislice_resumable(count, config, folder=tmp_path) == ["2"] * 4
    thread.join()


def test_decorators():
    @execute(CPUS)
    def one(x):
        return x

    @execute_resumable(CPUS)
    @ray.remote
    def two(x):
        return x + 1

    @execute_multislice(TPUS)
    def three(x):
        return x + 2

    @execute_multislice_resumable(TPUS)
    def four(x):
        return x + 3

    assert one(1).result == [1, 1]
    assert two(x=1) == [2, 2]
    assert three(1).result == [3] * 4
    assert four(1) == [4] * 4
    assert one.__name__ == "one"


def test_a_configuration_makes_decorators_and_copies():
    config = CPUS.with_environment_variables({"MINE": "1"}, TPU_NAME="2")
    assert ray.get(config.create_remote_decorator()(told).remote()) == {
        "MINE": "1",
        "TPU_NAME": "2",
    }
    assert CPUS.execution_env == {}
    assert GpuAcceleratorConfig(1, "H100").resources()["accelerator_type:H100"] == 0.001


class Unpicklable(Exception):  # noqa: N818  # A user's.
    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")
        self.lock = threading.Lock()


def leave(how):
    match how:
        case "text":
            sys.exit("bad arguments")
        case "code":
            raise SystemExit(2)
        case "well":
            sys.exit(0)
        case "none":
            raise SystemExit
        case "unpicklable":
            raise Unpicklable("this", "that")
        case "surrogate":
            raise ValueError("half a \ud800 surrogate")
        case "surrogate exit":
            sys.exit("half a \ud800 surrogate")


LEAVINGS = {
    "text": "SystemExit: bad arguments",
    "code": "SystemExit: exit status 2",
    "unpicklable": "Unpicklable: this and that",
    "surrogate": r"half a \\ud800 surrogate",
    "surrogate exit": r"half a \\ud800 surrogate",
}


def test_what_a_job_left_by_is_said_and_fails_it():
    one = CpuAcceleratorConfig(core_count=1)
    for how, text in LEAVINGS.items():
        status = RayExecutor.execute(leave, one, how)
        assert type(status) is JobError
        assert re.search(text, str(status.error)), how
    for how in ("well", "none"):
        assert RayExecutor.execute(leave, one, how).result == [None]
    with pytest.raises(RetriesExhaustedError, match="Failed") as caught:
        RayExecutor.execute_resumable(leave, one, max_retries_failure=1, how="text")
    assert "bad arguments" in str(caught.value.__cause__)


def test_what_dies_again_and_again_at_once_has_failed(tmp_path):
    def dies(folder):
        (folder / str(len(list(folder.iterdir())))).touch()
        os.abort()

    one = CpuAcceleratorConfig(core_count=1)
    with pytest.raises(RetriesExhaustedError, match="Failed") as caught:
        RayExecutor.execute_resumable(dies, one, max_retries_failure=2, folder=tmp_path)
    assert isinstance(caught.value.__cause__, ray.exceptions.WorkerCrashedError)
    assert len(list(tmp_path.iterdir())) == 4


def test_hosts_say_what_a_task_left_by(made):
    pool = made(TYPE)
    pool.scale_multislice(1)
    for how, text in LEAVINGS.items():
        with pytest.raises(HostTaskError, match=text):
            pool.execute_on_each_host(leave, how)
    assert pool.execute_on_each_host(leave, "well") == [[None, None]]


def test_a_warm_function_keeps_its_slices(monkeypatch, ready):
    monkeypatch.setenv("MINE", "here")
    config = TPUS.with_environment_variables(MINE="there")

    @device_remote(accelerator_config=config, flatten=False)
    def find(first, *, second):
        return first + second, os.environ["MINE"], told()["MEGASCALE_SLICE_ID"]

    try:
        assert find(1, second=2) == [[(3, "there", "0")] * 2, [(3, "there", "1")] * 2]
        actors = ready.left()["actors"]
        assert ray.get([ref for refs in find.remote(1, second=3) for ref in refs])[3][0] == 4
        assert ready.left()["actors"] == actors
        assert find.__name__ == "find"
        ready.kill(3)
        ready.add(3)
        assert find(1, second=2)[1] == [(3, "there", "1")] * 2
    finally:
        find.close()
    assert ready.left()["actors"] == []


def test_methods_of_a_warm_class_run_on_each_host():
    @device_remote(accelerator_config=TpuAcceleratorConfig(TYPE))
    @ray.remote
    def plain():
        return os.environ["TPU_HOST_ID"]

    @device_remote(accelerator_config=GpuAcceleratorConfig(2, worker_count=2))
    class Model:
        """A model."""

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
        assert Model.__doc__ == "A model."
    finally:
        model.close()
    try:
        assert plain() == ["0", "1"]
    finally:
        plain.close()
    with pytest.raises(TypeError, match="a function or a class, not 7"):
        device_remote(accelerator_config=TPUS)(7)


def test_decorators_for_slices_have_their_newer_names():
    @autoscale_execute(TPUS)
    def once():
        return told()["MEGASCALE_SLICE_ID"]

    @autoscale_execute_resumable(TPUS)
    def again():
        return told()["MEGASCALE_SLICE_ID"]

    assert once().result == again() == ["0", "0", "1", "1"]
