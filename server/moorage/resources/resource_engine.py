"""`ResourceEngine`: provision, acquire, release and end resources across backends.

The library needs no server. Each method works on the class, for the one engine that a process
shares, and on instances, for programs with several engines. Any event loop and any thread may call
any method. Source: docs/reference/resource-engine.md, "Methods" and "Decisions".

`store` starts and ends resources; `pools` records who has a resource and who waits.
"""

import functools
import inspect
import threading
import warnings
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Concatenate, Generic, ParamSpec, TypeVar

from moorage.backends.registry import kinds
from moorage.backends.spec_documents import pool_key
from moorage.backends.specs import BUILT_IN, BaseResourceSpec
from moorage.resources.resources import BaseResource, ResourceStatus, Runner, is_environment
from moorage.resources.runners import LazyRunner, default_runners
from moorage.resources.store import ResourceStore

_P = ParamSpec("_P")
_T = TypeVar("_T")


class _OnClassToo(Generic[_P, _T]):
    """Makes an instance method callable on the class, too: there it uses the shared instance."""

    def __init__(self, method: Callable[Concatenate["ResourceEngine", _P], _T]) -> None:
        functools.update_wrapper(self, method)  # type: ignore[arg-type]  # Copies the docstring.
        self._method = method

    def __get__(
        self, instance: "ResourceEngine | None", owner: type["ResourceEngine"]
    ) -> Callable[_P, _T]:
        bound: Callable[_P, _T] = self._method.__get__(
            owner.shared() if instance is None else instance
        )
        return bound


class ResourceEngine:
    """Starts resources of every backend, stores free ones, and binds acquired ones to ids.

    Args:
        runners: The runners, by the name of their backend; None: those registered at the class.
    """

    _runners: ClassVar[dict[str, Runner]] = dict(default_runners())
    _shared: "ClassVar[ResourceEngine | None]" = None
    _shared_lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, runners: Mapping[str, Runner] | None = None) -> None:
        self._own_runners = runners
        self._categories: dict[tuple[str, str], Runner] = {}
        self._store = ResourceStore()

    @classmethod
    def shared(cls) -> "ResourceEngine":
        """Return the shared engine, which methods of the class use."""
        with cls._shared_lock:
            if cls._shared is None:
                cls._shared = cls()
            return cls._shared

    # The documented methods ------------------------------------------------------------------

    @_OnClassToo
    async def monitor(self, /) -> dict[str, dict[str, int]]:
        """Count resources by pool.

        Returns:
            Name of the pool -> `total`, `free` and `acquired`, for pools that have resources. A
            resource that is being started or ended counts as acquired, as does a resource that an
            id holds, even if it has died. Free resources that have died do not count.
        """
        return await self._store.counts()

    @_OnClassToo
    async def start(
        self, /, spec: BaseResourceSpec, size: int = 1, backend: str = "local", **kwargs: Any
    ) -> None:
        """Make sure that at least `size` resources are free.

        Free resources that have died are replaced. New resources are started in parallel. If
        `max_global_num` allows fewer resources, a Python warning has the wanted and the started
        number.

        Args:
            spec: The spec of the resources.
            size: How many resources should be free.
            backend: The name of the backend.
            **kwargs: `timeout`, in seconds, for the backend's start of each resource; other
                arguments are the runner's own.

        Raises:
            ValueError: The backend does not exist, or an argument is invalid.
            TypeError: The runner has no such argument, or `spec` is not a spec.
            BackendError: A resource could not be started; the started ones are free.
            TimeoutError: A resource was not ready in time; the started ones are free.
        """
        limit = kwargs.pop("timeout", None)
        _check(spec, size=size, timeout=limit)
        runner = self._runner(backend, spec)
        _check_options(runner, kwargs)
        wanted, made = await self._store.stock(spec, backend, runner, size, limit, kwargs)
        if made < wanted:
            key = pool_key(spec, backend)
            reason = (
                f"{key}: {wanted} more resources wanted, {made} created: max_global_num is reached"
            )
            warnings.warn(reason, stacklevel=2)

    @_OnClassToo
    async def acquire(
        self,
        /,
        id: str,  # noqa: A002  # The documented name.
        spec: BaseResourceSpec,
        backend: str = "local",
        timeout: float | None = 600.0,  # noqa: ASYNC109  # The documented name, and the backend's.
        wait_timeout: float | None = None,
    ) -> BaseResource:
        """Bind a resource to an id and return it. The same id gets the same resource.

        A free resource is used if there is one; else a resource is started, if `max_global_num`
        allows; else the caller waits for a release. The caller that has waited longest is served
        first.

        Args:
            id: The name by which later calls find the resource.
            spec: The spec of the resource.
            backend: The name of the backend.
            timeout: Maximum seconds for the start of the resource, without the wait for a slot; a
                free resource that does not answer in this time is replaced.
            wait_timeout: Maximum seconds to wait for a slot; None: no limit.

        Raises:
            ValueError: The backend does not exist, the id has a resource of another spec, or an
                argument is invalid.
            TypeError: `spec` is not a spec.
            BackendError: The resource could not be started.
            TimeoutError: The start took too long, or no resource was released in time.
            EngineClosedError: The engine was closed during the call.
        """
        _check(spec, id=id, timeout=timeout, wait_timeout=wait_timeout)
        return await self._store.acquire(
            id,
            spec,
            backend,
            self._runner(backend, spec),
            timeout_seconds=timeout,
            wait_seconds=wait_timeout,
        )

    @_OnClassToo
    async def release(self, /, id: str) -> None:  # noqa: A002  # The documented name.
        """Make the resource of an id free for other ids. An id without a resource is no error.

        The resource is reset first, as by `reset`. If a user's own class has no reset, its status
        decides whether the resource is fit. A resource that is not fit is ended, and its slot goes
        to the id that has waited longest. A resource that is released during its start becomes free
        when it has started.

        Raises:
            BackendError: The resource was not fit and could not be ended. The resource keeps its
                slot.
        """
        await self._store.release(id)

    @_OnClassToo
    async def reset(self, /, id: str, *args: Any, **kwargs: Any) -> Any:  # noqa: A002  # As above.
        """Reset the resource of an id, and return the result of the reset.

        A process runs its `reset_command`. A container, and a process without that command, is
        stopped and started again: the resource object stays the same, but its files, `endpoint` and
        processes are new.

        Raises:
            ValueError: The id has no resource, or its resource has not started yet.
            NotImplementedError: The resource's class, a user's own, has no `reset`.
            BackendError: The reset failed; end the resource.
        """
        return await self._store.resource(id).reset(*args, **kwargs)

    @_OnClassToo
    async def get_status(self, /, id: str) -> ResourceStatus:  # noqa: A002  # As above.
        """Return the status of the resource of an id.

        Raises:
            ValueError: The id has no resource, or its resource has not started yet.
        """
        return await self._store.resource(id).get_status()

    @_OnClassToo
    async def control(self, /, id: str, **kwargs: Any) -> None:  # noqa: A002  # As above.
        """Change limits of the resource of an id.

        Raises:
            ValueError: The id has no resource, or its resource has not started yet.
            BackendError: This kind of resource lacks a limit; the message names it.
        """
        await self._store.resource(id).control(**kwargs)

    @_OnClassToo
    async def end(self, /, id: str) -> None:  # noqa: A002  # As above.
        """End the resource of an id. The caller that has waited longest gets its slot.

        Raises:
            BackendError: The resource could not be ended. The resource keeps its slot.
        """
        await self._store.end(id)

    @_OnClassToo
    async def close(self, /) -> None:
        """End all resources, and wake waiters with an error. The engine can be used again.

        Raises:
            BackendError: Some resources could not be ended; the message names them.
        """
        await self._store.close()

    @_OnClassToo
    def register(self, /, category: str, runner: Runner, backend: str = "local") -> None:
        """Register a user's runner for specs of a user's category.

        Args:
            category: The category of the specs, as in `ContainerResourceSpec(category=…)`.
            runner: The runner that starts and ends the resources of these specs.
            backend: The name of the backend; each backend has runners of its own.

        Raises:
            ValueError: The category is one of Moorage's own.
            TypeError: `runner` is not a runner.
        """
        if not category or category in BUILT_IN:
            raise ValueError(f"category: expected one of your own; {category!r} is Moorage's")
        if not isinstance(runner, Runner):
            raise TypeError(f"runner: expected a Runner, not {type(runner).__name__}")
        self._categories[category, backend] = runner

    def _runner(self, backend: str, spec: BaseResourceSpec) -> Runner:
        known = self._categories
        if self._own_runners is None:
            known = {**self.shared()._categories, **known}  # noqa: SLF001  # Of this class.
        if own := known.get((spec.category, backend)):
            return own
        runners = self._runners if self._own_runners is None else self._own_runners
        runner = runners.get(backend)
        if runner is None:
            names = ", ".join(sorted(runners)) or "none"
            raise ValueError(
                f"there is no backend {backend!r} here; available: {names}{_remedy(backend)}"
            )
        unknown = spec.category != type(spec).category and not is_environment(spec)
        if isinstance(runner, LazyRunner) and unknown:
            how = f"ResourceEngine.register({spec.category!r}, runner, {backend!r})"
            reason = f"there is no runner for the category {spec.category!r} at {backend}"
            raise ValueError(f"{reason}; register a runner with {how}")
        return runner


