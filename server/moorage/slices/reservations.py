"""Reservations of new slices: each reserves hosts and starts the slice's actor, for a pool."""

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from moorage.slices.actors.slice import SliceActor
from moorage.slices.cluster import SLICE_LABEL, alive_nodes, remove_groups, request_bundles
from moorage.slices.lazy_ray import ray
from moorage.slices.leases import LeasedHosts, SliceLease
from moorage.slices.ray_values import RayValue
from moorage.slices.records import ActorPoolMember, SliceInfo
from moorage.slices.settings import SliceSettings
from moorage.slices.shapes import GpuSlices, Shape, find_degraded
from moorage.slices.waiting import Deadline, kill, outcomes

_PAUSE_SECONDS: Final = 1.0

logger: Final = logging.getLogger("ray")


@dataclass(eq=False)
class Reservation:
    """Reserves one slice: its placement group, and the slice's actor inside the group."""

    group: RayValue
    actor: RayValue
    answer: RayValue
    member: ActorPoolMember[SliceInfo] | None = None
    start: Deadline | None = None
    lease: SliceLease | None = None
    without: frozenset[str] = frozenset()
    node_ids: tuple[str, ...] = ()

    @classmethod
    def open(
        cls, shape: Shape, settings: SliceSettings, without: frozenset[str] = frozenset()
    ) -> "Reservation":
        """Request a slice's hosts (for TPUs only the first host) from Ray, and an actor there.

        Args:
            shape: The shape of the slice.
            settings: Settings of the slice's actor.
            without: Names of slices that lost hosts and must not be used.
        """
        bundles = shape.bundles()
        placing: dict[str, RayValue] = {"topology_strategy": shape.topology()}
        if without:
            other = {SLICE_LABEL: f"!in({','.join(sorted(without))})"}
            placing = {"bundle_label_selector": [other] * len(bundles)}
        made = cls._within(ray.util.placement_group(bundles, **placing), shape, settings, {})
        made.without = without
        return made

    @classmethod
    def leased(
        cls, hosts: LeasedHosts, shape: GpuSlices, settings: SliceSettings, seconds: float
    ) -> "Reservation":
        """Take a lease on the hosts of a slice, and reserve these hosts in Ray.

        Raises:
            Exception: The server refuses the lease, or Ray lacks the lease's resources.
        """
        lease = hosts.take(shape, seconds)
        try:
            group = lease.reserve(shape)
        except BaseException:
            lease.close()
            raise
        made = cls._within(group, shape, settings, lease.environment)
        made.lease = lease
        lease.guard(made.end)
        return made

    @classmethod
    def _within(
        cls, group: RayValue, shape: Shape, settings: SliceSettings, environment: Mapping[str, str]
    ) -> "Reservation":
        within = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(group, 0)
        made = SliceActor.options(scheduling_strategy=within)
        actor = made.remote(shape, group, settings, environment)
        return cls(group, actor, actor.get_info.remote())

    def note_info(self, info: SliceInfo) -> None:
        """Record that the slice has started, and on which nodes."""
        self.member = ActorPoolMember(self.actor, info)
        placed = ray.util.placement_group_table(self.group)["bundles_to_node_id"]
        self.node_ids = tuple(placed.values())

    def end(self) -> None:
        """End all actors of the slice, and free Ray's reservation."""
        kill(self.actor)
        remove_groups(self.group)

    def close(self) -> None:
        """End the actors, free Ray's reservation, and release the lease of the hosts, if any."""
        self.end()
        if self.lease is not None:
            self.lease.close()

    @property
    def placed(self) -> bool:
        """Whether Ray has reserved the hosts; for TPU slices, the first host."""
        return bool(ray.util.placement_group_table(self.group).get("state") == "CREATED")

    def overdue(self, seconds: float) -> bool:
        """Return whether the hosts were reserved `seconds` ago but the actor has not started."""
        if self.start is None and self.placed:
            self.start = Deadline(seconds)
        return self.start is not None and not self.start.left


