"""Makes Ray assign the devices that a lease holds, although Ray would choose other devices.

Ray assigns the first free devices of a node. So this module starts one actor for each free device
until the actors hold the lease's devices. Then it ends the actors on the lease's devices, and the
workload that starts next gets these devices. The backend `ray` and the pools of `slices` call this
module. Ray sends its classes to the nodes by value.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final, TypeAlias

import ray

RayHandle: TypeAlias = Any
"""An actor or a reference: Ray has no types for their methods and values."""
FREE_SECONDS_MAX: Final = 10.0
"""Maximum seconds that other programs may use a lease's device; then `DeviceError` is raised."""
GIVE_SECONDS_MAX: Final = 60.0
"""Maximum seconds that Ray may take to assign a device that no other worker uses."""
LOOK_SECONDS: Final = 0.5
"""Seconds between two checks whether a device is assigned, or the start was given up."""


class DeviceError(Exception):
    """A device that a lease holds is used by another program of the same Ray cluster."""


class DeviceHolder:
    """Holds a device, or a share of it, so that Ray assigns other devices to a workload."""

    def devices(self, gpus: Sequence[str]) -> tuple[list[str], list[str]]:
        """Return the devices that Ray gave this actor, and Ray's ids of a lease's devices."""
        return devices_of_actor(), device_names(gpus)

    def leave(self) -> None:
        """End this process; Ray frees the device before the caller gets an error."""
        ray.actor.exit_actor()  # type: ignore[no-untyped-call]  # Ray has no types for it.


def devices_of_actor() -> list[str]:
    """Return the devices that Ray gave this actor."""
    return list(ray.get_runtime_context().get_accelerator_ids().get("GPU", []))


def device_names(gpus: Sequence[str]) -> list[str]:
    """Return Ray's names of devices: indices, or those in the raylet's CUDA_VISIBLE_DEVICES."""
    worker = ray._private.worker.global_worker  # noqa: SLF001  # No public API.
    names = (getattr(worker, "original_visible_accelerator_ids", None) or {}).get("GPU")
    return [str(names[int(each)]) if names else str(each) for each in gpus]


class Holders:
    """Actors that hold devices for a moment.

    Args:
        ours: Returns Ray's ids of the caller's actors that may have a device of another lease,
            until these actors are started again.
    """

    def __init__(self, ours: Callable[[], Collection[str]] = tuple) -> None:
        self._ours = ours
        self._lock = threading.Lock()
        self._nodes: dict[str, threading.Lock] = {}
        self._ids: set[str] = set()

    def ids(self) -> set[str]:
        """Return Ray's ids of the holders that exist now."""
        with self._lock:
            return set(self._ids)

    def exact(
        self,
        node: str,
        gpus: Sequence[str],
        share: float,
        take: Callable[[], bool],
        given_up: threading.Event | None = None,
    ) -> bool:
        """Call `take` while the devices of a lease are the next that Ray would assign.

        Args:
            node: Ray's id of the node.
            gpus: The lease's devices, by index.
            share: The held part of each device; 1: the whole device.
            take: Starts the workload that gets the devices; returns whether that worked.
            given_up: Set by the caller to end the wait.

        Returns:
            The result of `take`.

        Raises:
            DeviceError: A device is in use, or `given_up` was set.
        """
        with self._lock:
            turn = self._nodes.setdefault(node, threading.Lock())
        held: list[RayHandle] = []
        others: list[RayHandle] = []
        with turn:
            try:
                missing: dict[str, str] = {each: each for each in gpus}
                named: list[str] = []
                while missing:
                    holder = self._holder(node, share)
                    others.append(holder)
                    ref = holder.devices.remote(list(gpus))
                    try:
                        given, names = self._wait_for_device(ref, node, missing.values(), given_up)
                    except DeviceError:
                        ray.kill(others[-1], no_restart=True)  # That actor has not started yet.
                        raise
                    if not named:  # Ray's names of the devices are known now.
                        named = names
                        missing = dict(zip(names, gpus, strict=True))
                    if missing.pop(given[0], None) is not None:
                        held.append(others.pop())
                self._leave(held)
                held = []
                return take()
            finally:
                self._leave([*held, *others])

    def _wait_for_device(
        self, ref: Any, node: str, missing: Collection[str], given_up: threading.Event | None
    ) -> tuple[list[str], list[str]]:
        """Wait until Ray has assigned a device to a holder."""
        began = time.monotonic()
        while not ray.wait([ref], timeout=LOOK_SECONDS)[0]:
            if given_up is not None and given_up.is_set():
                raise DeviceError("the start of the workload was cancelled")
            waited = time.monotonic() - began
            late = waited > GIVE_SECONDS_MAX
            if late or (waited > FREE_SECONDS_MAX and self._foreign(node, missing)):
                left = ", ".join(sorted(missing))
                raise DeviceError(
                    f"GPU {left} of Ray node {node} is used by other programs on that cluster"
                )
        answer: tuple[list[str], list[str]] = ray.get(ref)
        return answer

    def _foreign(self, node: str, gpus: Collection[str]) -> bool:
        """Return whether a process of another user has one of these devices."""
        users = {user for slot, user in _users(node) if slot in gpus}
        return bool(users) and bool(users - {*self._ours(), *self.ids()})

    def _holder(self, node: str, share: float) -> RayHandle:
        within = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=False)
        made = ray.remote(DeviceHolder).options(
            num_cpus=0, num_gpus=share, max_restarts=0, scheduling_strategy=within
        )
        holder: RayHandle = made.remote()
        with self._lock:
            self._ids.add(holder._actor_id.hex())  # noqa: SLF001  # No public name for it.
        return holder

    def _leave(self, holders: Sequence[RayHandle]) -> None:
        """End holders; when this returns, their devices are free."""
        leaving = [holder.leave.remote() for holder in holders]
        if leaving:
            ray.wait(leaving, num_returns=len(leaving), timeout=FREE_SECONDS_MAX)
        for holder in holders:
            with contextlib.suppress(Exception):  # The actor has ended, as intended.
                ray.kill(holder, no_restart=True)
            with self._lock:
                self._ids.discard(holder._actor_id.hex())  # noqa: SLF001  # As above.


def _users(node: str) -> set[tuple[str, str]]:
    """Return the devices that a node's workers have, and the ids of these workers' actors."""
    from ray._private.internal_api import node_stats  # noqa: PLC0415  # No public API.

    try:
        (found,) = [each for each in ray.nodes() if each["NodeID"] == node and each["Alive"]]  # type: ignore[no-untyped-call]  # Ray has no types.
        address, port = found["NodeManagerAddress"], found["NodeManagerPort"]
        stats = node_stats(address, port, include_memory_info=False)  # type: ignore[no-untyped-call]  # As above.
    except Exception:  # noqa: BLE001  # `ray://` clients cannot ask; the node may end.
        return set()
    return {
        (str(slot.slot), worker.actor_id.hex())
        for worker in stats.core_workers_stats
        for name, resource in worker.used_resources.items()
        if name.partition("_group_")[0] == "GPU"
        for slot in resource.resource_slots
    }
