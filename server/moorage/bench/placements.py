"""Makes the measured placements: one whole GPU each, in a closed loop over a fleet.

Moorage, kube-scheduler and every other peer get the same requests, the same number at a time.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from moorage.lab.errors import CommandError
from moorage.lab.trace import TraceNode

CONNECTIONS: Final = 8
WINDOW: Final = 8
UNDER_WAY: Final = CONNECTIONS * WINDOW
"""Number of requests under way in the closed loop; a peer may need a connection for each."""
GPUS_MIN: Final = 20
"""Least number of GPUs of a measured fleet: with fewer, a count of `Extent` may be 0."""
CPU_MILLI: Final = 1_000
MEMORY_MIB: Final = 1_024
"""MiB of memory for a placement beside its GPU, if the peer counts memory."""

Nodes = Sequence[TraceNode]


@dataclass(frozen=True, slots=True)
class Extent:
    """Numbers of placements one by one, placements in the closed loop, and woken requests."""

    singles: int
    requests: int
    wakes: int

    @classmethod
    def of(cls, nodes: Nodes) -> "Extent":
        """Return full counts for a fleet of 6,250 GPUs or more, else lower counts."""
        gpus = sum(node.gpus for node in nodes)
        return cls(min(500, gpus // 12), min(5_000, gpus * 4 // 5), min(30, gpus // 3))


def check_size(nodes: Nodes) -> None:
    """Refuse a fleet that is too small to measure on.

    Raises:
        CommandError: The fleet has too few GPUs.
    """
    if sum(node.gpus for node in nodes) < GPUS_MIN:
        raise CommandError(f"--nodes: expected nodes with {GPUS_MIN} GPUs or more in all")


class Booking(NamedTuple):
    """One placed GPU, as its client knows it.

    Args:
        handle: Identifies the placement to the `release` of its peer.
        node: The node of the GPU; empty if the peer only counts.
        device: The GPU of the node; empty if the peer does not name it.
    """

    handle: Any
    node: str = ""
    device: str = ""


Place = Callable[[], Awaitable[Booking | None]]


async def place_surely(place: Place) -> Booking:
    """Place a request on a fleet that has room; return the booking.

    Raises:
        CommandError: The peer refused the request.
    """
    booking = await place()
    if booking is None:
        raise CommandError("a request was refused while GPUs are free")
    return booking


async def closed_loop(place: Place, count: int) -> tuple[list[Booking], float]:
    """Place `count` requests, `UNDER_WAY` at a time; return the placements and the seconds.

    Raises:
        CommandError: The peer refused a request.
    """
    turns, placed = iter(range(count)), list[Booking]()

    async def work() -> None:
        for _ in turns:
            placed.append(await place_surely(place))

    started = time.perf_counter()
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(UNDER_WAY):
                group.create_task(work())
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return placed, time.perf_counter() - started


@contextlib.asynccontextmanager
async def while_serving(pids: Sequence[int]) -> AsyncIterator[None]:
    """Raise an error in the block once one of these processes ends: a client may wait forever."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    watched = [os.pidfd_open(pid) for pid in pids]

    async def refuse() -> None:
        await ended.wait()
        raise CommandError("the peer's server ended")

    for each in watched:
        loop.add_reader(each, ended.set)
    try:
        async with asyncio.TaskGroup() as group:
            guard = group.create_task(refuse())
            yield
            guard.cancel()
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    finally:
        for each in watched:
            loop.remove_reader(each)
            os.close(each)