class Reservations:
    """Makes reservations for the slices that a pool lacks, and frees surplus ones.

    Args:
        shape: The shape of each slice.
        settings: The pause between requests to the autoscaler, and the time limit of a slice's
            start.
        held: Number of slices that the pool has already.
        hosts: The source of hosts; None: Ray chooses free hosts.
    """

    def __init__(
        self, shape: Shape, settings: SliceSettings, held: int, hosts: LeasedHosts | None = None
    ) -> None:
        self._hosts = hosts
        self._shape = shape
        self._settings = settings
        self._held = held
        self._open: list[Reservation] = []
        self.trouble: RayValue = None
        """The reason why the last failed slice did not start."""

    @property
    def ready(self) -> list[Reservation]:
        """The reservations whose slices have started."""
        return [each for each in self._open if each.member is not None]

    def wait(self, count: int, deadline: Deadline) -> bool:
        """Wait until `count` slices have started; free surplus reservations.

        Returns:
            Whether `count` slices have started in time.
        """
        self._want(count, deadline)
        while len(self.ready) < count and deadline.left:
            request_bundles(self._shape.bundles() * (self._held + count))
            without = self._without()
            for each in [each for each in self._open if each.member is None]:
                if each.without != without and not each.placed:
                    each.close()
                    self._open.remove(each)
            self._want(count, deadline)
            waiting = [each for each in self._open if each.member is None]
            seconds = min(self._settings.scale_poll_seconds, deadline.left)
            refs = [each.answer for each in waiting]
            ready, _ = ray.wait(refs, timeout=seconds) if refs else ([], [])
            for each in waiting:
                if each.answer in ready:
                    self._hear(each)
                elif each.overdue(self._settings.slice_start_seconds_max):
                    self._again(each, "it did not start in time")
            self._want(count, deadline)
        return len(self.ready) >= count

    def take(self) -> list[Reservation]:
        """Hand over the started reservations to the pool, in order of their slices' names."""
        taken = sorted(self.ready, key=_name)
        self._open = [each for each in self._open if each.member is None]
        return taken

    def close(self) -> None:
        """Free all reservations that were not taken."""
        self._want(0)

    def _want(self, count: int, deadline: Deadline | None = None) -> None:
        """Open or close reservations until there are `count`; close started slices last."""
        self._open.sort(key=lambda each: each.member is None)
        while len(self._open) > count:
            self._open.pop().close()
        while len(self._open) < count:
            opened = self._opened(deadline)
            if opened is None:
                return
            self._open.append(opened)

    def _without(self) -> frozenset[str]:
        """Return the names of slices that lost hosts and must not be used."""
        if self._settings.moderate or self._hosts is not None:
            return frozenset()
        found = find_degraded(self._shape, list(alive_nodes().values()))
        return frozenset(each.slice_name for each in found)

    def _opened(self, deadline: Deadline | None) -> Reservation | None:
        """Open one more reservation; None if the server refuses the lease for now."""
        if self._hosts is None:
            return Reservation.open(self._shape, self._settings, self._without())
        assert isinstance(self._shape, GpuSlices)
        left = deadline.left if deadline is not None else 0.0
        seconds = min(self._settings.scale_poll_seconds, left)
        try:
            return Reservation.leased(self._hosts, self._shape, self._settings, seconds)
        except Exception as error:  # noqa: BLE001  # The client's own errors, and Ray's.
            logger.warning("A slice of %s has no lease: %s", self._shape.name, error)
            self.trouble = error
            time.sleep(min(_PAUSE_SECONDS, left))  # The server may refuse at once.
            return None

    def _hear(self, each: Reservation) -> None:
        (answer,) = outcomes([each.answer], _PAUSE_SECONDS)
        if isinstance(answer, SliceInfo):
            each.note_info(answer)
        else:
            time.sleep(_PAUSE_SECONDS)  # Without a pause, starts could fail in a fast loop.
            self._again(each, answer)

    def _again(self, each: Reservation, why: object) -> None:
        logger.warning("A slice of %s did not start: %s", self._shape.name, why)
        self.trouble = why
        each.close()
        self._open.remove(each)  # `wait` opens another one if time is left.


def _name(each: Reservation) -> tuple[str, str]:
    assert each.member is not None
    info = each.member.actor_info
    return info.slice_name, info.ip_address
