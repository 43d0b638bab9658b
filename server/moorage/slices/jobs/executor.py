"""Runs jobs: once or until they succeed, on one slice or on several."""

import functools
import logging
import time
from collections.abc import Callable
from typing import Any, Final

from moorage.slices.cluster import alive_nodes
from moorage.slices.devices import DEVICE_ORDER
from moorage.slices.errors import InsufficientSlicesError, RetriesExhaustedError
from moorage.slices.jobs.configs import (
    AcceleratorConfigType,
    CpuAcceleratorConfig,
    GpuAcceleratorConfig,
    TpuAcceleratorConfig,
)
from moorage.slices.jobs.on_slices import SliceCall, SliceJob
from moorage.slices.jobs.statuses import (
    JobInfo,
    JobPreempted,
    JobStatus,
    JobSucceeded,
    JobUnsuccessful,
    status_of,
)
from moorage.slices.lazy_ray import ray
from moorage.slices.ray_values import RayValue, UserFunction
from moorage.slices.settings import SliceSettings
from moorage.slices.tasks import plain, reporting
from moorage.slices.waiting import outcomes

PREEMPTIONS_MAX: Final = 1_000_000
FAILURES_MAX: Final = 10
CRASHES_MAX: Final = 2
"""Maximum attempts in a row that count as preempted if a process dies at once while all nodes live.

A cloud may end processes before it reclaims a machine. A further such attempt counts as failed.
"""
CRASH_SECONDS: Final = 60.0
"""Maximum seconds of an attempt whose process counts as one that dies at once."""

logger: Final = logging.getLogger("ray")


