"""The peer Dask: in its semaphore, the scheduler counts leases in memory."""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from typing import Any, Final

from benchmarks.peers.servers import folder, free_port, library, program
from benchmarks.peers.session import Peer
from moorage.bench.placements import Booking, Nodes

REFUSED_SECONDS: Final = 1


class _Session:
    def __init__(self, pid: int, semaphore: Any) -> None:
        self.pids = [pid]
        self._semaphore = semaphore

    async def place(self) -> Booking | None:
        granted = await self._semaphore.acquire(timeout=REFUSED_SECONDS)
        return Booking(None) if granted else None

    async def release(self, booking: Booking) -> None:
        assert booking.handle is None
        await self._semaphore.release()

    async def wait(self, parked: asyncio.Event) -> Booking:
        sent = asyncio.ensure_future(self._semaphore.acquire())
        parked.set()
        assert await sent
        return Booking(None)


@contextlib.asynccontextmanager
async def _run(nodes: Nodes) -> AsyncIterator[_Session]:
    import distributed  # noqa: PLC0415  # Only this peer needs it.

    dask: Any = distributed  # Its classes have no types.

    port = free_port()
    where = ["--host", "127.0.0.1", "--port", str(port), "--no-dashboard", "--no-show"]
    command = [sys.executable, "-m", "distributed.cli.dask_scheduler", *where]
    with folder() as home:
        async with (
            program(command, port, home / "log") as pid,
            dask.Client(f"tcp://127.0.0.1:{port}", asynchronous=True) as client,
        ):
            count = sum(node.gpus for node in nodes)
            semaphore = dask.Semaphore(
                max_leases=count, name="gpus", scheduler_rpc=client.scheduler, loop=client.loop
            )
            await semaphore
            yield _Session(pid, semaphore)
            semaphore.refresh_callback.stop()


PEER: Final = Peer(
    name="dask",
    group="home-made",
    title="Dask, semaphore",
    decides="a number",
    stores="no",
    install="pip install distributed",
    version=lambda: library("distributed"),
    run=_run,
)
