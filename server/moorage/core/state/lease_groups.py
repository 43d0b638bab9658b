"""Which leases keep apart from each other. A part of `State`; only `apply` changes it."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from moorage.core.state.growth import GrownPlace
from moorage.model import Lease, RequestId, Tenant

__all__ = ["LeaseGroups", "left_by"]


@dataclass(slots=True)
class LeaseGroups:
    """The leases that hold something and keep apart, by tenant and group; also warm ones."""

    of: dict[tuple[Tenant, str], dict[RequestId, None]] = field(
        default_factory=dict[tuple[Tenant, str], dict[RequestId, None]]
    )

    def add(self, lease: Lease) -> None:
        """Note a lease down that holds something now."""
        if lease.terms.anti_affinity is not None:
            key = lease.tenant, lease.terms.anti_affinity.group
            self.of.setdefault(key, {})[lease.id] = None

    def remove(self, lease: Lease) -> None:
        """Forget a lease."""
        if lease.terms.anti_affinity is not None:
            key = lease.tenant, lease.terms.anti_affinity.group
            del self.of[key][lease.id]
            if not self.of[key]:
                del self.of[key]


def left_by(lease: Lease) -> Iterator[GrownPlace]:
    """Yield where others may be placed when a lease leaves."""
    apart = lease.terms.anti_affinity is not None
    for share in lease.placement:
        # Its rack or zone is open to its group, too: all nodes of the cluster are looked at.
        yield share.cluster_id, "" if apart else share.node_id
