"""What `ResourceEngine` hands out, and who makes it: resources and runners.

A runner makes and ends resources of one backend. `BackendRunner` is one over any `Backend`; a user
may put others into the backend's registry, for backends of their own.
"""

import abc
import contextlib
import uuid
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Final, Protocol, runtime_checkable

from moorage.backends.base import (
    Backend,
    BackendError,
    Log,
    Order,
    Phase,
    UnknownWorkloadError,
    UnsupportedSpecError,
    WorkloadReport,
)
from moorage.backends.specs import BaseResourceSpec

__all__ = ["BackendResource", "BackendRunner", "BaseResource", "ResourceStatus", "Runner"]


class ResourceStatus(StrEnum):
    """How a resource is."""

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
    Phase.SUCCEEDED: ResourceStatus.SUCCESS,
    Phase.FAILED: ResourceStatus.FAILED,
    Phase.STOPPED: ResourceStatus.STOPPED,
}


class BaseResource(abc.ABC):
    """One thing that runs. Source: docs/reference/resource-engine.md, "Resources"."""

    @property
    @abc.abstractmethod
    def resource_id(self) -> str:
        """Its own name, whoever uses it."""

    @property
    @abc.abstractmethod
    def category(self) -> str:
        """The kind of its spec."""

    async def start(self) -> None:  # noqa: B027  # Most runners hand out what runs already.
        """Start it, where its runner has not."""

    async def reset(self, *args: Any, **kwargs: Any) -> Any:
        """Make it as new.

        Raises:
            NotImplementedError: This kind cannot be.

        """
        raise NotImplementedError(f"a {self.category} resource cannot be reset")

    @abc.abstractmethod
    async def get_status(self) -> ResourceStatus:
        """Return how it is now."""

    async def control(self, **kwargs: Any) -> None:
        """Change its limits.

        Raises:
            UnsupportedSpecError: It names the limit that this kind does not have.

        """
        if kwargs:
            names = ", ".join(sorted(kwargs))
            raise UnsupportedSpecError(f"a {self.category} resource has no limit named {names}")

    @abc.abstractmethod
    async def end(self) -> None:
        """End it; a second time does nothing."""

    async def close(self) -> None:
        """End it: another name of `end`."""
        await self.end()


@runtime_checkable
class Runner(Protocol):
    """Makes and ends the resources of one backend."""

    @property
    def name(self) -> str:
        """The backend's name."""

    async def start_resource(
        self,
        spec: BaseResourceSpec,
        resource_id: str | None = None,
        timeout: float | None = None,  # noqa: ASYNC109  # The documented name: it is the runner's.
    ) -> BaseResource:
        """Make a resource and wait until it is ready, at most `timeout` seconds.

        Cancelled, or failing, it leaves nothing behind.

        Raises:
            TimeoutError: It was not ready in time.

        """

    async def end_resource(self, resource: BaseResource) -> None:
        """End a resource; a second time does nothing."""

    async def get_status(self, resource: BaseResource) -> ResourceStatus:
        """Return how a resource is now."""


class BackendResource(BaseResource):
    """A workload of a backend.

    Args:
        backend: The backend.
        spec: What it was made from.
        workload: What the backend said when it was ready.
        resource_id: Its name; the workload's own where not given.

    """

    def __init__(
        self,
        backend: Backend,
        spec: BaseResourceSpec,
        workload: WorkloadReport,
        resource_id: str | None = None,
    ) -> None:
        self._backend = backend
        self.spec = spec
        self.endpoint = workload.endpoint
        self._id = workload.id
        self._resource_id = resource_id or workload.id

    @property
    def resource_id(self) -> str:
        """The id it was first acquired under, or the workload's own name."""
        return self._resource_id

    @property
    def category(self) -> str:
        """The kind of its spec."""
        return self.spec.category

    async def reset(self, *args: Any, **kwargs: Any) -> Any:
        """Make it as new, and return what the backend says to that.

        Raises:
            TypeError: Workloads are reset without arguments.
            NotImplementedError: This kind cannot be.
            BackendError: It could not be, and must not be used again.

        """
        if args or kwargs:
            raise TypeError(f"a {self.category} resource is reset without arguments")
        try:
            return await self._backend.reset(self._id)
        except UnsupportedSpecError as error:
            raise NotImplementedError(str(error)) from error

    async def get_status(self) -> ResourceStatus:
        """Return how it is now; a service is asked whether it answers.

        One that does not is pending; what nobody knows any more has stopped.
        """
        try:
            workload = await self._backend.probe(self._id)
        except UnknownWorkloadError:
            return ResourceStatus.STOPPED
        return _STATUS[workload.phase]

    async def control(self, **kwargs: Any) -> None:
        """Change its limits while it runs, all or none."""
        await self._backend.control(self._id, kwargs)

    async def end(self) -> None:
        """Stop it."""
        await self._backend.stop(self._id)

    async def run_cmd(
        self,
        cmd: str,
        timeout: float | None = None,  # noqa: ASYNC109  # The documented name.
        workdir: str | None = None,
        user: str | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> str:
        """Run a line of shell inside of it and return what it wrote.

        Raises:
            TimeoutError: It took longer than `timeout` seconds, and was killed.

        """
        done = await self._backend.execute(
            self._id,
            ("/bin/sh", "-c", cmd),
            timeout_seconds=timeout,
            workdir=workdir,
            user=user,
            environment=environment,
        )
        return done.output

    async def logs(self, offset: int = 0) -> Log:
        """Read what it wrote, from a byte offset on; a negative one counts from the end."""
        return await self._backend.logs(self._id, offset)


class BackendRunner:
    """Makes resources at one backend.

    Args:
        backend: The backend.

    """

    def __init__(self, backend: Backend) -> None:
        self.backend = backend

    @property
    def name(self) -> str:
        """The backend's name."""
        return self.backend.name

    async def start_resource(
        self,
        spec: BaseResourceSpec,
        resource_id: str | None = None,
        timeout: float | None = None,  # noqa: ASYNC109  # The documented name: it is the runner's.
    ) -> BaseResource:
        """Start a workload and wait until it is ready; see `Runner`.

        Raises:
            BackendError: It did not start, or ended at once; nothing of it is left.
            TimeoutError: It was not ready in time; nothing of it is left.

        """
        # A user's id may come again while what it had lives on in the free store, under its name.
        name = f"{resource_id or 'free'}-{uuid.uuid4().hex[:12]}"
        limits = [each for each in (timeout, spec.limit_seconds) if each is not None]
        order = Order(name, spec, timeout_seconds=min(limits) if limits else None)
        self.backend.refuse(spec)
        workload = await self.backend.start(order)
        if workload.phase.over:
            with contextlib.suppress(UnknownWorkloadError):
                await self.backend.stop(name)
            raise BackendError(f"it ended at once: {workload.detail or workload.phase}")
        return self.resource(spec, workload, resource_id)

    def resource(
        self, spec: BaseResourceSpec, workload: WorkloadReport, resource_id: str | None
    ) -> BackendResource:
        """Return what a started workload is to its user."""
        return BackendResource(self.backend, spec, workload, resource_id)

    async def end_resource(self, resource: BaseResource) -> None:
        """Stop it."""
        await resource.end()

    async def get_status(self, resource: BaseResource) -> ResourceStatus:
        """Return how it is now."""
        return await resource.get_status()
