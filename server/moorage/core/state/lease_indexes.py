"""Indexes of leases: those with anti-affinity, and those with lost devices.

Both indexes are parts of `State`; only `apply` changes them.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from moorage.core.state.reserved import Place
from moorage.model import DEVICE, ClusterId, DeviceId, Lease, NodeId, RequestId, Share, Tenant
from moorage.policy import Fleet

_Finder = Callable[[str], Place | None]
"""Returns the node with a device; the argument is the UUID's key in `Node.identity`."""


@dataclass(slots=True)
class LostDevices:
    """The devices that leases hold but their nodes no longer have, by lease.

    While such a lease lasts, no other lease gets the device, even if it appears again in another
    machine, undivided after it was divided, or divided after it was whole.
    """

    of: dict[RequestId, tuple[DeviceId, ...]] = field(
        default_factory=dict[RequestId, tuple[DeviceId, ...]]
    )

    def note(self, lease: Lease) -> None:
        """Record the lost devices of a lease."""
        if lease.lost:
            self.of[lease.id] = lease.lost
        else:
            self.of.pop(lease.id, None)

    def withhold(self, fleet: Fleet, find: _Finder) -> None:
        """Set the free capacity of lost devices to 0 on nodes where they have appeared again."""
        every = {each: None for lost in self.of.values() for each in lost}
        for row, column in _columns(every, fleet, find):
            fleet.gpu_free[row, column] = 0
            fleet.touch(row)

    def shown(self, lost: Iterable[DeviceId], fleet: Fleet, find: _Finder) -> list[Share]:
        """Return where these lost devices have appeared again, as shares of nodes."""
        found = [
            (*fleet.node_ids[row], fleet.gpu_ids[row][c]) for row, c in _columns(lost, fleet, find)
        ]
        return [Share(ClusterId(cluster), NodeId(node), (gpu,)) for cluster, node, gpu in found]


def _columns(
    devices: Iterable[DeviceId], fleet: Fleet, find: _Finder
) -> dict[tuple[int, int], None]:
    """Return the (row, column) of devices, of their parts, and of their parent devices."""
    return {
        (row, column): None
        for device in devices
        for place in shown(device, find)
        if (row := fleet.row(*place)) is not None
        for column, other in enumerate(fleet.devices[row])
        if _overlap(device, other)
    }


def shown(device: DeviceId, find: _Finder) -> Iterator[Place]:
    """Yield the nodes that list a device, a part of it, or its parent device."""
    places = (find(f"{DEVICE}{uuid.lower()}") for uuid in device if uuid)
    yield from dict.fromkeys(place for place in places if place is not None)


def _overlap(one: DeviceId, other: DeviceId) -> bool:
    """Return whether two ids name the same device, or one names a part of the other."""
    mine, theirs = _lower(one), _lower(other)
    same = ((mine.uuid, theirs.uuid), (mine.uuid, theirs.parent), (mine.parent, theirs.uuid))
    return any(first == second != "" for first, second in same)


def _lower(device: DeviceId) -> DeviceId:
    return DeviceId(device.uuid.lower(), device.parent.lower())


@dataclass(slots=True)
class LeaseGroups:
    """The leases with anti-affinity that hold capacity, warm ones included, by tenant and group."""

    of: dict[tuple[Tenant, str], dict[RequestId, None]] = field(
        default_factory=dict[tuple[Tenant, str], dict[RequestId, None]]
    )

    def add(self, lease: Lease) -> None:
        """Add a lease that holds resources to its group, if it has one."""
        if lease.terms.anti_affinity is not None:
            key = lease.tenant, lease.terms.anti_affinity.group
            self.of.setdefault(key, {})[lease.id] = None

    def remove(self, lease: Lease) -> None:
        """Remove a lease from its group."""
        if lease.terms.anti_affinity is not None:
            key = lease.tenant, lease.terms.anti_affinity.group
            del self.of[key][lease.id]
            if not self.of[key]:
                del self.of[key]
