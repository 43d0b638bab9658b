"""Resources, which `ResourceEngine` returns, and runners, which start resources.

A runner starts and ends the resources of one backend. `BackendRunner` is the runner for any
`Backend`; users may register runners of their own.
"""

import abc
import asyncio
import contextlib
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Final, NoReturn, Protocol, Self, runtime_checkable

from moorage.backends.base import (
    LOG_TAIL_LINES,
    Backend,
    BackendError,
    Log,
    Order,
    Phase,
    UnknownWorkloadError,
    UnsupportedSpecError,
    WorkloadReport,
)
from moorage.backends.completion import finish
from moorage.backends.specs import (
    ENVIRONMENTS,
    BaseResourceSpec,
    ContainerResourceSpec,
    ProcessResourceSpec,
    ServiceResourceSpec,
)

SETTLE_LOOKS: Final = 10
"""Number of checks (about half a second) after a start; a workload that ends meanwhile failed."""
SETTLE_SECONDS_MAX: Final = 30.0
"""Maximum seconds for the checks of `SETTLE_LOOKS`."""
_SETTLE_PAUSE_SECONDS: Final = 0.05
_TAIL_BYTES: Final = 16 * 1024


class ResourceStatus(StrEnum):
    """The status of a resource."""

    PENDING = "pending"
    RUNNING = "running"
    SUCCESS = "success"
    FAILED = "failed"
    STOPPED = "stopped"


_STATUS: Final[Mapping[Phase, ResourceStatus]] = {
    Phase.PENDING: ResourceStatus.PENDING,
    Phase.PULLING: ResourceStatus.PENDING,
    Phase.STARTING: ResourceStatus.PENDING,
    Phase.READY: ResourceStatus.RUNNING,
    Phase.LOST: ResourceStatus.RUNNING,
    Phase.SUCCEEDED: ResourceStatus.SUCCESS,
    Phase.FAILED: ResourceStatus.FAILED,
    Phase.STOPPED: ResourceStatus.STOPPED,
}


class BaseResource(abc.ABC):
    """A running resource. Source: docs/reference/resource-engine.md, "Resources"."""

    @property
    @abc.abstractmethod
    def resource_id(self) -> str:
        """The name of the resource; it is the same for all users of the resource."""

    @property
    @abc.abstractmethod
    def category(self) -> str:
        """The category of the resource's spec."""

    async def start(self) -> None:  # noqa: B027  # Most runners return started resources.
        """Start the resource, unless its runner has started it."""

    async def reset(self, *args: Any, **kwargs: Any) -> Any:
        """Reset the resource for its next user.

        Raises:
            NotImplementedError: This kind of resource has no reset.
        """
        raise NotImplementedError(  # Not abstract: a kind without a reset may be used, too.
            f"a {self.category} resource cannot be reset: end it and acquire another, or give its"
            " class a reset()"
        )

    @abc.abstractmethod
    async def get_status(self) -> ResourceStatus:
        """Return the status of the resource."""

    async def control(self, **kwargs: Any) -> None:
        """Change limits of the resource.

        Raises:
            UnsupportedSpecError: This kind of resource lacks a limit; the message names it.
        """
        if kwargs:
            names = ", ".join(sorted(kwargs))
            raise UnsupportedSpecError(f"a {self.category} resource has no limit named {names}")

    @abc.abstractmethod
    async def end(self) -> None:
        """End the resource; a second call does nothing."""

    async def close(self) -> None:
        """End the resource: another name of `end`."""
        await self.end()


@runtime_checkable
class Runner(Protocol):
    """Starts and ends the resources of one backend, for `ResourceEngine`."""

    @property
    def name(self) -> str:
        """The name of the backend."""

    async def start_resource(
        self,
        spec: BaseResourceSpec,
        resource_id: str | None = None,
        timeout: float | None = None,  # noqa: ASYNC109  # The documented name; the runner bounds the start.
    ) -> BaseResource:
        """Start a resource and wait until it is ready, at most `timeout` seconds.

        If the call is cancelled or fails, no part of the resource stays. A runner may have further
        arguments of its own, which `ResourceEngine.start` passes on.

        Raises:
            TimeoutError: The resource was not ready in time.
        """

    async def end_resource(self, resource: BaseResource) -> None:
        """End a resource; a second call does nothing."""

    async def get_status(self, resource: BaseResource) -> ResourceStatus:
        """Return the status of a resource."""


BaseRunner = Runner
"""The documented name of `Runner`."""


