"""Renames the devices in leases and reservations when nodes rename devices.

A placement uses the node's device names. If a GPU is lost, added or swapped, the node may rename
other devices, so a held device is followed by its UUID; without a UUID in the inventory, its name
stays. The allocator is the caller, on each change of a cluster.
"""

from collections.abc import Iterator, Mapping
from typing import Final

from msgspec.structs import replace

from moorage.core.state.facts import Moved, Reserved
from moorage.core.state.reserved import NodeReservation, Place
from moorage.core.state.state import State
from moorage.model import Cluster, DeviceId, Lease, Node, NodeId, RequestId

_Names = Mapping[str, DeviceId]
"""The identities of a node's devices, by device name."""
_UNKNOWN: Final = DeviceId()


def follow(
    state: State, before: Cluster | None, after: Cluster | None, now: float
) -> Iterator[Moved | Reserved]:
    """Yield a fact for each lease or reservation whose devices were renamed or lost.

    Args:
        state: Leases and reservations, with the names before the change.
        before: The cluster before the change; None: the cluster is new.
        after: The cluster after the change; None: the cluster is gone.
        now: Seconds since the epoch.
    """
    old, new = _nodes(before), _nodes(after)
    holders: dict[tuple[type, RequestId], _Holder] = {}
    for cluster_id, node in dict.fromkeys((*old, *new)):
        place = (cluster_id, node)
        owners: list[Lease | NodeReservation] = [
            *(state.leases[name] for name in state.places.get(place, ())),
            *(each for each in state.reserved.on.get(place, {}).values() if each.parts),
        ]
        were, are = (_names(nodes.get(place)) if owners else {} for nodes in (old, new))
        if were != are:
            here = [holders.setdefault((type(each), each.id), _Holder(each)) for each in owners]
            _rename(here, place, were, are)
    for holder in holders.values():
        if (fact := holder.fact(now)) is not None:
            yield fact


class _Holder:
    """A lease or reservation whose devices are being renamed."""

    def __init__(self, owner: Lease | NodeReservation) -> None:
        self.owner = owner
        self.shares = list(owner.placement if isinstance(owner, Lease) else owner.parts)
        self.devices = list(owner.devices) or [()] * len(self.shares)
        self.lost = dict.fromkeys(owner.lost if isinstance(owner, Lease) else ())

    def index(self, place: Place) -> int:
        """Return the index of the holder's share on a node."""
        places: list[Place] = [(share.cluster_id, share.node_id) for share in self.shares]
        return places.index(place)

    def device_ids(self, at: int, names: _Names) -> list[DeviceId]:
        """Return the recorded devices of a share; find one without a record by its old name."""
        gpus = self.shares[at].gpus
        noted = self.devices[at] or [_UNKNOWN] * len(gpus)
        pairs = zip(gpus, noted, strict=True)
        return [each if any(each) else names.get(gpu, _UNKNOWN) for gpu, each in pairs]

    def fact(self, now: float) -> Moved | Reserved | None:
        """Return the fact that records new names or lost devices; None if nothing changed."""
        shares, devices, lost = tuple(self.shares), tuple(self.devices), tuple(self.lost)
        if isinstance(self.owner, NodeReservation):
            is_new = shares != self.owner.parts or (bool(lost) and devices != self.owner.devices)
            moved = replace(self.owner, parts=shares, devices=devices)
            return Reserved(moved) if is_new else None
        if (shares, lost) == (self.owner.placement, self.owner.lost):
            return None
        return Moved(self.owner.id, now, shares, devices, lost)


def _rename(holders: list[_Holder], place: Place, were: _Names, are: _Names) -> None:
    """Set the new names of a node's held devices.

    A device that left the node keeps its name, so that its holder, which may still use it, gets no
    other device. If another held device now has this name, the UUID replaces the name.
    """
    where = {device.uuid.lower(): name for name, device in are.items() if device.uuid}
    indices = [holder.index(place) for holder in holders]
    known = [holder.device_ids(at, were) for holder, at in zip(holders, indices, strict=True)]
    taken = {where.get(each.uuid.lower()) for devices in known for each in devices}
    for holder, at, devices in zip(holders, indices, known, strict=True):
        for each in holder.devices[at]:
            holder.lost.pop(each, None)
        names, found = list[str](), list[DeviceId]()
        for gpu, device in zip(holder.shares[at].gpus, devices, strict=True):
            name = where.get(device.uuid.lower())
            # A device without a UUID under this name may be the same device.
            gone = name is None and device.uuid and (gpu not in are or are[gpu].uuid)
            if gone:
                holder.lost[device] = None
            if name is None and gpu in taken:
                name = device.uuid or f"{gpu} as it was"
            names.append(gpu if name is None else name)
            found.append(device if name is None else are.get(name, device))
        holder.shares[at] = replace(holder.shares[at], gpus=tuple(names))
        holder.devices[at] = tuple(found) if any(map(any, found)) else ()


def _nodes(cluster: Cluster | None) -> dict[tuple[str, NodeId], Node]:
    return {} if cluster is None else {(cluster.id, node.id): node for node in cluster.nodes}


def _names(node: Node | None) -> _Names:
    """Return the devices of a node, by name; empty if its machine counts as another node."""
    if node is None or node.duplicate_of:
        return {}
    devices = node.devices or [_UNKNOWN] * len(node.gpus)
    return {gpu.id: device for gpu, device in zip(node.gpus, devices, strict=True)}
