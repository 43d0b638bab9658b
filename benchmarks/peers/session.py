"""The classes that describe a peer and that book its GPUs."""

import asyncio
import contextlib
import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal, Protocol

from moorage.bench.placements import Booking, Nodes

Group = Literal["home-made", "schedulers"]


TRIES: Final = 16
"""Number of GPUs that a client tries blindly before it reads which GPUs are free."""


class PeerSession(Protocol):
    """Books and releases GPUs at a running peer, through clients that are connected to it."""

    @property
    def pids(self) -> Sequence[int]:
        """Return the processes of the peer's servers, whose CPU time counts."""

    async def place(self) -> Booking | None:
        """Book a GPU, and return the stored booking; None if all GPUs are taken."""

    async def release(self, booking: Booking) -> None:
        """Release a GPU."""

    async def wait(self, parked: asyncio.Event) -> Booking:
        """Book the next GPU that is released; set `parked` once this call waits for one."""


@dataclass(frozen=True, slots=True)
class Peer:
    """Describes a peer, and how to run it.

    Args:
        name: Name on the command line.
        group: Group whose peers run one after the other, beside one run of Moorage.
        title: Title in the table.
        decides: What the peer decides, in words.
        stores: The data that survive a crash after the client has its answer.
        install: The command that installs what the peer needs.
        version: Returns the version; None if a program is missing.
        run: Runs the peer with a fleet until the block ends.
        gpus_max: Maximum GPUs of the peer's fleet, if more would take too long.
    """

    name: str
    group: Group
    title: str
    decides: str
    stores: str
    install: str
    version: Callable[[], str | None]
    run: Callable[[Nodes], contextlib.AbstractAsyncContextManager[PeerSession]]
    gpus_max: int | None = None

    def part(self, fleet: Nodes) -> Nodes:
        """Return the first nodes of a fleet, with at most `gpus_max` GPUs."""
        if self.gpus_max is None:
            return fleet
        sums = itertools.accumulate(node.gpus for node in fleet)
        return [node for node, gpus in zip(fleet, sums, strict=True) if gpus <= self.gpus_max]


def devices(nodes: Nodes) -> list[tuple[str, str]]:
    """Return each GPU as its node and its number on that node."""
    return [(node.name, str(number)) for node in nodes for number in range(node.gpus)]


class Probes:
    """Draws random indices below `count`, each at most once."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._random = random.Random(7)

    def __call__(self) -> Iterator[int]:
        """Yield at most `TRIES` indices, in random order."""
        place = self._random.randrange(self._count)
        step = self._random.randrange(1, self._count)
        while math.gcd(step, self._count) != 1:
            step = self._random.randrange(1, self._count)
        for number in range(min(TRIES, self._count)):
            yield (place + number * step) % self._count

    def shuffled(self, places: list[int]) -> list[int]:
        """Return these indices in random order."""
        return self._random.sample(places, len(places))
