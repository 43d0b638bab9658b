"""Running jobs: once or until they succeed, on one slice or on many."""

import functools
import logging
import os
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from moorage.slices.cluster import alive_nodes
from moorage.slices.errors import (
    HostTaskError,
    InsufficientSlicesError,
    RayMissingError,
    RetriesExhaustedError,
)
from moorage.slices.jobs.configs import (
    AcceleratorConfigType,
    CpuAcceleratorConfig,
    GpuAcceleratorConfig,
    TpuAcceleratorConfig,
)
from moorage.slices.jobs.statuses import (
    JobError,
    JobInfo,
    JobPreempted,
    JobStatus,
    JobSucceeded,
    JobUnsuccessful,
    status_of,
)
from moorage.slices.lazy_ray import ray
from moorage.slices.manager import SlicePoolManager
from moorage.slices.results import HostCall, cancel, collect
from moorage.slices.settings import SliceSettings
from moorage.slices.tasks import reporting
from moorage.slices.waiting import outcomes

__all__ = [
    "RayExecutor",
    "execute",
    "execute_multislice",
    "execute_multislice_resumable",
    "execute_resumable",
]

PREEMPTIONS_MAX: Final = 1_000_000
FAILURES_MAX: Final = 10
CRASHES_MAX: Final = 2
"""How often in a row the process of a task may die at once, while all nodes live, and count as
preempted: a cloud that takes a machine back may end processes first. After that the job failed."""
CRASH_SECONDS: Final = 60.0
"""What dies within this has died at once."""
_UNKNOWN: Final = "EMPTY"

logger: Final = logging.getLogger("ray")


