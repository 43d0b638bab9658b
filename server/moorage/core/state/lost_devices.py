"""The devices that leases hold and their nodes have no more. A part of `State`.

Such a device is free for no other lease while its own lasts, wherever it turns up: in another
machine, as a whole after it was divided, or divided after it was whole.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from moorage.core.state.reserved import Place
from moorage.model import DEVICE, DeviceId, Lease, RequestId
from moorage.policy import Fleet

__all__ = ["LostDevices"]

_Finder = Callable[[str], Place | None]
"""Returns the node that has a device, by the key of its UUID in `Node.identity`."""


@dataclass(slots=True)
class LostDevices:
    """Which devices are lost, by the lease that holds them."""

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
        """Have nothing be free of those that turn up somewhere."""
        for device in {each: None for lost in self.of.values() for each in lost}:
            for place in shown(device, find):
                row = fleet.row(*place)
                for column, other in enumerate(fleet.devices[row] if row is not None else ()):
                    if row is not None and _overlap(device, other):
                        fleet.gpu_free[row, column] = 0
                        fleet.touch(row)


def shown(device: DeviceId, find: _Finder) -> Iterator[Place]:
    """Yield the nodes that have a device, or a part or the whole of it."""
    places = (find(f"{DEVICE}{uuid.lower()}") for uuid in device if uuid)
    yield from dict.fromkeys(place for place in places if place is not None)


def _overlap(one: DeviceId, other: DeviceId) -> bool:
    """Return whether two are one device, or one is a part of the other."""
    mine, theirs = _lowered(one), _lowered(other)
    same = ((mine.uuid, theirs.uuid), (mine.uuid, theirs.parent), (mine.parent, theirs.uuid))
    return any(first == second != "" for first, second in same)


def _lowered(device: DeviceId) -> DeviceId:
    return DeviceId(device.uuid.lower(), device.parent.lower())