class CommandOutput(str):
    """The output of a command: a `str` with the command's exit code.

    Args:
        text: The output that the command wrote.
        exit_code: 0 if the command succeeded; a negative code is a signal's number, negated.
    """

    __slots__ = ("exit_code",)

    exit_code: int

    def __new__(cls, text: str, exit_code: int) -> Self:
        """Make an instance: a `str` gets its text before `__init__`."""
        made = super().__new__(cls, text)
        made.exit_code = exit_code
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        """Return the arguments for a copy."""
        return type(self), (str(self), self.exit_code)


@dataclass(frozen=True, slots=True)
class _Renewal:
    """A reset of a `BackendResource` that is in progress: its task and event loop."""

    loop: asyncio.AbstractEventLoop
    task: asyncio.Task[Any]
    over: Future[None] = field(default_factory=Future[None])


class BackendResource(BaseResource):
    """A resource that is a workload of a backend.

    Args:
        backend: The backend.
        spec: The spec from which the resource was started.
        workload: The backend's report when the workload was ready.
        resource_id: The resource's name; None: the workload's id.
        timeout_seconds: Maximum seconds for a start that a reset causes; None: the backend's own
            limit.
    """

    def __init__(
        self,
        backend: Backend,
        spec: BaseResourceSpec,
        workload: WorkloadReport,
        resource_id: str | None = None,
        timeout_seconds: float | None = None,
    ) -> None:
        self._backend = backend
        self._timeout_seconds = timeout_seconds
        self._attempt = 1
        self._changed = False
        self._ended = False
        self._lock = threading.Lock()
        self._renewal: _Renewal | None = None
        self.spec = spec
        self.endpoint = workload.endpoint
        self._id = workload.id
        self._resource_id = resource_id or workload.id

    @property
    def resource_id(self) -> str:
        """The id for which the resource was first acquired, or the workload's own id."""
        return self._resource_id

    @property
    def category(self) -> str:
        """The category of the resource's spec."""
        return self.spec.category

    async def reset(self, *args: Any, **kwargs: Any) -> Any:
        """Reset the resource: by the backend's own method, or else by a new start.

        Raises:
            TypeError: Arguments are given, but workloads are reset without arguments.
            BackendError: The reset failed; the resource must not be used again.
            TimeoutError: The reset took too long; the resource must not be used again.
        """
        if args or kwargs:
            raise TypeError(f"a {self.category} resource is reset without arguments")
        with self._lock:
            if self._ended or self._renewal is not None:
                how = "was ended" if self._ended else "is being reset already"
                raise BackendError(f"{self.resource_id} {how}")
            task = asyncio.ensure_future(self._renew())
            renewal = self._renewal = _Renewal(asyncio.get_running_loop(), task)
        try:
            return await task
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if not self._ended or (caller is not None and caller.cancelling()):
                raise
            raise BackendError(f"{self.resource_id} was ended while it was reset") from None
        finally:
            self._renewal = None
            renewal.over.set_result(None)

    async def _renew(self) -> Any:
        if not self._changed:  # After `control`, limits differ from the spec's.
            with contextlib.suppress(UnsupportedSpecError):
                return await self._backend.reset(self._id)
        await self._backend.stop(self._id)
        self._attempt += 1
        order = Order(
            self._id, plain(self.spec), timeout_seconds=self._timeout_seconds, attempt=self._attempt
        )
        workload = await self._backend.start(order)
        if workload.phase.over:
            await finish(self._backend.stop(self._id))
            how = workload.detail or workload.phase
            raise BackendError(f"{self.resource_id} ended while it was reset: {how}")
        self._changed = False
        self.endpoint = workload.endpoint
        return None

    async def get_status(self) -> ResourceStatus:
        """Return the status of the resource; a service is probed.

        A workload that does not answer is pending; an unknown workload has stopped.
        """
        try:
            workload = await self._backend.probe(self._id)
        except UnknownWorkloadError:
            return ResourceStatus.STOPPED
        return _STATUS[workload.phase]

    async def control(self, **kwargs: Any) -> None:
        """Change limits of the running resource, all or none."""
        await self._backend.control(self._id, kwargs)
        self._changed = True

    async def end(self) -> None:
        """Stop the resource. First cancel its reset, which may start it again."""
        with self._lock:
            self._ended = True
            renewal = self._renewal
        if renewal is not None:
            with contextlib.suppress(RuntimeError):  # A closed loop has no tasks to cancel.
                renewal.loop.call_soon_threadsafe(renewal.task.cancel)
                await asyncio.wrap_future(renewal.over)
        await self._backend.stop(self._id)

    async def run_cmd(
        self,
        cmd: str,
        timeout: float | None = None,  # noqa: ASYNC109  # The documented name.
        workdir: str | None = None,
        user: str | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> CommandOutput:
        """Run a shell command in the resource; return the output, which has an `exit_code`.

        Of a long output, only the first MiB is returned (AWS: the first 24,000 characters).

        Raises:
            TimeoutError: The command took longer than `timeout` seconds, and was killed.
        """
        done = await self._backend.execute(
            self._id,
            ("/bin/sh", "-c", cmd),
            timeout_seconds=timeout,
            workdir=workdir,
            user=user,
            environment=environment,
        )
        return CommandOutput(done.output, done.exit_code)

    async def logs(self, offset: int = 0) -> Log:
        """Read the resource's output from a byte offset; a negative offset counts from the end."""
        return await self._backend.logs(self._id, offset)


class ContainerResource(BackendResource):
    """A resource that is a container."""


class BackendRunner:
    """Starts resources at one backend.

    Args:
        backend: The backend.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend = backend

    @property
    def name(self) -> str:
        """The name of the backend."""
        return self.backend.name

    async def start_resource(
        self,
        spec: BaseResourceSpec,
        resource_id: str | None = None,
        timeout: float | None = None,  # noqa: ASYNC109  # The documented name: it is the runner's.
    ) -> BaseResource:
        """Start a workload and wait until it is ready; see `Runner`.

        Raises:
            BackendError: The workload did not start, or ended at once; no part of it is left.
            TimeoutError: The workload was not ready in time; no part of it is left.
        """
        # The name is unique, since a user may reuse an id whose former resource is still in the
        # store.
        name = f"{resource_id or 'free'}-{uuid.uuid4().hex[:12]}"
        limits = [each for each in (timeout, spec.limit_seconds) if each is not None]
        limit = min(limits) if limits else None
        order = Order(name, plain(spec), timeout_seconds=limit)
        self.backend.refuse(order.spec)
        workload = await self.backend.start(order)
        try:
            if _settles(spec):
                workload = await self._check_settled(workload)
            if workload.phase.over:
                await self._refuse(workload)
        except BaseException:
            with contextlib.suppress(UnknownWorkloadError):
                await finish(self.backend.stop(name))
            raise
        return self.resource_kind(spec)(self.backend, spec, workload, resource_id, limit)

    async def _check_settled(self, workload: WorkloadReport) -> WorkloadReport:
        """Check for a moment that a workload without a readiness check keeps running."""
        begun, looks = time.monotonic(), 0
        while not workload.phase.over:
            # Count the checks, not the time: on a slow machine, a failing program also ends later.
            looks += workload.phase is Phase.READY
            if looks > SETTLE_LOOKS or time.monotonic() - begun > SETTLE_SECONDS_MAX:
                break
            pause = _SETTLE_PAUSE_SECONDS
            await asyncio.sleep(pause)
            workload = await self.backend.probe(workload.id)
        return workload

    async def _refuse(self, workload: WorkloadReport) -> NoReturn:
        """Raise an error for a workload that ended at once, with its exit code and output."""
        lines: Sequence[str] = workload.log_tail
        if not lines and self.backend.support.logs:
            log = await self.backend.logs(workload.id, -_TAIL_BYTES)
            lines = log.text.splitlines()[-LOG_TAIL_LINES:]
        reason = f"it ended at once: {workload.detail or workload.phase}"
        reason += "; expected a program that keeps running. Its output"
        raise BackendError("\n".join([f"{reason}:", *lines]) if lines else f"{reason}: none.")

    def resource_kind(self, spec: BaseResourceSpec) -> type[BackendResource]:
        """Return the class of the resource that a started workload becomes."""
        return ContainerResource if isinstance(spec, ContainerResourceSpec) else BackendResource

    async def end_resource(self, resource: BaseResource) -> None:
        """Stop a resource."""
        await resource.end()

    async def get_status(self, resource: BaseResource) -> ResourceStatus:
        """Return the status of the resource."""
        return await resource.get_status()


def is_environment(spec: BaseResourceSpec) -> bool:
    """Return whether a spec's category is that of an environment, such as `webshop`."""
    return isinstance(spec, ContainerResourceSpec) and spec.category in ENVIRONMENTS


def plain(spec: BaseResourceSpec) -> BaseResourceSpec:
    """Return the spec for backends: an environment's spec becomes that of a container."""
    return replace(spec, category="container") if is_environment(spec) else spec


def _settles(spec: BaseResourceSpec) -> bool:
    """Return whether a spec has no readiness check, so that its workload is ready when it runs."""
    if isinstance(spec, ContainerResourceSpec):
        return spec.readiness is None
    return isinstance(spec, ProcessResourceSpec) and not isinstance(spec, ServiceResourceSpec)
