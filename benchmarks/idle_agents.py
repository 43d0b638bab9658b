"""`python -m benchmarks.idle_agents`: the cost of idle agents for the server.

Each stand-in speaks the agents' protocol over its own socket: it joins with a token, reports that
nothing runs, and sends beats and metrics of a machine with eight GPUs. The server is a separate
process, whose processor time and memory are read from `/proc`.
"""

import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import typer
from websockets.asyncio.client import connect

from moorage.backends.agents import wire
from moorage.backends.agents.host import BEATS_A_MEASUREMENT
from moorage.daemon.agents.agent_store import AgentStore
from moorage.protocol.agent_socket import AGENT_PATH
from moorage.sandbox.host.processes import cpu_seconds
from moorage.storage.opening import open_storage
from moorage.testing.daemon_process import Running, daemon

WAIT_SECONDS_MAX: Final = 600.0
GPUS: Final = 8

Figures = dict[str, Any]


class IdleAgent:
    """Simulates the agent of one machine."""

    def __init__(self, url: str, token: str, number: int) -> None:
        self._url = url + AGENT_PATH
        self._token = token
        self._number = number
        self.joined = asyncio.Event()
        self.join_seconds = 0.0

    async def run(self, room: asyncio.Semaphore) -> None:
        """Join, and stay idle until cancelled."""
        async with room:
            begin = time.monotonic()
            headers = {"Authorization": f"Bearer {self._token}"}
            connection = await connect(
                self._url, additional_headers=headers, compression=None, ping_interval=None
            )
            node = _node(self._number)
            name = node["id"]
            hello = wire.AgentHello(wire.VERSION, "bench", name, node, 0.0, {})
            await connection.send(wire.encode(hello))
            welcome = wire.decode_instruction(await connection.recv(decode=False))
            assert isinstance(welcome, wire.AgentWelcome), welcome
            self.join_seconds = time.monotonic() - begin
        beating = asyncio.create_task(self._beat(connection, welcome.beat_seconds))
        try:
            while True:
                match wire.decode_instruction(await connection.recv(decode=False)):
                    case wire.AgentCall(id, wire.DiscoverOrder()):
                        done = wire.AgentDone(id, msgspec.Raw(wire.encode([])))
                        await connection.send(wire.encode(done))
                        self.joined.set()
        finally:
            beating.cancel()

    async def _beat(self, connection: Any, seconds: float) -> None:
        await asyncio.sleep(random.uniform(0, seconds))  # It is not a secret.
        for number in range(1 << 60):
            beat: wire.Report = wire.AgentBeat(time.monotonic())
            if number % BEATS_A_MEASUREMENT == 0:
                beat = _metrics()
            await connection.send(wire.encode(beat))
            await asyncio.sleep(seconds)


def _node(number: int) -> dict[str, Any]:
    gpus = [
        {"id": str(each), "uuid": f"GPU-{number}-{each}", "modelName": "H100", "memory": 81_920}
        for each in range(GPUS)
    ]
    group = {"count": GPUS, "memory": GPUS * 81_920, "gpus": gpus}
    return {"id": f"box-{number}", "vcpus": {"count": 96}, "memory": 1 << 20, "gpus": group}


def _metrics() -> wire.AgentMetrics:
    def some() -> float:
        return random.uniform(0, 100)  # It is not a secret.

    gpu = ("usedMem", "freeMem", "totalMem", "memUtilization", "cudaUtilization", "temperature")
    groups = {
        "memory": {"freeMem": some(), "usedMem": some(), "averageUtil": some()},
        "vcpu": {"load1m": some(), "load5m": some(), "load15m": some()},
        "storage": {"freeMem": some(), "usedMem": some()},
        "gpu": {"count": GPUS, "avgCudaUtilization": some()},
    }
    gpus = [{"gpu_id": each, **dict.fromkeys(gpu, some())} for each in range(GPUS)]
    return wire.AgentMetrics(groups, gpus, {}, time.monotonic())


def _memory_kib(pid: int) -> float:
    """Return the private memory of a process."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
    (line,) = (each for each in text.splitlines() if each.startswith("Private_Dirty:"))
    return float(line.split()[1])


async def measure(
    running: Running, data: Path, counts: tuple[int, int, int], seconds: float
) -> Figures:
    """Return the cost of idle agents for a server without other work.

    Args:
        running: The server.
        data: Its data folder.
        counts: Number of agents, of clusters that they join, and of agents that join at one time.
        seconds: How long agents are idle.
    """
    agents, clusters, at_once = counts
    store, now = AgentStore(open_storage("", data).agents()), time.time()
    until = now + WAIT_SECONDS_MAX
    tokens = [store.create_token(f"lab-{n % clusters}", now, until) for n in range(agents)]
    store.close()
    await asyncio.sleep(seconds / 4)  # The start is not measured.
    before = cpu_seconds(running.pid), _memory_kib(running.pid)
    await asyncio.sleep(seconds)
    alone = (cpu_seconds(running.pid) - before[0]) / seconds
    room = asyncio.Semaphore(at_once)
    began = time.monotonic()
    idle = [IdleAgent(running.ws, token, number) for number, token in enumerate(tokens)]
    tasks = [asyncio.create_task(each.run(room)) for each in idle]
    try:
        async with asyncio.timeout(WAIT_SECONDS_MAX):
            await asyncio.gather(*(each.joined.wait() for each in idle))
        all_joined = time.monotonic() - began
        await asyncio.sleep(seconds / 2)  # All metrics have arrived, and memory is freed.
        begin, then = cpu_seconds(running.pid), time.monotonic()
        await asyncio.sleep(seconds)
        used = (cpu_seconds(running.pid) - begin) / (time.monotonic() - then)
        memory = _memory_kib(running.pid) - before[1]
        gone = [each for each in tasks if each.done()]
    finally:
        for each in tasks:
            each.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    took = [each.join_seconds for each in idle]
    return {
        "agents": agents,
        "clusters": clusters,
        "at_once": at_once,
        "lost_connections": len(gone),
        "join_ms": round(1000 * statistics.median(took), 1),
        "join_ms_max": round(1000 * max(took), 1),
        "all_joined_seconds": round(all_joined, 2),
        "core_percent_without": round(100 * alone, 2),
        "core_percent": round(100 * used, 2),
        "core_percent_of_agents": round(100 * (used - alone), 2),
        "kib_an_agent": round(memory / agents, 1),
    }


def main(
    agents: Annotated[int, typer.Option(help="How many agents.")] = 1_000,
    clusters: Annotated[int, typer.Option(help="How many clusters they are in.")] = 10,
    seconds: Annotated[float, typer.Option(help="How long agents are idle.")] = 60.0,
    at_once: Annotated[int, typer.Option(help="How many join at one time, at most 60.")] = 8,
) -> None:
    """Connect idle agents to a server; print their cost."""
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as folder:
        data = Path(folder) / "data"
        with daemon(data) as running:
            figures = asyncio.run(measure(running, data, (agents, clusters, at_once), seconds))
    sys.stdout.write(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
