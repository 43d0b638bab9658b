"""The actor of one host: it runs one task at a time, and reports the health of the host."""

import asyncio
import contextlib
import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from moorage.slices.cluster import draining
from moorage.slices.devices import DEVICE_ORDER, METADATA_SECONDS_MAX, is_reclaimed, release_devices
from moorage.slices.errors import HostUnhealthyError, SlicesError, SliceTimeoutError
from moorage.slices.lazy_ray import RemoteClass, ray
from moorage.slices.ray_values import RayValue, UserFunction
from moorage.slices.records import HostInfo
from moorage.slices.settings import SliceSettings
from moorage.slices.tasks import plain, reporting
from moorage.slices.waiting import Deadline

CALLS_MAX: Final = 100
"""Maximum number of calls that run or wait on a host at a time."""
_CANCEL_SECONDS: Final = 1.0
MEMORY_BYTES: Final = 20e9
"""Bytes of memory for a task whose host is not in a slice's placement group."""

logger: Final = logging.getLogger("ray")


@dataclass(frozen=True)
class HostPlacement:
    """The bundle of a placement group in which a host's tasks run, with their resources."""

    group: RayValue
    bundle: int
    resources: Mapping[str, float]
    environment: Mapping[str, str] = field(default_factory=dict)


class DeviceHost:
    """A host of a slice; `DeviceHostActor` is the actor.

    Args:
        host_id: Index of the host in the slice, from 0.
        slice_name: The name of the slice.
        num_devices: TPU chips or GPUs for each task on this host.
        placement: The slice's reservation on this host; None: tasks take Ray's resource `TPU`.
        settings: Time limits; None: from the environment.
    """

    def __init__(
        self,
        host_id: int,
        slice_name: str,
        num_devices: int | None = None,
        *,
        placement: HostPlacement | None = None,
        settings: SliceSettings | None = None,
    ) -> None:
        self.host_id = host_id
        self.slice_name = slice_name
        self.num_devices = num_devices or 0
        self._placement = placement
        self._settings = settings or SliceSettings.from_environment()
        self._failed = False
        self._task: RayValue = None
        self._ending: asyncio.Task[None] | None = None
        self._calls = self._calls_cancelled = 0
        self._starting = asyncio.Lock()
        self._metadata: asyncio.Task[bool] | None = None
        self._node_id = ray.get_runtime_context().get_node_id()

    async def healthy(self) -> bool:
        """Return whether the host neither failed nor is being preempted."""
        return not self._failed and not await self.is_being_preempted()

    async def is_being_preempted(self) -> bool:
        """Return whether the cloud or Ray reclaims this host; False if unknown after a second."""
        lookup = self._metadata  # Another call may replace the task before this one goes on.
        if lookup is None or lookup.done():
            self._metadata = lookup = asyncio.create_task(asyncio.to_thread(self._is_reclaimed))
        done, _ = await asyncio.wait([lookup], timeout=2 * METADATA_SECONDS_MAX)
        return bool(done) and lookup.result()

    async def get_info(self) -> HostInfo:
        """Return this host's address, resources and health."""
        return HostInfo(
            host_id=self.host_id,
            slice_name=self.slice_name,
            num_devices=self.num_devices,
            healthy=await self.healthy(),
            failed=self._failed,
            node_id=self._node_id,
        )

    async def cancel_current(self) -> None:
        """Cancel the running task, if there is one, and tasks that are about to start.

        Returns when the running task has ended.

        Raises:
            SliceTimeoutError: The task has not ended within `task_cancel_seconds_max`.
        """
        self._calls_cancelled = self._calls
        if self._task is not None:
            await self._end(self._task)

    async def _end(self, task: RayValue) -> None:
        """Cancel a task, and wait until it has ended.

        The cancellation is repeated, since Ray ignores a cancellation while it already interrupts
        the task.
        """
        ended = asyncio.wrap_future(task.future())
        deadline = Deadline(self._settings.task_cancel_seconds_max)
        while not ended.done():
            ray.cancel(task, force=True)
            await asyncio.wait([ended], timeout=min(_CANCEL_SECONDS, deadline.left))
            if not ended.done() and not deadline.left:
                ended.cancel()
                raise SliceTimeoutError(
                    f"{self}: its task has not ended {deadline.seconds:g} s after it was"
                    " cancelled (EFORMER_TASK_CANCEL_TIMEOUT_S)"
                )
        ended.exception()  # Mark as retrieved: the task's caller gets the error.
        if self._task is task:
            self._task = None

    async def shutdown(self) -> None:
        """Cancel the running task, and refuse further tasks."""
        self._failed = True
        await self.cancel_current()

    async def run_remote_fn(
        self,
        remote_fn: UserFunction,
        *,
        f_args: tuple[RayValue, ...] = (),
        f_kwargs: Mapping[str, RayValue] | None = None,
        runtime_env: Mapping[str, RayValue] | None = None,
        env: Mapping[str, RayValue] | None = None,
        num_cpus: float = 0.0,
        memory_bytes: float | None = None,
        extra_resources: Mapping[str, float] | None = None,
        timeout: float | None = None,  # noqa: ASYNC109  # It bounds a task of Ray, not this call.
    ) -> RayValue:
        """Run a function on this host in a new process, and return its result.

        A host runs one task at a time, so this first cancels the previous task. Cancelling this
        call cancels the task.

        Args:
            remote_fn: A function, or Ray's remote function.
            f_args: Positional arguments of the function.
            f_kwargs: Keyword arguments of the function.
            runtime_env: Ray's runtime environment.
            env: Environment variables, which override those of the host.
            num_cpus: CPUs for the task; a slice's placement group must have reserved them.
            memory_bytes: Memory for the task; outside of a placement group 20 GB by default.
            extra_resources: Other resources for the task.
            timeout: Seconds after which the task is cancelled; None: never.

        Raises:
            HostUnhealthyError: The host failed, or is being preempted.
            SliceTimeoutError: The task took longer than `timeout`, or the previous task does not
                end.
            SlicesError: The call was cancelled before its task started.
            ValueError: The task needs resources that the slice has not reserved.
        """
        self._calls += 1
        call = self._calls
        if not await self.healthy():
            raise HostUnhealthyError(
                f"Host {self.host_id} unhealthy or preempted (slice {self.slice_name})"
            )
        async with self._starting:
            if self._task is not None:
                await self._end(self._task)
            if call <= self._calls_cancelled:
                raise SlicesError(f"{self}: cancelled before it started")
            if self._settings.kill_vfio:
                killed = await asyncio.to_thread(release_devices)
                logger.warning("%s: killed %s, which held /dev/vfio", self, killed)
            takes = {**(extra_resources or {}), **({"CPU": num_cpus} if num_cpus else {})}
            if memory_bytes is not None:
                takes["memory"] = memory_bytes
            options = self._options(takes)
            options["runtime_env"] = self._environment(runtime_env, env)
            started = ray.remote(max_calls=1, max_retries=0, num_cpus=0)(_run).options(**options)
            self._task = task = started.remote(plain(remote_fn), *f_args, **(f_kwargs or {}))
        return await self._finish(task, timeout)

    async def _finish(self, task: RayValue, seconds: float | None) -> RayValue:
        """Return the result of a task; cancel it at its time limit, or if its caller is gone."""
        ended = asyncio.wrap_future(task.future())
        try:
            done, _ = await asyncio.wait([ended], timeout=seconds)
        except asyncio.CancelledError:
            self._ending = asyncio.create_task(self._end(task))
            raise
        if not done:
            await self._end(task)
            raise SliceTimeoutError(f"{self}: its task took more than {seconds:g} s")
        if self._task is task:
            self._task = None
        return ended.result()

    def _options(self, takes: Mapping[str, float]) -> dict[str, RayValue]:
        """Return the options of a task: its place and its resources."""
        strategies = ray.util.scheduling_strategies
        place = self._placement
        if place is None:
            chips = {"TPU": self.num_devices} if self.num_devices else {}
            there = strategies.NodeAffinitySchedulingStrategy(self._node_id, soft=False)
            return _task_options({"memory": MEMORY_BYTES, **chips, **takes}, there)
        for name, amount in takes.items():
            if amount > place.resources.get(name, 0):
                raise ValueError(
                    f"{self} holds {dict(place.resources)}, so its tasks cannot take {amount} of"
                    f" {name}: have the pool reserve it with host_resources"
                )
        within = strategies.PlacementGroupSchedulingStrategy(place.group, place.bundle)
        return _task_options(place.resources, within)

    def _environment(
        self, runtime_env: Mapping[str, RayValue] | None, env: Mapping[str, RayValue] | None
    ) -> dict[str, RayValue]:
        """Return the runtime environment of a task, with all its environment variables."""
        merged = dict(runtime_env or {})
        own: dict[str, RayValue] = {"TPU_HOST_ID": self.host_id, "TPU_SLICE_NAME": self.slice_name}
        own |= DEVICE_ORDER
        if self._placement is not None:
            own |= self._placement.environment
        if self.num_devices:
            own["TPU_NUM_DEVICES"] = self.num_devices
        variables = {**own, **merged.get("env_vars", {}), **(env or {})}
        merged["env_vars"] = {
            str(name): str(each) for name, each in variables.items() if each is not None
        }
        return merged

    def _is_reclaimed(self) -> bool:
        return is_reclaimed() or draining(self._node_id)

    def __repr__(self) -> str:
        return f"host {self.host_id} of slice {self.slice_name}"


DeviceHostActor: Final = RemoteClass(DeviceHost, num_cpus=0, max_concurrency=CALLS_MAX)


def _task_options(resources: Mapping[str, float], strategy: RayValue) -> dict[str, RayValue]:
    """Return resources as the options of a task."""
    others = {name: each for name, each in resources.items() if name not in {"CPU", "GPU"}}
    memory = others.pop("memory", 0)
    return {
        "num_cpus": resources.get("CPU", 0),
        "num_gpus": resources.get("GPU", 0),
        "memory": int(memory) or None,
        "resources": others,
        "scheduling_strategy": strategy,
    }


def _run(function: UserFunction, /, *args: RayValue, **kwargs: RayValue) -> RayValue:
    """Call a function in a task's process; then leave the JAX cluster that it joined, if any."""
    try:
        return reporting(function)(*args, **kwargs)
    finally:
        jax = sys.modules.get("jax")
        if jax is not None:
            with contextlib.suppress(Exception):  # The task joined no cluster.
                jax.distributed.shutdown()
