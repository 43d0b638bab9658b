"""The interface of a measured peer, and the description of one."""

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
"""GPUs that are tried blindly; after those, a client reads which are free."""


class PeerSession(Protocol):
    """A peer that runs, with a fleet in it and clients connected."""

    @property
    def pids(self) -> Sequence[int]:
        """Return its servers, whose processor time counts."""

    async def place(self) -> Booking | None:
        """Return a GPU that is decided and stored; none where all are taken."""

    async def release(self, booking: Booking) -> None:
        """Give a GPU back."""

    async def wait(self, parked: asyncio.Event) -> Booking:
        """Return the next GPU that gets free; set `parked` as soon as this waits for one."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A peer and its description.

    Args:
        name: As on the command line.
        group: Whose it runs beside.
        title: As in the table.
        decides: What it chooses.
        stores: What outlives a crash once the client has its answer.
        install: The command that installs what it needs.
        version: Returns the version, or nothing where something is missing.
        run: Runs it over a fleet until the block ends.
        gpus_max: How many GPUs of the fleet it gets, where it does not end with all of them.
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
    """Return each GPU as its node and its number there."""
    return [(node.name, str(number)) for node in nodes for number in range(node.gpus)]


class Probes:
    """Random places among `count`, each once."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._random = random.Random(7)

    def __call__(self) -> Iterator[int]:
        """Yield the first few of them, in an order of chance."""
        place = self._random.randrange(self._count)
        step = self._random.randrange(1, self._count)
        while math.gcd(step, self._count) != 1:
            step = self._random.randrange(1, self._count)
        for number in range(min(TRIES, self._count)):
            yield (place + number * step) % self._count

    def shuffled(self, places: list[int]) -> list[int]:
        """Return places in an order of chance."""
        return self._random.sample(places, len(places))
