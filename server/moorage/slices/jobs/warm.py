"""Functions and classes whose calls run on slices that stay allocated between calls."""

import functools
from collections.abc import Callable
from typing import Any

from moorage.slices.jobs.configs import AcceleratorConfigType
from moorage.slices.jobs.on_slices import SliceCall, SliceJob
from moorage.slices.ray_values import RayValue, UserFunction
from moorage.slices.settings import SliceSettings


def device_remote(
    *, accelerator_config: AcceleratorConfigType, flatten: bool = True
) -> Callable[[RayValue], RayValue]:
    """Decorate a function or class so that its calls run on all hosts of `pod_count` slices.

    The first call allocates the slices. The slices stay allocated for later calls until `close()`;
    a lost slice is replaced. A call returns the results of all hosts; `remote` returns references
    instead. Each task has a process of its own: a call of a method creates the object in that
    process again. A call cancels tasks of the previous call that still run.

    Args:
        accelerator_config: The slices, as `pod_count` and the resources of each.
        flatten: Whether the results are one list, rather than a list for each slice.
    """

    def decorate(decorated: Any) -> RayValue:
        if not callable(getattr(decorated, "_function", decorated)):
            raise TypeError(f"device_remote takes a function or a class, not {decorated!r}")
        warm = _Warm(accelerator_config, flatten)
        if not isinstance(decorated, type):
            return functools.wraps(getattr(decorated, "_function", decorated))(
                _WarmFunction(warm, decorated)
            )

        @functools.wraps(decorated, updated=())
        def make(*args: RayValue, **kwargs: RayValue) -> _WarmObject:
            return _WarmObject(warm, decorated, args, kwargs)

        make.close = warm.close  # type: ignore[attr-defined]  # A function has attributes.
        return make

    return decorate


class _Warm:
    """Runs the calls of one decorated function or class on slices that stay allocated."""

    def __init__(self, config: AcceleratorConfigType, flatten: bool) -> None:
        self._config = config
        self._flatten = flatten
        self._job: SliceJob | None = None

    def start(self, call: SliceCall) -> list[RayValue]:
        """Start a call, and return references."""
        nested = [[each.ref for each in hosts] for hosts in self._open().start(call)]
        return [ref for refs in nested for ref in refs] if self._flatten else nested

    def run(self, call: SliceCall) -> list[RayValue]:
        job = self._open()
        return job.collect(job.start(call), flatten=self._flatten)

    def close(self) -> None:
        """Release all slices; the next call allocates new ones."""
        job, self._job = self._job, None
        if job is not None:
            job.pool.drain_actor_pool()

    def _open(self) -> SliceJob:
        if self._job is None:
            self._job = SliceJob(self._config, SliceSettings.from_environment())
        return self._job


class _WarmFunction:
    """A function, or a method of an object, that runs on slices."""

    def __init__(self, warm: _Warm, function: UserFunction, *before: RayValue) -> None:
        self._warm = warm
        self._warm_function = function
        self._before = before

    def __call__(self, *args: RayValue, **kwargs: RayValue) -> list[RayValue]:
        return self._warm.run(self._call(args, kwargs))

    def remote(self, *args: RayValue, **kwargs: RayValue) -> list[RayValue]:
        """Start the function on all hosts, and return references."""
        return self._warm.start(self._call(args, kwargs))

    def close(self) -> None:
        self._warm.close()

    def _call(self, args: tuple[RayValue, ...], kwargs: dict[str, RayValue]) -> SliceCall:
        if self._before:
            return SliceCall(self._warm_function, (*self._before, args, kwargs), {})
        return SliceCall(self._warm_function, args, kwargs)


class _WarmObject:
    """A stand-in for an object: at each call of a method, each host creates the object."""

    def __init__(
        self, warm: _Warm, of: type, args: tuple[RayValue, ...], kwargs: dict[str, RayValue]
    ) -> None:
        self._warm = warm
        self._made = of, args, kwargs

    def __getattr__(self, name: str) -> _WarmFunction:
        if name.startswith("_") or not callable(getattr(self._made[0], name, None)):
            raise AttributeError(f"{self._made[0].__name__} has no method {name!r}")

        def method(
            of: type,
            made: tuple[RayValue, ...],
            with_: dict[str, RayValue],
            args: RayValue,
            kwargs: RayValue,
        ) -> RayValue:
            return getattr(of(*made, **with_), name)(*args, **kwargs)

        return _WarmFunction(self._warm, method, *self._made)

    def close(self) -> None:
        self._warm.close()
