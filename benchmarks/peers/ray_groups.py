"""The peer Ray: placement groups on eight raylets, which share the GPUs of the fleet.

The fleet is eight large nodes, since each node needs its own raylet. A placement group has one
bundle, and nothing runs in it.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from benchmarks.peers.servers import library
from benchmarks.peers.session import Peer
from moorage.bench.placements import UNDER_WAY, Booking, Nodes

RAYLETS: Final = 8
GPUS_MAX: Final = 1_000
"""Maximum GPUs of the fleet: with all 6,212 GPUs, a run takes more than four minutes."""
REFUSED_SECONDS: Final = 5.0
"""Seconds after which a placement group without GPUs counts as refused; in Ray, it would wait."""
PARKED_SECONDS: Final = 0.2
WAIT_SECONDS_MAX: Final = 60.0
STORE_BYTES: Final = 80 << 20


class _Session:
    def __init__(self, pids: Sequence[int], threads: ThreadPoolExecutor) -> None:
        self.pids = pids
        self._threads = threads

    async def place(self) -> Booking | None:
        group = await self._call(_ask)
        if await self._call(group.wait, REFUSED_SECONDS):
            return Booking(group)
        await self.release(Booking(group))
        return None

    async def release(self, booking: Booking) -> None:
        from ray.util import remove_placement_group  # noqa: PLC0415  # This peer's alone.

        await self._call(remove_placement_group, booking.handle)

    async def wait(self, parked: asyncio.Event) -> Booking:
        group = await self._call(_ask)
        assert not await self._call(group.wait, PARKED_SECONDS)
        parked.set()
        assert await self._call(group.wait, WAIT_SECONDS_MAX)
        return Booking(group)

    async def _call(self, function: Any, *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)


def _ask() -> Any:
    from ray.util import placement_group  # noqa: PLC0415  # This peer's alone.

    return placement_group([{"CPU": 1, "GPU": 1}])


@contextlib.asynccontextmanager
async def _run(nodes: Nodes) -> AsyncIterator[_Session]:
    import ray  # noqa: PLC0415  # This peer's alone.
    from ray.cluster_utils import Cluster  # noqa: PLC0415  # As above.

    gpus = sum(node.gpus for node in nodes)
    sizes = [gpus // RAYLETS + (number < gpus % RAYLETS) for number in range(RAYLETS)]
    cluster: Any = Cluster()
    try:
        for size in sizes:
            # Start Ray in the main thread: only there may it set its signal handlers.
            cluster.add_node(num_cpus=size, num_gpus=size, object_store_memory=STORE_BYTES)
        ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
        servers = {"gcs_server", "raylet"}
        pids = [
            process.process.pid
            for node in cluster.list_all_nodes()
            for kind, processes in node.all_processes.items()
            if kind in servers
            for process in processes
        ]
        with ThreadPoolExecutor(UNDER_WAY + 2) as threads:
            yield _Session(pids, threads)
    finally:
        ray.shutdown()
        cluster.shutdown()


PEER: Final = Peer(
    name="ray",
    group="schedulers",
    title=f"Ray, placement groups, {GPUS_MAX:,} GPUs:",
    decides=f"one of {RAYLETS} nodes, by a CPU and a GPU",
    stores="no",
    install="pip install 'ray[default]'",
    version=lambda: library("ray"),
    run=_run,
    gpus_max=GPUS_MAX,
)
