"""Reservations, by node and time: a part of `State`, which only `apply` changes."""

from collections.abc import Collection
from dataclasses import dataclass, field

import msgspec

from moorage.model import Demand, DeviceId, Lease, Nodes, Placement, RequestId, Share, Tenant

Place = tuple[str, str]
"""A node by cluster and node id."""


class NodeReservation(msgspec.Struct, frozen=True, gc=False):
    """Nodes, or parts of them, that only one tenant may use during a set time.

    Args:
        id: The server's id of the reservation.
        tenant: The tenant that gets the nodes.
        demand: The demand that each of the nodes can take during the reservation.
        starts_at: Latest end of other tenants' leases on the nodes, in seconds since the epoch.
        ends_at: The time from which all tenants may use the nodes again, in seconds since the
            epoch.
        lapse_seconds: The reservation lapses these seconds after its start if its tenant had no
            lease on the nodes; 0: it does not lapse.
        used: Whether the reservation's tenant has had a lease on the nodes.
        begun: Whether the start has passed and waiters have been woken.
        devices: The devices of `parts`, as in `model.Lease.devices`; set once a node renamed one.
        parts: The reserved part of each node, in the order of `nodes`: devices, and their part of
            CPU and memory. Empty: whole nodes are reserved, as for a request without devices.
    """

    id: RequestId
    tenant: Tenant
    nodes: Nodes
    demand: Demand
    starts_at: float
    ends_at: float
    lapse_seconds: float = 0.0
    used: bool = False
    parts: Placement = ()
    begun: bool = False
    devices: tuple[tuple[DeviceId, ...], ...] = ()

    @property
    def lapses_at(self) -> float | None:
        """When the reservation lapses if still unused, in seconds since the epoch; None: never."""
        lapses = self.lapse_seconds and not self.used
        return self.starts_at + self.lapse_seconds if lapses else None

    def part(self, place: Place) -> Share | None:
        """Return the reserved part of a node of the reservation; None: the whole node."""
        return self.parts[self.nodes.index(place)] if self.parts else None


_ByNode = dict[Place, dict[RequestId, NodeReservation]]


@dataclass(slots=True)
class ReservedNodes:
    """The reservations that are not over.

    Attributes:
        by_id: The reservations by id, the oldest first.
        on: The reservations of each node that has any.
    """

    by_id: dict[RequestId, NodeReservation] = field(
        default_factory=dict[RequestId, NodeReservation]
    )
    on: _ByNode = field(default_factory=_ByNode, compare=False)

    def __bool__(self) -> bool:
        """Return whether reservations exist."""
        return bool(self.by_id)

    def put(self, reservation: NodeReservation) -> None:
        """Add a reservation, or replace it."""
        self.by_id[reservation.id] = reservation
        for node in reservation.nodes:
            self.on.setdefault(node, {})[reservation.id] = reservation

    def remove(self, request: RequestId) -> NodeReservation:
        """Forget a reservation, and return it."""
        reservation = self.by_id.pop(request)
        for node in reservation.nodes:
            del self.on[node][request]
            if not self.on[node]:
                del self.on[node]
        return reservation

    def of_others(self, place: Place, tenant: Tenant | None) -> list[NodeReservation]:
        """Return the reservations of a node by other tenants; `tenant` None: by all tenants."""
        return [each for each in self.on.get(place, {}).values() if each.tenant != tenant]

    def used_by(self, lease: Lease) -> list[NodeReservation]:
        """Return the reservations of which a new lease is the first use."""
        found = {
            each.id: each
            for share in lease.placement
            for each in self.on.get((share.cluster_id, share.node_id), {}).values()
            if each.tenant == lease.tenant and not each.used and each.starts_at <= lease.granted_at
        }
        return list(found.values())

    def due(self, request: RequestId) -> float | None:
        """Return when a reservation next begins, ends or lapses; None if there is none."""
        found = self.by_id.get(request)
        if found is None:
            return None
        if not found.begun:
            return found.starts_at
        lapses_at = found.lapses_at
        return found.ends_at if lapses_at is None else min(found.ends_at, lapses_at)


def touches(placement: Placement, nodes: Collection[Place]) -> bool:
    """Return whether a placement holds anything on one of these nodes."""
    return bool(nodes) and any((share.cluster_id, share.node_id) in nodes for share in placement)
