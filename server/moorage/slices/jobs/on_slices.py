"""Runs a job on all hosts of slices: once, repeatedly, or as calls on slices that stay held."""

import os
from collections.abc import Mapping
from typing import Final

from moorage.slices.errors import HostTaskError, InsufficientSlicesError, RayMissingError
from moorage.slices.jobs.configs import (
    AcceleratorConfigType,
    CpuAcceleratorConfig,
    TpuAcceleratorConfig,
)
from moorage.slices.jobs.statuses import (
    JobError,
    JobInfo,
    JobPreempted,
    JobStatus,
    JobSucceeded,
    status_of,
)
from moorage.slices.manager import SlicePoolManager
from moorage.slices.ray_values import RayValue, UserFunction
from moorage.slices.results import HostCall, cancel, collect
from moorage.slices.settings import SliceSettings
from moorage.slices.tasks import plain
from moorage.slices.waiting import outcomes

_UNKNOWN: Final = "EMPTY"


class SliceCall:
    """A function to run on slices, with its arguments."""

    def __init__(
        self, function: UserFunction, args: tuple[RayValue, ...], kwargs: Mapping[str, RayValue]
    ) -> None:
        self.function = plain(function)
        self.args = args
        self.kwargs = kwargs


class SliceJob:
    """Runs a job on slices, which its pool holds."""

    def __init__(
        self, config: AcceleratorConfigType, settings: SliceSettings, hosts_max: int | None = None
    ) -> None:
        if isinstance(config, CpuAcceleratorConfig):
            raise TypeError("slices have TPUs or GPUs: use 'execute' for CPUs")
        self._config = config
        self._settings = settings
        self._hosts_max = hosts_max
        self._info = JobInfo(config.runtime_name, "running", config.resource_name)
        wanted = config.pod_count
        self._sizes = [wanted] if isinstance(wanted, int) else list(wanted)
        self.pool = SlicePoolManager(shape=config.slices(), settings=settings)

    def once(self, call: SliceCall, *, flatten: bool) -> JobStatus:
        """Run the job once, and release all slices."""
        try:
            return self.attempt(call, flatten=flatten)
        finally:
            self.pool.drain_actor_pool()

    def attempt(self, call: SliceCall, *, flatten: bool) -> JobStatus:
        """Run the job on the slices that are available now."""
        calls: list[list[HostCall]] = []
        try:
            self._scale()
            calls = self._start(call)
            results = self.collect(calls, flatten=flatten)
        except (InsufficientSlicesError, RayMissingError):
            raise
        except HostTaskError as error:
            return self._judge(error, calls)
        except Exception as error:  # noqa: BLE001  # The status has every error.
            self._cancel(calls)
            return status_of(self._info, error)
        except BaseException:
            self._cancel(calls)
            raise
        return JobSucceeded(self._info, results)

    def start(self, call: SliceCall) -> list[list[HostCall]]:
        """Scale to the slices, and start a function on all of their hosts.

        Raises:
            InsufficientSlicesError: Too few slices are available in time.
        """
        if len(self.pool.get_all_pool_members()) not in self._sizes:
            self.pool.scale_multislice(self._sizes)
        return self._start(call)

    def collect(self, calls: list[list[HostCall]], *, flatten: bool) -> list[RayValue]:
        """Return the results; if a task fails, cancel the others.

        Raises:
            HostTaskError: A task failed; the error has the first failure with its slice and host.
        """
        results = collect(calls, None, self._settings.task_cancel_seconds_max)
        return [each for of_slice in results for each in of_slice] if flatten else results

    def _start(self, call: SliceCall) -> list[list[HostCall]]:
        return self.pool.start_on_hosts(
            call.function,
            call.args,
            call.kwargs,
            env=self._variables,
            runtime_env=self._config.execution_env,
            hosts_max=self._hosts_max,
        )

    def _scale(self) -> None:
        """Scale to the job's slices; try to get more than now at most once a minute."""
        sizes = self._sizes
        held = len(self.pool.get_all_pool_members())
        more = self.pool.should_scale_up_multislice(sizes)
        if held not in sizes or not more:
            self.pool.scale_multislice(sizes if held not in sizes else held)
        else:
            self.pool.scale_multislice(
                [size for size in sizes if size >= held], self._settings.scale_poll_seconds
            )

    def _judge(self, error: HostTaskError, calls: list[list[HostCall]]) -> JobStatus:
        """Return the status of the failed job: preempted if one of its hosts is unhealthy."""
        status = status_of(self._info, error)
        if isinstance(status, JobError):
            hosts = [call.host for calls_of_slice in calls for call in calls_of_slice]
            checks = [host.healthy.remote() for host in hosts]
            for answer in outcomes(checks, self._settings.health_check_seconds_max):
                if answer is False or isinstance(answer, Exception):
                    return JobPreempted(self._info, status.error)
        return status

    def _cancel(self, calls: list[list[HostCall]]) -> None:
        """Cancel running tasks whose results no caller awaits any more."""
        every = [call for calls_of_slice in calls for call in calls_of_slice]
        cancel(every, self._settings.drain_seconds_max)

    def _variables(self, index: int, host_id: int) -> dict[str, RayValue]:
        """Return the environment variables of a host, once all slices are prepared."""
        infos = self.pool.multislice_infos()
        members = self.pool.get_all_pool_members()
        config = self._config
        own: dict[str, RayValue] = {}
        if isinstance(config, TpuAcceleratorConfig):
            own["TPU_NAME"] = os.environ.get("TPU_NAME", _UNKNOWN)
            own["TPU_VERSION"] = config.tpu_version
            own["TPU_ZONE"] = os.environ.get("TPU_ZONE", _UNKNOWN)
            own["TPU_POD_COUNT"] = len(members)
        own.update(config.execution_env.get("env_vars", {}))
        own["EXECUTOR_CALL_INDEX"] = host_id
        if len(members) > 1:
            info = infos[index]
            own["MEGASCALE_COORDINATOR_ADDRESS"] = f"{info.coordinator_ip}:{info.port}"
            own["MEGASCALE_NUM_SLICES"] = info.num_slices
            own["MEGASCALE_PORT"] = info.port
            own["MEGASCALE_SLICE_ID"] = info.slice_id
            own["EXECUTOR_CALL_SLICE"] = info.slice_id
            own["TPU_SLICE_NAME"] = members[index].actor_info.slice_name
        return own
