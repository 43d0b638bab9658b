"""What leases hold of each node. A part of `State`; only `apply` changes it."""

from dataclasses import dataclass, field

from moorage.core.reserved import Place
from moorage.model import Lease, RequestId, Share

__all__ = ["LeasePlaces"]

_Shares = dict[RequestId, Share]


@dataclass(slots=True)
class LeasePlaces:
    """The leases that hold something, by node."""

    on: dict[Place, _Shares] = field(default_factory=dict[Place, _Shares])

    def add(self, lease: Lease) -> None:
        """Note a lease down that holds something now."""
        for share in lease.placement:
            self.on.setdefault((share.cluster_id, share.node_id), {})[lease.id] = share

    def remove(self, lease: Lease) -> None:
        """Forget a lease."""
        for share in lease.placement:
            place = (share.cluster_id, share.node_id)
            del self.on[place][lease.id]
            if not self.on[place]:
                del self.on[place]

    def of(self, place: Place) -> _Shares:
        """Return what leases hold of a node, by lease."""
        return self.on.get(place, {})