class RayExecutor:
    """Runs jobs on CPUs, GPUs or TPUs; `SliceSettings` has the time limits."""

    @staticmethod
    def execute(
        remote_fn: UserFunction,
        accelerator_config: AcceleratorConfigType,
        *args: RayValue,
        _fn_args: tuple[RayValue, ...] = (),
        _settings: SliceSettings | None = None,
        **kwargs: RayValue,
    ) -> JobStatus:
        """Run a job once: on one slice, or as `worker_count` tasks.

        Args:
            remote_fn: A function, or Ray's remote function.
            accelerator_config: The resources of the job.
            *args: Positional arguments of the function.
            _fn_args: Positional arguments as a tuple, instead of `*args`.
            _settings: Time limits; None: from the environment.
            **kwargs: Keyword arguments of the function.

        Returns:
            `JobSucceeded` with a list of results, or another status with the error.

        Raises:
            ValueError: The configuration is for more than one slice.
            InsufficientSlicesError: The cluster has no room for the job in time.
        """
        if args and _fn_args:
            raise TypeError("give the function's arguments as *args or as _fn_args, not both")
        settings = _settings or SliceSettings.from_environment()
        if getattr(accelerator_config, "pod_count", 1) != 1:
            raise ValueError("Multi-slice workloads should use 'execute_multislice'")
        call = SliceCall(remote_fn, args or _fn_args, kwargs)
        if isinstance(accelerator_config, TpuAcceleratorConfig):
            job = SliceJob(accelerator_config, settings, accelerator_config.worker_count)
            return job.once(call, flatten=True)
        return _run_tasks(call, accelerator_config, settings)

    @staticmethod
    def execute_multislice(
        remote_fn: UserFunction,
        accelerator_config: AcceleratorConfigType,
        flatten: bool = True,
        *,
        _fn_args: tuple[RayValue, ...] = (),
        _settings: SliceSettings | None = None,
        **kwargs: RayValue,
    ) -> JobStatus:
        """Run a job once, on all hosts of `pod_count` slices.

        Args:
            remote_fn: A function, or Ray's remote function.
            accelerator_config: The slices, as `pod_count` and the resources of each.
            flatten: Whether the results are one list, rather than a list for each slice.
            _fn_args: Positional arguments of the function.
            _settings: Time limits; None: from the environment.
            **kwargs: Keyword arguments of the function.

        Returns:
            `JobSucceeded` with the results, or another status with the error.

        Raises:
            InsufficientSlicesError: Too few slices are available in time.
        """
        settings = _settings or SliceSettings.from_environment()
        call = SliceCall(remote_fn, _fn_args, kwargs)
        return SliceJob(accelerator_config, settings).once(call, flatten=flatten)

    @classmethod
    def execute_resumable(
        cls,
        remote_fn: UserFunction,
        accelerator_config: AcceleratorConfigType,
        max_retries_preemption: int = PREEMPTIONS_MAX,
        max_retries_failure: int = FAILURES_MAX,
        *,
        _fn_args: tuple[RayValue, ...] = (),
        _settings: SliceSettings | None = None,
        **kwargs: RayValue,
    ) -> RayValue:
        """Run a job until it succeeds, and return its results.

        Args:
            remote_fn: A function, or Ray's remote function.
            accelerator_config: The resources of the job.
            max_retries_preemption: Number of preemptions after which the job is given up.
            max_retries_failure: Number of failures after which the job is given up.
            _fn_args: Positional arguments of the function.
            _settings: Time limits; None: from the environment.
            **kwargs: Keyword arguments of the function.

        Raises:
            RetriesExhaustedError: The job reached a limit of preemptions or failures.
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
        remote_fn: UserFunction,
        accelerator_config: AcceleratorConfigType,
        max_retries_preemption: int = PREEMPTIONS_MAX,
        max_retries_failure: int = FAILURES_MAX,
        *,
        flatten: bool = True,
        _fn_args: tuple[RayValue, ...] = (),
        _settings: SliceSettings | None = None,
        **kwargs: RayValue,
    ) -> RayValue:
        """Run a job on all hosts of `pod_count` slices until all succeed; return the results.

        Healthy slices stay from one attempt to the next. If `pod_count` has larger numbers, the job
        tries to get more slices between attempts: at most once a minute, each time for at most
        `scale_poll_seconds`.

        Args:
            remote_fn: A function, or Ray's remote function.
            accelerator_config: The slices, as `pod_count` and the resources of each.
            max_retries_preemption: Number of preemptions after which the job is given up; an
                attempt that finds too few slices counts as one.
            max_retries_failure: Number of failures after which the job is given up.
            flatten: Whether the results are one list, rather than a list for each slice.
            _fn_args: Positional arguments of the function.
            _settings: Time limits; None: from the environment.
            **kwargs: Keyword arguments of the function.

        Raises:
            RetriesExhaustedError: The job reached a limit of preemptions or failures.
        """
        settings = _settings or SliceSettings.from_environment()
        job = SliceJob(accelerator_config, settings)
        attempt = functools.partial(
            job.attempt, SliceCall(remote_fn, _fn_args, kwargs), flatten=flatten
        )
        try:
            return _until_success(attempt, max_retries_preemption, max_retries_failure, settings)
        finally:
            job.pool.drain_actor_pool()

    autoscale_execute = execute_multislice
    autoscale_execute_resumable = execute_multislice_resumable


def execute(accelerator_config: AcceleratorConfigType) -> Callable[[RayValue], UserFunction]:
    """Decorate a function so that a call runs it as a job, as `RayExecutor.execute` does."""
    return _decorator(RayExecutor.execute, accelerator_config)


def execute_resumable(
    accelerator_config: AcceleratorConfigType,
) -> Callable[[RayValue], UserFunction]:
    """Decorate a function so that a call runs it as `RayExecutor.execute_resumable` does."""
    return _decorator(RayExecutor.execute_resumable, accelerator_config)


def execute_multislice(
    accelerator_config: AcceleratorConfigType,
) -> Callable[[RayValue], UserFunction]:
    """Decorate a function so that a call runs it as `RayExecutor.execute_multislice` does."""
    return _decorator(RayExecutor.execute_multislice, accelerator_config)


def execute_multislice_resumable(
    accelerator_config: AcceleratorConfigType,
) -> Callable[[RayValue], UserFunction]:
    """Decorate a function: a call runs it as `RayExecutor.execute_multislice_resumable` does."""
    return _decorator(RayExecutor.execute_multislice_resumable, accelerator_config)


autoscale_execute = execute_multislice
autoscale_execute_resumable = execute_multislice_resumable


def _decorator(
    run: UserFunction, config: AcceleratorConfigType
) -> Callable[[RayValue], UserFunction]:
    def decorate(function: Any) -> UserFunction:
        @functools.wraps(plain(function))
        def call(*args: RayValue, **kwargs: RayValue) -> RayValue:
            return run(function, config, _fn_args=args, **kwargs)

        return call

    return decorate


def _run_tasks(
    call: SliceCall, config: CpuAcceleratorConfig | GpuAcceleratorConfig, settings: SliceSettings
) -> JobStatus:
    """Run `worker_count` tasks at the same time; start none if not all fit."""
    info = JobInfo(config.runtime_name, "running", config.resource_name)
    bundle = config.resources()
    group = ray.util.placement_group([bundle] * config.worker_count, strategy="PACK")
    tasks: list[RayValue] = []
    try:
        placed, _ = ray.wait([group.ready()], timeout=settings.scale_add_seconds_max)
        if not placed:
            raise InsufficientSlicesError(  # noqa: TRY301  # It frees the group, too.
                f"{config.worker_count} tasks with {bundle} each have no room on this cluster"
                f" within {settings.scale_add_seconds_max:g} s (EFORMER_SCALE_ADD_TIMEOUT_S)"
            )
        for index in range(config.worker_count):
            within = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(group, index)
            variables = {**DEVICE_ORDER, **config.execution_env.get("env_vars", {})}
            options = config.with_environment_variables(variables, EXECUTOR_CALL_INDEX=str(index))
            task = ray.remote(max_retries=0)(reporting(call.function))
            started = task.options(**options.get_remote_options(), scheduling_strategy=within)
            tasks.append(started.remote(*call.args, **call.kwargs))
        return JobSucceeded(info, ray.get(tasks))
    except InsufficientSlicesError:
        raise
    except Exception as error:  # noqa: BLE001  # The status has every error.
        return status_of(info, error)
    finally:
        ray.util.remove_placement_group(group)  # Ray kills tasks that still run there.
        outcomes(tasks, settings.drain_seconds_max)


def _until_success(
    attempt: Callable[[], JobStatus],
    preemptions_max: int,
    failures_max: int,
    settings: SliceSettings,
) -> RayValue:
    """Repeat a job until it succeeds, or the limit of failures or preemptions is reached."""
    preemptions = failures = crashes = 0
    trouble: Exception | None = None
    while preemptions < preemptions_max and failures < failures_max:
        began, nodes = time.monotonic(), alive_nodes().keys()
        try:
            status = attempt()
        except InsufficientSlicesError as error:
            preemptions, trouble = preemptions + 1, error
            logger.warning("Too few slices, %s times: %s", preemptions, error)
            time.sleep(settings.scale_retry_seconds)  # No event reports that capacity is back.
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
            time.sleep(pause)  # A reclaimed machine reports that a little later.
        if isinstance(status, JobPreempted) and crashes <= CRASHES_MAX:
            preemptions += 1
            logger.warning("Preempted %s times: %s", preemptions, trouble)
        else:
            failures += 1
            logger.warning("Failed %s times: %s", failures, trouble)
    what = "Preempted" if preemptions >= preemptions_max else "Failed"
    raise RetriesExhaustedError(f"{what} too many times") from trouble