def _check_options(runner: Runner, options: Mapping[str, Any]) -> None:
    """Refuse a keyword that the runner does not know."""
    _, _, *known = inspect.signature(runner.start_resource).parameters.values()
    if any(each.kind is each.VAR_KEYWORD for each in known):
        return
    names = [each.name for each in known]
    for name in options:
        if name not in names:
            reason = f"the runner of {runner.name} knows no argument {name!r}"
            raise TypeError(f"{reason}; it knows: {', '.join(names)}")


def _remedy(backend: str) -> str:
    """Return advice for a documented backend that is not available."""
    for kind in kinds().values():
        if backend in kind.engine_names and not kind.installed:
            return f". It needs {kind.package}: {kind.install_command}"
    return ""  # Not a documented backend, or this engine was created without it.


def _check(spec: Any, *, id: Any = "-", size: Any = 0, **seconds: Any) -> None:  # noqa: A002  # As above.
    """Refuse wrong arguments, which would otherwise fail later with a less clear error."""
    if not isinstance(spec, BaseResourceSpec):
        raise TypeError(f"spec: expected a BaseResourceSpec, not {type(spec).__name__}")
    if not (isinstance(id, str) and id):
        raise ValueError(f"id: expected a text that is not empty, not {id!r}")
    if not (isinstance(size, int) and size >= 0):
        raise ValueError(f"size: expected a number from 0 on, not {size!r}")
    for name, value in seconds.items():
        if not (value is None or (isinstance(value, int | float) and value >= 0)):
            raise ValueError(f"{name}: expected seconds from 0 on, or None, not {value!r}")
