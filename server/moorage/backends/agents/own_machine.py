"""The server's own machine as a member of gangs, beside machines with agents.

`FleetBackend` makes one for each node that this machine is. By `OwnLook` the daemon sees what it
does, as agents say it of theirs.
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
    """Looks at this machine.

    Args:
        place: Returns the node of the inventory that it is; None: it is not registered.
        measure: Returns its metrics, and its GPUs that others use. Blocks.
    """

    place: Callable[[], tuple[str, str] | None]
    measure: Callable[[], Measurement]


class OwnMachine:
    """This machine, as `AgentMachine` is another one."""

    reachable = True
    lost = False

    def __init__(self, place: tuple[ClusterId, NodeId], backend: Backend) -> None:
        self.place = place
        self._backend = backend

    async def look(
        self, order: wire.BackendOrder | wire.FileOrder, kind: type[T], *, again: bool = True
    ) -> T:
        """Carry an order out; see `AgentMachine.look`."""
        del kind, again  # It is done once, in this process.
        return cast("T", await carry_out(self._backend, order))

    async def start(self, order: Order) -> WorkloadReport:
        return await self._backend.start(order)

    async def has(self, order: Order) -> bool:
        """Return whether a workload is here."""
        return await has_workload(self._backend, order.id)

    async def stop(self, workload: str, stop_seconds_max: float | None) -> None:
        await self._backend.stop(workload, stop_seconds_max)

    def meeting(self, address: str) -> wire.Meeting:
        """Return an address of this machine with a port that is free."""
        return wire.Meeting(address, free_port(""))


async def has_workload(backend: Backend, workload: str) -> bool:
    """Return whether a backend knows a workload."""
    try:
        await backend.status(workload)
    except UnknownWorkloadError:
        return False
    return True


def refuse_unreachable(own: str, others: list[str]) -> None:
    """Refuse a gang whose members on other machines would look for this one on their own.

    Args:
        own: Address of this machine, as agents reach it.
        others: Addresses of the machines with agents.

    Raises:
        UnsupportedSpecError: It is so.
    """
    if _is_loopback(own) and not all(map(_is_loopback, others)):
        raise UnsupportedSpecError(
            f"agents reach this server at {own}, by a proxy of its own, so that members of a gang "
            "on other machines do not find it: set `local_address`"
        )


def _is_loopback(address: str) -> bool:
    try:
        return ip_address(address).is_loopback
    except ValueError:  # A name.
        return address == "localhost"
