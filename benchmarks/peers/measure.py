"""Measures every peer by the same protocol.

A peer gets single requests, one after the other; then several at a time, and the next after each
answer; then requests until the last GPU is taken. On the full fleet, one more request waits for
another client's release. No GPU may be booked twice at any time.
"""

import asyncio
import os
import time
from collections import Counter
from collections.abc import Sequence
from statistics import median
from typing import Final

import msgspec

from benchmarks.peers.session import Peer, PeerSession
from moorage.bench.placements import (
    Booking,
    Extent,
    Nodes,
    closed_loop,
    place_surely,
    while_serving,
)
from moorage.bench.processor_time import processor_time_of
from moorage.lab.errors import CommandError

PARK_SECONDS: Final = 0.05
STEP_SECONDS_MAX: Final = 240.0


class Figures(msgspec.Struct, frozen=True):
    """The figures of one run of one peer.

    Args:
        load: The machine's load average over the minute before the run.
        per_second: Placements per second while clients send each request after an answer.
        single_ms: Median time of a single request.
        wake_ms: Median time from the sending of a release to the grant of the waiting request.
        cpu_ms: Processor time of the servers for one placement, measured with `per_second`.
    """

    load: float
    per_second: float
    single_ms: float
    wake_ms: float
    cpu_ms: float


async def measure(peer: Peer, nodes: Nodes) -> Figures:
    """Run all measurements of one peer.

    Raises:
        CommandError: The peer failed, its server ended, or the peer booked a GPU twice or did not
            fill the fleet.
    """
    try:
        async with peer.run(nodes) as session, while_serving(session.pids):
            return await _figures(peer.name, session, nodes)
    except CommandError:
        raise
    except Exception as error:  # Clients of peers have errors of their own.
        raise CommandError(repr(error)) from error


async def _figures(name: str, session: PeerSession, nodes: Nodes) -> Figures:
    load, extent = os.getloadavg()[0], Extent.of(nodes)
    held: list[Booking] = []
    single = await _singles(session, extent.singles, held)
    before = _processor_seconds(session)
    async with asyncio.timeout(STEP_SECONDS_MAX):
        looped, seconds = await closed_loop(session.place, extent.requests)
    worked = _processor_seconds(session) - before
    held += looped
    await _fill(session, nodes, held)
    check(name, nodes, held)
    async with asyncio.timeout(STEP_SECONDS_MAX):
        wake = await _wakes(session, extent.wakes, held)
    check(name, nodes, held)
    return Figures(
        load=load,
        per_second=extent.requests / seconds,
        single_ms=1e3 * single,
        wake_ms=1e3 * wake,
        cpu_ms=1e3 * worked / extent.requests,
    )


def check(name: str, nodes: Nodes, held: Sequence[Booking]) -> None:
    """Check that each GPU of the fleet is booked, and none is booked twice.

    Raises:
        CommandError: A GPU is booked twice, a node has too many bookings, or the fleet is not full.
    """
    sizes = {node.name: node.gpus for node in nodes if node.gpus}
    if len(held) != sum(sizes.values()):
        raise CommandError(f"{name}: {len(held)} bookings of {sum(sizes.values())} GPUs")
    exact = Counter((each.node, each.device) for each in held if each.device)
    twice = [gpu for gpu, times in exact.items() if times > 1]
    by_node = Counter(each.node for each in held if each.node)
    twice += [(node, "") for node, times in by_node.items() if times > sizes[node]]
    if twice:
        raise CommandError(f"{name} booked twice: {twice[:5]}")


async def _singles(session: PeerSession, count: int, held: list[Booking]) -> float:
    taken: list[float] = []
    for _ in range(count):
        started = time.perf_counter()
        held.append(await place_surely(session.place))
        taken.append(time.perf_counter() - started)
    return median(taken)


async def _fill(session: PeerSession, nodes: Nodes, held: list[Booking]) -> None:
    missing = sum(node.gpus for node in nodes) - len(held)
    filled, _ = await closed_loop(session.place, missing)
    held += filled
    if await session.place() is not None:
        raise CommandError("a request was granted although no GPU is free")


async def _wakes(session: PeerSession, count: int, held: list[Booking]) -> float:
    taken: list[float] = []
    for number in range(count):
        parked = asyncio.Event()
        waiting = asyncio.ensure_future(session.wait(parked))
        await parked.wait()
        # The time until the request is in the peer's queue; the pause varies, so that it meets all
        # moments of a polling peer.
        await asyncio.sleep(PARK_SECONDS * (1 + number % 7 / 3))
        started = time.perf_counter()
        released = asyncio.ensure_future(session.release(held.pop(number)))
        held.append(await waiting)
        taken.append(time.perf_counter() - started)
        await released
    return median(taken)


def _processor_seconds(session: PeerSession) -> float:
    return sum(sum(processor_time_of(pid)) for pid in session.pids)
