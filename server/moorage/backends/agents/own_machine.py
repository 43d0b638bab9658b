"""The server's own machine as a member of gangs, beside machines with agents.

`FleetBackend` makes an `OwnMachine` for each node that stands for this machine. The daemon gets
this machine's metrics from `OwnLook`, and the metrics of other machines from agents.
"""

from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import ip_address
from typing import TypeVar, cast

from moorage.backends.agents import wire
from moorage.backends.agents.carrying import carry_out
from moorage.backends.base import (
    Backend,
    Order,
    UnknownWorkloadError,
    UnsupportedSpecError,
    WorkloadReport,
)
from moorage.backends.local.measurements import Measurement
from moorage.backends.local.orders import free_port
from moorage.model import ClusterId, NodeId

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class OwnLook:
    """Finds and measures this machine.

    Args:
        place: Returns the inventory's node for this machine; None if this machine is not
            registered.
        measure: Returns this machine's metrics, and the GPUs that foreign processes use. Blocks.
    """

    place: Callable[[], tuple[str, str] | None]
    measure: Callable[[], Measurement]


class OwnMachine:
    """This machine as a member of gangs; the counterpart of `AgentMachine`."""

    reachable = True
    lost = False

    def __init__(self, place: tuple[ClusterId, NodeId], backend: Backend) -> None:
        self.place = place
        self._backend = backend

    async def look(
        self, order: wire.BackendOrder | wire.FileOrder, kind: type[T], *, again: bool = True
    ) -> T:
        """Carry out an order on this machine, and return its result."""
        del kind, again  # A call in this process is never repeated.
        return cast("T", await carry_out(self._backend, order))

    async def start(self, order: Order) -> WorkloadReport:
        return await self._backend.start(order)

    async def has(self, order: Order) -> bool:
        """Return whether a workload is on this machine."""
        return await has_workload(self._backend, order.id)

    async def stop(self, workload: str, stop_seconds_max: float | None) -> None:
        await self._backend.stop(workload, stop_seconds_max)

    def meeting(self, address: str) -> wire.Meeting:
        """Return the given address of this machine with a free port."""
        return wire.Meeting(address, free_port(""))


async def has_workload(backend: Backend, workload: str) -> bool:
    """Return whether a backend knows a workload."""
    try:
        await backend.status(workload)
    except UnknownWorkloadError:
        return False
    return True


def refuse_unreachable(own: str, others: list[str]) -> None:
    """Refuse a gang if `own` is a loopback address: other machines reach only themselves there.

    Args:
        own: The address of this machine that agents connect to.
        others: Addresses of the machines with agents.

    Raises:
        UnsupportedSpecError: Other machines cannot reach this one at `own`.
    """
    if _is_loopback(own) and not all(map(_is_loopback, others)):
        raise UnsupportedSpecError(
            f"agents reach this server at {own}, through a proxy on their machine; members of a "
            "gang on other machines cannot reach it there: set `local_address`"
        )


def _is_loopback(address: str) -> bool:
    try:
        return ip_address(address).is_loopback
    except ValueError:  # It is a name.
        return address == "localhost"