class RayExecutor:
    """Runs jobs. Arguments of the job are keywords, or `_fn_args`; bounds are `SliceSettings`."""

    @staticmethod
    def execute(
        remote_fn: Callable[..., Any],
        accelerator_config: AcceleratorConfigType,
        *args: Any,
        _fn_args: tuple[Any, ...] = (),
        _settings: SliceSettings | None = None,
        **kwargs: Any,
    ) -> JobStatus:
        """Run a job once, on one slice or on `worker_count` tasks.

        Args:
            remote_fn: A function, or Ray's remote function.
            accelerator_config: What it runs on.
            *args: Positional arguments of the function.
            _fn_args: The same, as a tuple.
            _settings: Bounds of all waits; without, the environment has them.
            **kwargs: Keyword arguments of the function.

        Returns:
            `JobSucceeded` with a list of results, or what went wrong.

        Raises:
            ValueError: The configuration is for more than one slice.
            InsufficientSlicesError: There is no room for it in time.

        """
        if args and _fn_args:
            raise TypeError("give the function's arguments as *args or as _fn_args, not both")
        settings = _settings or SliceSettings.from_environment()
        if getattr(accelerator_config, "pod_count", 1) != 1:
            raise ValueError("Multi-slice workloads should use 'execute_multislice'")
        call = _Call(remote_fn, args or _fn_args, kwargs)
        if isinstance(accelerator_config, TpuAcceleratorConfig):
            job = _SliceJob(accelerator_config, settings, accelerator_config.worker_count)
            return job.once(call, flatten=True)
        return _run_tasks(call, accelerator_config, settings)

    @staticmethod
    def execute_multislice(
        remote_fn: Callable[..., Any],
        accelerator_config: AcceleratorConfigType,
        flatten: bool = True,
        *,
        _fn_args: tuple[Any, ...] = (),
        _settings: SliceSettings | None = None,
        **kwargs: Any,
    ) -> JobStatus:
        """Run a job once, on all hosts of `pod_count` slices.

        Args:
            remote_fn: A function, or Ray's remote function.
            accelerator_config: What it runs on.
            flatten: Whether the results are one list, rather than a list for each slice.
            _fn_args: Positional arguments of the function.
            _settings: Bounds of all waits; without, the environment has them.
            **kwargs: Keyword arguments of the function.

        Returns:
            `JobSucceeded` with the results, or what went wrong.

        Raises:
            InsufficientSlicesError: There are too few slices in time.

        """
        settings = _settings or SliceSettings.from_environment()
        call = _Call(remote_fn, _fn_args, kwargs)
        return _SliceJob(accelerator_config, settings).once(call, flatten=flatten)

    @classmethod
    def execute_resumable(
        cls,
        remote_fn: Callable[..., Any],
        accelerator_config: AcceleratorConfigType,
        max_retries_preemption: int = PREEMPTIONS_MAX,
        max_retries_failure: int = FAILURES_MAX,
        *,
        _fn_args: tuple[Any, ...] = (),
        _settings: SliceSettings | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run a job until it succeeds, and return its results.

        Args:
            remote_fn: A function, or Ray's remote function.
            accelerator_config: What it runs on.
            max_retries_preemption: How often it may be preempted.
            max_retries_failure: How often it may fail.
            _fn_args: Positional arguments of the function.
            _settings: Bounds of all waits; without, the environment has them.
            **kwargs: Keyword arguments of the function.

        Raises:
            RetriesExhaustedError: It was preempted, or failed, that often.

        """
        settings = _settings or SliceSettings.from_environment()
        attempt = functools.partial(
            cls.execute,
            remote_fn,
            accelerator_config,
            _fn_args=_fn_args,
            _settings=settings,
            **kwargs,
        )
        return _until_success(attempt, max_retries_preemption, max_retries_failure, settings)

    @classmethod
    def execute_multislice_resumable(
        cls,
        remote_fn: Callable[..., Any],
        accelerator_config: AcceleratorConfigType,
        max_retries_preemption: int = PREEMPTIONS_MAX,
        max_retries_failure: int = FAILURES_MAX,
        *,
        flatten: bool = True,
        _fn_args: tuple[Any, ...] = (),
        _settings: SliceSettings | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run a job on all hosts of `pod_count` slices until all succeed; return the results.

        Healthy slices stay from one attempt to the next. Where `pod_count` has larger numbers,
        they are tried between attempts, for `scale_poll_seconds` and once a minute at most.

        Args:
            remote_fn: A function, or Ray's remote function.
            accelerator_config: What it runs on.
            max_retries_preemption: How often it may be preempted, or find too few slices.
            max_retries_failure: How often it may fail.
            flatten: Whether the results are one list, rather than a list for each slice.
            _fn_args: Positional arguments of the function.
            _settings: Bounds of all waits; without, the environment has them.
            **kwargs: Keyword arguments of the function.

        Raises:
            RetriesExhaustedError: It was preempted, or failed, that often.

        """
        settings = _settings or SliceSettings.from_environment()
        job = _SliceJob(accelerator_config, settings)
        attempt = functools.partial(
            job.attempt, _Call(remote_fn, _fn_args, kwargs), flatten=flatten
        )
        try:
            return _until_success(attempt, max_retries_preemption, max_retries_failure, settings)
        finally:
            job.pool.drain_actor_pool()

    autoscale_execute = execute_multislice
    autoscale_execute_resumable = execute_multislice_resumable


def execute(accelerator_config: AcceleratorConfigType) -> Callable[[Any], Callable[..., Any]]:
    """Have calls of a function run it as a job; see `RayExecutor.execute`."""
    return _decorator(RayExecutor.execute, accelerator_config)


def execute_resumable(
    accelerator_config: AcceleratorConfigType,
) -> Callable[[Any], Callable[..., Any]]:
    """Have calls of a function run it until it succeeds; see `RayExecutor.execute_resumable`."""
    return _decorator(RayExecutor.execute_resumable, accelerator_config)


def execute_multislice(
    accelerator_config: AcceleratorConfigType,
) -> Callable[[Any], Callable[..., Any]]:
    """Have calls of a function run it on slices; see `RayExecutor.execute_multislice`."""
    return _decorator(RayExecutor.execute_multislice, accelerator_config)


def execute_multislice_resumable(
    accelerator_config: AcceleratorConfigType,
) -> Callable[[Any], Callable[..., Any]]:
    """As above, until it succeeds; see `RayExecutor.execute_multislice_resumable`."""
    return _decorator(RayExecutor.execute_multislice_resumable, accelerator_config)


def _decorator(
    run: Callable[..., Any], config: AcceleratorConfigType
) -> Callable[[Any], Callable[..., Any]]:
    def decorate(function: Any) -> Callable[..., Any]:
        @functools.wraps(getattr(function, "_function", function))
        def call(*args: Any, **kwargs: Any) -> Any:
            return run(function, config, _fn_args=args, **kwargs)

        return call

    return decorate


class _Call:
    """A function with its arguments."""

    def __init__(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        self.function = getattr(function, "_function", function)
        self.args = args
        self.kwargs = kwargs


class _SliceJob:
    """A job on slices, and the pool that it has them in."""

    def __init__(
        self,
        config: AcceleratorConfigType,
        settings: SliceSettings,
        hosts_max: int | None = None,
    ) -> None:
        if isinstance(config, CpuAcceleratorConfig):
            raise TypeError("slices have TPUs or GPUs: use 'execute' for CPUs")
        self._config = config
        self._settings = settings
        self._hosts_max = hosts_max
        self._info = JobInfo(config.runtime_name, "running", config.resource_name)
        self.pool = SlicePoolManager(shape=config.slices(), settings=settings)

    def once(self, call: _Call, *, flatten: bool) -> JobStatus:
        """Run the job, and give all slices back."""
        try:
            return self.attempt(call, flatten=flatten)
        finally:
            self.pool.drain_actor_pool()

    def attempt(self, call: _Call, *, flatten: bool) -> JobStatus:
        """Run the job on the slices that there are by now."""
        calls: list[list[HostCall]] = []
        try:
            self._scale()
            self.pool.prepare_all_slices()
            calls = self.pool.start_on_hosts(
                call.function,
                call.args,
                call.kwargs,
                env=self._variables(),
                runtime_env=self._config.execution_env,
                hosts_max=self._hosts_max,
            )
            results = collect(calls, None, self._settings.task_cancel_seconds_max)
        except (InsufficientSlicesError, RayMissingError):
            raise
        except HostTaskError as error:
            return self._judged(error, calls)
        except Exception as error:  # noqa: BLE001  # Whatever it is, the status has it.
            self._cancel(calls)
            return status_of(self._info, error)
        except BaseException:
            self._cancel(calls)
            raise
        nested = [each for results_of_slice in results for each in results_of_slice]
        return JobSucceeded(self._info, nested if flatten else results)

    def _scale(self) -> None:
        """Have the slices; those that are held are enough, unless it is time for more."""
        wanted = self._config.pod_count
        sizes = [wanted] if isinstance(wanted, int) else list(wanted)
        held = len(self.pool.get_all_pool_members())
        more = self.pool.should_scale_up_multislice(sizes)
        if held not in sizes or not more:
            self.pool.scale_multislice(sizes if held not in sizes else held)
        else:
            self.pool.scale_multislice(
                [size for size in sizes if size >= held], self._settings.scale_poll_seconds
            )

    def _judged(self, error: HostTaskError, calls: list[list[HostCall]]) -> JobStatus:
        """Return what a failure means: where a host is lost, others often fail first."""
        status = status_of(self._info, error)
        if isinstance(status, JobError):
            hosts = [call.host for calls_of_slice in calls for call in calls_of_slice]
            checks = [host.healthy.remote() for host in hosts]
            for answer in outcomes(checks, self._settings.health_check_seconds_max):
                if answer is False or isinstance(answer, Exception):
                    return JobPreempted(self._info, status.error)
        return status

    def _cancel(self, calls: list[list[HostCall]]) -> None:
        """End what runs, since it is not awaited any more."""
        every = [call for calls_of_slice in calls for call in calls_of_slice]
        cancel(every, self._settings.drain_seconds_max)

    def _variables(self) -> Callable[[int, int], dict[str, Any]]:
        """Return what gives the environment of a host, by slice and host."""
        infos = self.pool.multislice_infos()
        members = self.pool.get_all_pool_members()
        config = self._config
        base: dict[str, Any] = {}
        if isinstance(config, TpuAcceleratorConfig):
            base["TPU_NAME"] = os.environ.get("TPU_NAME", _UNKNOWN)
            base["TPU_VERSION"] = config.tpu_version
            base["TPU_ZONE"] = os.environ.get("TPU_ZONE", _UNKNOWN)
            base["TPU_POD_COUNT"] = len(members)
        base.update(config.execution_env.get("env_vars", {}))

        def variables(index: int, host_id: int) -> dict[str, Any]:
            own = {**base, "EXECUTOR_CALL_INDEX": host_id}
            if len(members) > 1:
                info = infos[index]
                own["MEGASCALE_COORDINATOR_ADDRESS"] = f"{info.coordinator_ip}:{info.port}"
                own["MEGASCALE_NUM_SLICES"] = info.num_slices
                own["MEGASCALE_PORT"] = info.port
                own["MEGASCALE_SLICE_ID"] = info.slice_id
                own["EXECUTOR_CALL_SLICE"] = info.slice_id
                own["TPU_SLICE_NAME"] = members[index].actor_info.slice_name
            return own

        return variables


def _run_tasks(
    call: _Call, config: CpuAcceleratorConfig | GpuAcceleratorConfig, settings: SliceSettings
) -> JobStatus:
    """Run `worker_count` tasks at once: all of them have room, or none starts."""
    info = JobInfo(config.runtime_name, "running", config.resource_name)
    bundle = config.resources()
    group = ray.util.placement_group([bundle] * config.worker_count, strategy="PACK")
    tasks: list[Any] = []
    try:
        placed, _ = ray.wait([group.ready()], timeout=settings.scale_add_seconds_max)
        if not placed:
            raise InsufficientSlicesError(
                f"{config.worker_count} tasks with {bundle} each have no room on this cluster"
                f" within {settings.scale_add_seconds_max:g} s (EFORMER_SCALE_ADD_TIMEOUT_S)"
            )
        for index in range(config.worker_count):
            within = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(group, index)
            options = config.with_environment_variables(EXECUTOR_CALL_INDEX=str(index))
            task = ray.remote(max_retries=0)(reporting(call.function))
            started = task.options(**options.get_remote_options(), scheduling_strategy=within)
            tasks.append(started.remote(*call.args, **call.kwargs))
        return JobSucceeded(info, ray.get(tasks))
    except ray.exceptions.RayError as error:
        return status_of(info, error)
    finally:
        ray.util.remove_placement_group(group)  # Ray kills what still runs there.
        outcomes(tasks, settings.drain_seconds_max)


def _until_success(
    attempt: Callable[[], JobStatus],
    preemptions_max: int,
    failures_max: int,
    settings: SliceSettings,
) -> Any:
    """Run attempts until one succeeds, or one of the two budgets is used up."""
    preemptions = failures = crashes = 0
    trouble: Exception | None = None
    while preemptions < preemptions_max and failures < failures_max:
        began, nodes = time.monotonic(), alive_nodes().keys()
        try:
            status = attempt()
        except InsufficientSlicesError as error:
            preemptions, trouble = preemptions + 1, error
            logger.warning("Too few slices, %s times: %s", preemptions, error)
            time.sleep(settings.scale_retry_seconds)  # Capacity comes back without a word.
            continue
        if isinstance(status, JobSucceeded):
            return status.result
        assert isinstance(status, JobUnsuccessful)
        trouble = status.error
        at_once = time.monotonic() - began < CRASH_SECONDS and nodes <= alive_nodes().keys()
        crashed = at_once and isinstance(trouble, ray.exceptions.WorkerCrashedError)
        crashes = crashes + 1 if crashed else 0
        if crashed:
            pause = min(2.0 ** (crashes - 1), settings.scale_retry_seconds)
            time.sleep(pause)  # A machine that is taken back says so a little later.
        if isinstance(status, JobPreempted) and crashes <= CRASHES_MAX:
            preemptions += 1
            logger.warning("Preempted %s times: %s", preemptions, trouble)
        else:
            failures += 1
            logger.warning("Failed %s times: %s", failures, trouble)
    what = "Preempted" if preemptions >= preemptions_max else "Failed"
    raise RetriesExhaustedError(f"{what} too many times") from trouble
