"""Makes placement groups of Ray, which limit a job's tasks and actors to the lease's share.

A group is detached, and has the name of its job's actor without the index, so it can be found after
a crash. Its removal ends all tasks and actors in it, detached actors included.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from moorage.ray_devices import DeviceHolder, Holders, RayHandle
from moorage.records.json_values import JsonMapping

MAKE_SECONDS_MAX: Final = 60.0
"""Longest wait for a placement group; nodes may have less free than the inventory says."""
REMOVE_SECONDS_MAX: Final = 10.0
LOOK_SECONDS: Final = 0.05
"""Seconds between two checks whether Ray has made or removed a group; Ray sends no event."""
TRIES: Final = 3


class GroupError(Exception):
    """A placement group was not made or cannot be removed; the message says why."""


class JobGroups:
    """Makes and removes the placement groups of one server's jobs.

    Args:
        server: The first part of the groups' names.
        holders: Actors by which Ray is made to choose the devices of a lease.
    """

    def __init__(self, server: str, holders: Holders) -> None:
        self._server = server
        self._holders = holders

    def make(self, plan: JsonMapping, given_up: threading.Event) -> PlacementGroup:
        """Make a job's placement group from its lease's devices; remove any earlier one first.

        Raises:
            GroupError: Ray did not create the group, or gave the group other devices.
            DeviceError: A device is in use.
        """
        self.remove(str(plan["workload"]))
        # Lock the nodes in the same order for all jobs, to avoid deadlocks.
        exact = sorted(
            (each for each in plan["bundles"] if each["gpus"]), key=lambda each: str(each["node"])
        )
        made: list[PlacementGroup] = []

        def take() -> bool:
            group = self._make(plan, given_up)
            if group is not None:
                made.append(group)
            return group is not None

        for number in range(TRIES + 1):
            # Try first without holders: Ray's choice often has the lease's devices.
            if self._within(exact if number else [], take, given_up):
                return made[0]
        devices = "; ".join(f"GPU {', '.join(each['gpus'])} of {each['node']}" for each in exact)
        raise GroupError(f"Ray gave a job other devices than {devices}, {TRIES + 1} times")

    def remove(self, workload: str) -> None:
        """Remove the placement groups of a workload, if any; Ray ends the actors in them.

        Raises:
            GroupError: Ray has not removed a group.
        """
        prefix = f"{self._server}/{workload}/"
        for group_id, name in self._all().items():
            if name.startswith(prefix) and name.removeprefix(prefix).count("/") == 1:
                _remove(PlacementGroup(ray.PlacementGroupID(bytes.fromhex(group_id))))

    def workloads(self) -> set[str]:
        """Return the workloads that have a placement group."""
        names = [name.removeprefix(f"{self._server}/") for name in self._all().values()]
        return {name.rsplit("/", 2)[0] for name in names}

    def _all(self) -> dict[str, str]:
        """Return the names of this server's placement groups, by group id."""
        return {
            group_id: group["name"]
            for group_id, group in ray.util.placement_group_table().items()
            if group["name"].startswith(f"{self._server}/") and group["state"] != "REMOVED"
        }

    def _within(
        self, bundles: Sequence[JsonMapping], take: Callable[[], bool], given_up: threading.Event
    ) -> bool:
        """Call `take` while the devices of all bundles are the next that Ray would assign."""
        if not bundles:
            return take()
        first, *rest = bundles
        share = min(1.0, float(first["resources"]["GPU"]))
        node, gpus = first["node"], first["gpus"]
        return self._holders.exact(
            node, gpus, share, lambda: self._within(rest, take, given_up), given_up
        )

    def _make(self, plan: JsonMapping, given_up: threading.Event) -> PlacementGroup | None:
        """Make the placement group; None if Ray gave it other devices than the lease's."""
        bundles = plan["bundles"]
        group = ray.util.placement_group(
            [each["resources"] for each in bundles],
            name=str(plan["name"]).rpartition("/")[0],
            lifetime="detached",
            bundle_label_selector=[{"ray.io/node-id": each["node"]} for each in bundles],
        )
        right = False
        try:
            deadline = time.monotonic() + MAKE_SECONDS_MAX
            while _state(group) != "CREATED":
                if given_up.wait(LOOK_SECONDS):
                    raise GroupError("the start of the workload was cancelled")
                if time.monotonic() > deadline:
                    raise GroupError(
                        f"Ray has not reserved the devices of a job within {MAKE_SECONDS_MAX:g} s:"
                        f" {_wants(bundles)}; others may hold these resources"
                    )
            right = all(
                _has(group, index, each) for index, each in enumerate(bundles) if each["gpus"]
            )
        finally:
            if not right:
                _remove(group)
        return group if right else None


def _has(group: PlacementGroup, index: int, bundle: JsonMapping) -> bool:
    """Return whether a bundle has the lease's devices, by starting an actor in the bundle."""
    strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
    holder: RayHandle = (
        ray.remote(DeviceHolder)
        .options(
            num_cpus=0,
            num_gpus=bundle["resources"]["GPU"],
            max_restarts=0,
            scheduling_strategy=strategy,
        )
        .remote()
    )
    try:
        pending = holder.devices.remote(bundle["gpus"])
        given, named = ray.get(pending, timeout=MAKE_SECONDS_MAX)
        ray.wait([holder.leave.remote()], timeout=REMOVE_SECONDS_MAX)
    finally:
        with contextlib.suppress(ray.exceptions.RayError, ValueError):  # The actor may have ended.
            ray.kill(holder, no_restart=True)
    return sorted(given) == sorted(named)


def _state(group: PlacementGroup) -> str:
    return str(ray.util.placement_group_table(group).get("state", "REMOVED"))


def _remove(group: PlacementGroup) -> None:
    ray.util.remove_placement_group(group)
    deadline = time.monotonic() + REMOVE_SECONDS_MAX
    while _state(group) != "REMOVED":
        if time.monotonic() > deadline:
            raise GroupError(f"Ray has not removed the placement group {group.id.hex()}")
        time.sleep(LOOK_SECONDS)  # Ray sends no event for a removal.


def _wants(bundles: Sequence[JsonMapping]) -> str:
    return "; ".join(
        ", ".join(f"{name} {amount:g}" for name, amount in each["resources"].items())
        + f" on {each['node']}"
        for each in bundles
    )
