"""Which nodes are reserved, for whom and when. A part of `State`; only `apply` changes it."""

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from moorage.model import Demand, Lease, Nodes, Placement, RequestId, Tenant

__all__ = ["NodeReservation", "ReservedNodes", "touches"]


@dataclass(frozen=True, slots=True)
class NodeReservation:
    """Nodes that only one tenant gets for a time, agreed on beforehand.

    Nodes are reserved whole: what others hold of their CPU and memory would keep its devices from
    the tenant as well.

    Args:
        id: The server's name for it.
        tenant: Who gets them.
        nodes: Which: pairs of cluster and node. Each belongs to one reservation at a time.
        demand: What was asked for, and each of them can take when it is empty.
        starts_at: When leases of others there end at the latest, in seconds since the epoch.
        ends_at: When the nodes are for everybody again.
        lapse_seconds: It ends so long after its start if its tenant has had no lease there; 0: it
            does not.
        used: Its tenant has had one.

    """

    id: RequestId
    tenant: Tenant
    nodes: Nodes
    demand: Demand
    starts_at: float
    ends_at: float
    lapse_seconds: float = 0.0
    used: bool = False


@dataclass(slots=True)
class ReservedNodes:
    """The reservations that are not over.

    Attributes:
        by_id: Each by its id, the oldest first.

    """

    by_id: dict[RequestId, NodeReservation] = field(
        default_factory=dict[RequestId, NodeReservation]
    )

    def __bool__(self) -> bool:
        """Return whether there are any: where none is, nothing here is looked at."""
        return bool(self.by_id)

    def put(self, reservation: NodeReservation) -> None:
        """Note a reservation down as it is."""
        self.by_id[reservation.id] = reservation

    def remove(self, request: RequestId) -> NodeReservation:
        """Forget a reservation, and return it."""
        return self.by_id.pop(request)

    def withheld(self, tenant: Tenant, until: float) -> Nodes:
        """Return the nodes that a lease of a tenant may not hold, since it lasts until then."""
        found = (
            node
            for each in self.by_id.values()
            if each.tenant != tenant and each.starts_at < until
            for node in each.nodes
        )
        return tuple(dict.fromkeys(found))  # One node may have several, one after the other.

    def by_node(self) -> dict[tuple[str, str], list[NodeReservation]]:
        """Return the reservations of each node that has any."""
        found: dict[tuple[str, str], list[NodeReservation]] = {}
        for each in self.by_id.values():
            for node in each.nodes:
                found.setdefault(node, []).append(each)
        return found

    def begins(self, lease: Lease) -> float:
        """Return when the first reservation begins that a lease must make room for; infinity."""
        return min(
            (each.starts_at for each in self._at(lease) if each.tenant != lease.tenant),
            default=math.inf,
        )

    def used_by(self, lease: Lease) -> list[NodeReservation]:
        """Return the reservations that have not been used, and are by this new lease."""
        return [
            each
            for each in self._at(lease)
            if each.tenant == lease.tenant and not each.used and each.starts_at <= lease.granted_at
        ]

    def due(self, request: RequestId) -> float | None:
        """Return when a reservation ends, or lapses; None where there is none."""
        found = self.by_id.get(request)
        if found is None:
            return None
        lapses = found.lapse_seconds and not found.used
        return (
            min(found.ends_at, found.starts_at + found.lapse_seconds) if lapses else found.ends_at
        )

    def during(self, starts_at: float, ends_at: float) -> Nodes:
        """Return the nodes of which a reservation has a part of this time."""
        return tuple(
            node
            for each in self.by_id.values()
            if each.starts_at < ends_at and starts_at < each.ends_at
            for node in each.nodes
        )

    def _at(self, lease: Lease) -> Iterator[NodeReservation]:
        """Yield the reservations of nodes that a lease holds something of."""
        for each in self.by_id.values():
            if touches(lease.placement, each.nodes):
                yield each


def touches(placement: Placement, nodes: Collection[tuple[str, str]]) -> bool:
    """Return whether a placement has something of any of these nodes."""
    return bool(nodes) and any((share.cluster_id, share.node_id) in nodes for share in placement)
