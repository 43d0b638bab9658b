"""`ResourceEngine`: provision, acquire, release and end resources across backends.

A library that stands on its own. Every method is there twice: on the class, for the engine that all
of a process share, and on instances, for those who want several. All of them may be called from any
event loop and any thread. Source:
docs/reference/resource-engine.md, "Methods" and "Decisions".

`store` does the work and `pools` keeps its books.
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
    """A method of an instance that, called on the class, works on the shared instance."""

    def __init__(self, method: Callable[Concatenate["ResourceEngine", _P], _T]) -> None:
        functools.update_wrapper(self, method)  # type: ignore[arg-type]  # For its docstring.
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
        runners: By the name of their backend; those of the class where not given.
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
            Name of the pool -> `total`, `free` and `acquired`, for pools that have any. A resource
            that is being made or ended counts as acquired, as does a resource that an id holds,
            even if it has died. Free ones that have died do not count.
        """
        return await self._store.counts()

    @_OnClassToo
    async def start(
        self, /, spec: BaseResourceSpec, size: int = 1, backend: str = "local", **kwargs: Any
    ) -> None:
        """Make sure that at least `size` resources are free.

        Free ones that have died are replaced. They are made side by side. Where `max_global_num`
        leaves room for fewer, a warning says how many were wanted and made.

        Args:
            spec: What to make.
            size: How many shall be free.
            backend: Where.
            **kwargs: `timeout`, in seconds, for the backend's start of each; the others are the
                runner's own.

        Raises:
            ValueError: There is no such backend, or an argument is not what it must be.
            TypeError: The runner knows no such argument, or `spec` is none.
            BackendError: One could not be made. Those that could are free.
            TimeoutError: Nor could one in time.
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

        A free one is taken where there is one; else one is made, if `max_global_num` allows; else
        the caller waits for one to be released. The longest waiting is served first.

        Args:
            id: Names the resource from now on.
            spec: What is wanted.
            backend: Where.
            timeout: Seconds for the backend's start only.
            wait_timeout: Seconds to wait for a slot; None for as long as it takes.

        Raises:
            ValueError: There is no such backend, the id has a resource of another spec, or an
                argument is not what it must be.
            TypeError: `spec` is no spec.
            BackendError: It could not be made.
            TimeoutError: Nor in time, or nothing was released in time.
            EngineClosedError: The engine was closed meanwhile.
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
        """Return the resource of an id to the store. An id without a resource is no error.

        It is reset first, as `reset` does; one of a user's own kind that cannot be is looked at.
        A resource that cannot be reset is ended, and its slot goes to the id that has waited
        longest. Released while it is being made, it is free as soon as it is made.

        Raises:
            BackendError: It was not fit, and could not be ended either. It keeps its slot.
        """
        await self._store.release(id)

    @_OnClassToo
    async def reset(self, /, id: str, *args: Any, **kwargs: Any) -> Any:  # noqa: A002  # As above.
        """Reset the resource of an id, and return its answer.

        A process runs its `reset_command`. One that has none, and a container, is stopped and
        started again: it is the same resource, and its files, its `endpoint` and what runs in it
        are new.

        Raises:
            ValueError: The id has no resource, or not yet.
            NotImplementedError: It is of a user's own kind, which has no `reset`.
            BackendError: It could not be; end it.
        """
        return await self._store.resource(id).reset(*args, **kwargs)

    @_OnClassToo
    async def get_status(self, /, id: str) -> ResourceStatus:  # noqa: A002  # As above.
        """Return the status of the resource of an id.

        Raises:
            ValueError: The id has no resource, or not yet.
        """
        return await self._store.resource(id).get_status()

    @_OnClassToo
    async def control(self, /, id: str, **kwargs: Any) -> None:  # noqa: A002  # As above.
        """Change limits of the resource of an id.

        Raises:
            ValueError: The id has no resource, or not yet.
            BackendError: It names the limit that this kind does not have.
        """
        await self._store.resource(id).control(**kwargs)

    @_OnClassToo
    async def end(self, /, id: str) -> None:  # noqa: A002  # As above.
        """End the resource of an id. The longest waiting caller gets its slot.

        Raises:
            BackendError: It could not be ended. It keeps its slot.
        """
        await self._store.end(id)

    @_OnClassToo
    async def close(self, /) -> None:
        """End all resources, and wake waiters with an error. The engine can be used again.

        Raises:
            BackendError: It names what could not be ended.
        """
        await self._store.close()

    @_OnClassToo
    def register(self, /, category: str, runner: Runner, backend: str = "local") -> None:
        """Register a user's runner for specs of a user's category.

        Args:
            category: What such specs are made with, as `ContainerResourceSpec(category=…)`.
            runner: Who makes and ends their resources.
            backend: Where; each has its own.

        Raises:
            ValueError: The category is one of Moorage's own.
            TypeError: The runner is none.
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
            raise ValueError(f"{reason}; give one with {how}")
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
    return ""  # No documented one, or this engine was made without it.


def _check(spec: Any, *, id: Any = "-", size: Any = 0, **seconds: Any) -> None:  # noqa: A002  # As above.
    """Refuse arguments that would only fail later, with a less clear error."""
    if not isinstance(spec, BaseResourceSpec):
        raise TypeError(f"spec: expected a BaseResourceSpec, not {type(spec).__name__}")
    if not (isinstance(id, str) and id):
        raise ValueError(f"id: expected a text that is not empty, not {id!r}")
    if not (isinstance(size, int) and size >= 0):
        raise ValueError(f"size: expected a number from 0 on, not {size!r}")
    for name, value in seconds.items():
        if not (value is None or (isinstance(value, int | float) and value >= 0)):
            raise ValueError(f"{name}: expected seconds from 0 on, or None, not {value!r}")
