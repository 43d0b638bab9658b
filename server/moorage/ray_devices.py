"""Has Ray give out the devices of a node that a lease holds, where Ray would choose others.

Ray chooses the first devices of a node that are free. So all that are free up to those of the lease
are held, one actor each, then those of the lease are let go, and what is started then takes them.
The backend `ray` and the pools of `slices` do so. The classes travel to the nodes by value.
"""

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

import ray

__all__ = ["DeviceError", "DeviceHolder", "Holders", "device_names", "given_devices"]

FREE_SECONDS_MAX: Final = 10.0
"""How long a device that a lease holds may be in use by others before that is an error."""


class DeviceError(Exception):
    """A device that a lease holds is used by another program of the same Ray cluster."""


class DeviceHolder:
    """Holds one device of a node, or a share of it, while a workload beside it gets others."""

    def devices(self, gpus: Sequence[str]) -> tuple[list[str], list[str]]:
        """Return what Ray gave this actor, and how Ray calls the devices of a lease."""
        return given_devices(), device_names(gpus)

    def leave(self) -> None:
        """End this process: when the caller hears of it, the device is free."""
        ray.actor.exit_actor()  # type: ignore[no-untyped-call]  # Ray has no types for it.


def given_devices() -> list[str]:
    """Return the devices that Ray gave this actor."""
    return list(ray.get_runtime_context().get_accelerator_ids().get("GPU", []))


def device_names(gpus: Sequence[str]) -> list[str]:
    """Return how Ray calls devices: by index, or as the raylet's CUDA_VISIBLE_DEVICES says."""
    worker = ray._private.worker.global_worker  # noqa: SLF001  # Nothing public says it.
    names = (getattr(worker, "original_visible_accelerator_ids", None) or {}).get("GPU")
    return [str(names[int(each)]) if names else str(each) for each in gpus]


class Holders:
    """Actors that hold devices for a moment."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._nodes: dict[str, threading.Lock] = {}
        self._ids: set[str] = set()

    def ids(self) -> set[str]:
        """Return Ray's ids of those that are there now."""
        with self._lock:
            return set(self._ids)

    def exact(self, node: str, gpus: Sequence[str], share: float, take: Callable[[], bool]) -> bool:
        """Have `take` called while the devices of a lease are what Ray chooses first.

        Args:
            node: Ray's id of it.
            gpus: Devices, by index.
            share: Of each of them: 1 is all.
            take: Starts what gets them; returns whether it has.

        Returns:
            What `take` did.

        Raises:
            DeviceError: A device is in use.

        """
        with self._lock:
            turn = self._nodes.setdefault(node, threading.Lock())
        kept: list[Any] = []
        others: list[Any] = []
        with turn:
            try:
                missing: set[str] | None = None
                while missing is None or missing:
                    holder = self._holder(node, share)
                    others.append(holder)
                    seen = _answer(holder.devices.remote(list(gpus)))
                    if seen is None:
                        left = ", ".join(sorted(missing or gpus))
                        raise DeviceError(
                            f"GPU {left} of Ray node {node} is used by others on that cluster"
                        )
                    given, named = seen
                    missing = set(named) if missing is None else missing
                    if given[0] in missing:
                        missing.discard(given[0])
                        kept.append(others.pop())
                self._leave(kept)
                kept = []
                return take()
            finally:
                self._leave([*kept, *others])

    def _holder(self, node: str, share: float) -> Any:
        within = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=False)
        made = ray.remote(DeviceHolder).options(
            num_cpus=0, num_gpus=share, max_restarts=0, scheduling_strategy=within
        )
        holder: Any = made.remote()
        with self._lock:
            self._ids.add(holder._actor_id.hex())  # noqa: SLF001  # No public name for it.
        return holder

    def _leave(self, holders: Sequence[Any]) -> None:
        """End holders; when this returns, their devices are free."""
        leaving = [holder.leave.remote() for holder in holders]
        if leaving:
            ray.wait(leaving, num_returns=len(leaving), timeout=FREE_SECONDS_MAX)
        for holder in holders:
            with contextlib.suppress(Exception):  # It has ended, as it should.
                ray.kill(holder, no_restart=True)
            with self._lock:
                self._ids.discard(holder._actor_id.hex())  # noqa: SLF001  # As above.


def _answer(ref: Any) -> tuple[list[str], list[str]] | None:
    done, _ = ray.wait([ref], timeout=FREE_SECONDS_MAX)
    if not done:
        return None
    answer: tuple[list[str], list[str]] = ray.get(ref)
    return answer
