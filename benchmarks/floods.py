"""Measures how attacks of one tenant delay requests of another.

Each attack of `flood_attacks` has its own server, and runs in its own process on this machine. The
process that runs this module is the other tenant. Every 200 ms it sends a request, alternately over
a new and an open connection, before, during and after the attack. It also sends pings, which the
server's event loop answers at once: the slowest pong shows the longest turn of the loop.
"""

import asyncio
import contextlib
import json
import math
import os
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import httpx
import uvloop
from rich.table import Table
from websockets.frames import Opcode

from benchmarks.fast_client import FastClient, FastReply, connect, ignore, pack
from benchmarks.faults.history import quantile
from benchmarks.flood_attacks import ATTACKS, FULL, HERE, ask
from benchmarks.processes import marked_processes, memory_mib, read_schedule
from moorage.backends.local.machine import this_node
from moorage.backends.local.marks import WORKLOAD
from moorage.lab.errors import CommandError
from moorage.sandbox.host.processes import cpu_seconds
from moorage.testing.daemon_process import Running, daemon
from moorage_policies import catalog

ASK_SECONDS: Final = 0.2
"""Seconds between two requests of the bystander."""
PING_SECONDS: Final = 0.02
BEFORE_SECONDS: Final = 5.0
AFTER_ASK_SECONDS: Final = 0.05
"""Seconds between two requests of the bystander after an attack: enough requests in each second
for a p99."""
AFTER_SECONDS_MAX: Final = 20.0
"""Maximum seconds for the server to recover after an attack."""
LOOK_AFTER_SECONDS: Final = 1.0
BACK_FACTOR: Final = 2.0
"""The server has recovered if the p99 is at most this multiple of the p99 before the attack."""
WARM_SECONDS: Final = 2.0
ANSWER_SECONDS_MAX: Final = 60.0
STARTING_SECONDS_MAX: Final = 60.0
SETTLE_SECONDS_MAX: Final = 30.0
LOOK_SECONDS: Final = 0.2
GPUS: Final = 32
FULL_GPUS: Final = 2
BYSTANDERS: Final = 64
"""Number of machines with the GPUs that the bystander requests."""
MINE: Final = "H100"
"""The GPU model that only the bystander requests."""
VARIABLES: Final = {
    "MOORAGE_TOKENS": "mallory:m1,bob:b1,ops:o1",
    "MOORAGE_OPERATORS": "ops",
    "MOORAGE_BACKENDS": "local,memory",
}

Figures = dict[str, Any]


def floods(
    attacks: Sequence[str] = (),
    seconds: float = 60.0,
    progress: Callable[[str], None] = lambda _: None,
) -> Figures:
    """Play attacks one after the other, each on a new server.

    Args:
        attacks: Names of attacks; empty: all.
        seconds: Length of each attack.
        progress: Called with a line for each step.

    Raises:
        CommandError: An attack does not exist, or the server ended.
    """
    if unknown := [each for each in attacks if each not in ATTACKS]:
        known = ", ".join(ATTACKS)
        raise CommandError(f"there is no attack {', '.join(unknown)}; there are {known}")
    rows: list[Figures] = []
    for name in attacks or ATTACKS:
        progress(f"floods: {name}, {seconds:g} s …")
        rows.append(uvloop.run(_play(name, seconds)))
    return {"seconds": seconds, "cores": os.cpu_count(), "attacks": rows}


@dataclass(slots=True)
class _Phase:
    """The bystander's measurements in one period."""

    asks: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    """When each request was sent, and the seconds until its answer."""
    refused: list[str] = field(default_factory=list[str])
    pings: list[float] = field(default_factory=list[float])
    worked: list[float] = field(default_factory=list[float])
    """Processor time that the server's loop took from each request to its answer."""
    turns: list[float] = field(default_factory=list[float])
    """Processor time that the server's loop took from each ping to its pong."""

    @property
    def taken(self) -> list[float]:
        """The seconds that each answer took."""
        return [seconds for _, seconds in self.asks]


class _Bystander:
    """Sends normal requests as another tenant, the bystander, and measures the answers."""

    def __init__(self, running: Running) -> None:
        self._running = running
        self._number = 0
        self._wanted: dict[str | int, asyncio.Future[FastReply]] = {}
        self._open: FastClient
        self._pings: FastClient
        self._sent: list[asyncio.Future[None]] = []

    async def connect(self) -> None:
        """Open the connections of the whole run."""
        self._open = await self._connect()
        self._pings = await connect(self._running.ws, ignore, "b1", self._note_pong)

    async def close(self) -> None:
        await self._open.close()
        await self._pings.close()

    def _work_seconds(self) -> float:
        return read_schedule(self._running.pid)[0]

    async def _connect(self) -> FastClient:
        return await connect(self._running.ws, self._take_reply, "b1")

    def _take_reply(self, _: FastClient, reply: FastReply) -> None:
        if (wanted := self._wanted.pop(reply.id, None)) is not None and not wanted.done():
            wanted.set_result(reply)

    def _note_pong(self) -> None:
        if not (pong := self._sent.pop(0)).done():  # Its phase may have ended.
            pong.set_result(None)

    @contextlib.asynccontextmanager
    async def look(self, pause: float) -> AsyncIterator[_Phase]:
        """Send requests and pings until the block ends; then await the open answers."""
        phase = _Phase()
        asks: set[asyncio.Task[None]] = set()

        async def ask_on_time() -> None:
            while True:
                asks.add(asyncio.create_task(self._ask(phase)))
                await asyncio.sleep(pause)

        loops = [asyncio.create_task(ask_on_time()), asyncio.create_task(self._ping(phase))]
        try:
            yield phase
        finally:
            for each in loops:
                each.cancel()
            await asyncio.wait(loops)
            await asyncio.gather(*asks)

    async def _ask(self, phase: _Phase) -> None:
        self._number += 1
        identity = f"bob-{self._number}"
        fresh: FastClient | None = None
        started, worked = time.perf_counter(), self._work_seconds()
        try:
            async with asyncio.timeout(ANSWER_SECONDS_MAX):
                if self._number % 2:
                    fresh = await self._connect()
                reply = await self._say(fresh or self._open, {**ask(MINE), "id": identity})
                phase.asks.append((started, time.perf_counter() - started))
                phase.worked.append(self._work_seconds() - worked)
                if reply.lease is None:
                    phase.refused.append(reply.error.reason if reply.error else "no lease")
                else:
                    gone = {"op": "release", "lease": reply.lease.id, "token": reply.lease.token}
                    await self._say(fresh or self._open, {**gone, "id": f"{identity} release"})
        except (OSError, TimeoutError, CommandError) as error:
            phase.asks.append((started, time.perf_counter() - started))
            phase.refused.append(repr(error))
        finally:
            if fresh is not None:
                await fresh.close()

    async def _say(self, client: FastClient, message: Mapping[str, Any]) -> FastReply:
        wanted = asyncio.get_running_loop().create_future()
        self._wanted[message["id"]] = wanted
        client.send(pack({**message}))
        reply: FastReply = await wanted
        return reply

    async def _ping(self, phase: _Phase) -> None:
        frame = pack("", Opcode.PING)
        while True:
            pong = asyncio.get_running_loop().create_future()
            self._sent.append(pong)
            started, worked = time.perf_counter(), self._work_seconds()
            self._pings.send(frame)
            try:
                await pong
            finally:  # A request in flight at the end of the phase counts with its whole time.
                phase.pings.append(time.perf_counter() - started)
                phase.turns.append(self._work_seconds() - worked)
            await asyncio.sleep(PING_SECONDS)


async def _play(name: str, seconds: float) -> Figures:
    with (
        TemporaryDirectory(prefix="moorage-floods-") as folder,
        daemon(Path(folder), environment=VARIABLES) as running,
    ):
        _fill(running)
        bystander = _Bystander(running)
        await bystander.connect()
        try:
            async with bystander.look(ASK_SECONDS):
                await asyncio.sleep(WARM_SECONDS)
            async with bystander.look(AFTER_ASK_SECONDS) as before:
                await asyncio.sleep(BEFORE_SECONDS)
            memory, usage = memory_mib(running.pid), cpu_seconds(running.pid)
            began, (_, waited) = time.perf_counter(), read_schedule(running.pid)
            during, attacker, most = await _attack(name, seconds, running, bystander)
            lasted = time.perf_counter() - began
            cores = (cpu_seconds(running.pid) - usage) / lasted
            starved = (read_schedule(running.pid)[1] - waited) / lasted
            calm = quantile(before.taken, 0.99)
            back, after = await _until_back(bystander, calm)
            left = await _workloads(Path(folder))
        finally:
            await bystander.close()
    return {
        "attack": name,
        "before_p50_seconds": statistics.median(before.taken),
        "before_p99_seconds": calm,
        "p50_seconds": statistics.median(during.taken),
        "p99_seconds": quantile(during.taken, 0.99),
        "max_seconds": max(during.taken),
        "asks": len(during.asks),
        "refused": len(during.refused) + len(after.refused),
        "refusals": sorted({*during.refused, *after.refused})[:5],
        "back_seconds": back,
        "memory_mib": most - memory,
        "worked_before_p99_seconds": quantile(before.worked, 0.99),
        "worked_p50_seconds": statistics.median(during.worked),
        "worked_p99_seconds": quantile(during.worked, 0.99),
        "turn_seconds": max([*during.turns, *after.turns]),
        "loop_before_seconds": max(before.pings),
        "loop_seconds": max([*during.pings, *after.pings]),
        "server_cores": cores,
        "starved": starved,
        "load": os.getloadavg()[0],
        "workloads_left": left,
        **attacker,
    }


def _fill(running: Running) -> None:
    """Register machines of three models, and a policy."""

    def node(name: str, model: str, gpus: int) -> Figures:
        rows = [{"modelName": model, "memory": 81_920}] * gpus
        sizes = {"vcpus": {"count": 512}, "memory": 1_048_576}
        return {"id": name, "gpus": {"count": gpus, "gpus": rows}, **sizes}

    rows = [
        node(this_node(), HERE, GPUS),
        node("full", FULL, FULL_GPUS),
        *(node(f"n{number}", MINE, 8) for number in range(BYSTANDERS)),
    ]
    clusters = [{"id": row["id"], "nodes": {"count": 1, "nodeData": [row]}} for row in rows[:2]]
    clusters.append({"id": "lab", "nodes": {"count": BYSTANDERS, "nodeData": rows[2:]}})
    headers = {"Authorization": "Bearer o1"}
    with httpx.Client(base_url=running.http, trust_env=False, headers=headers) as http:
        for cluster in clusters:
            http.post("/clusters", json=cluster).raise_for_status()
        http.post("/policy", json=catalog.document("first_fit")).raise_for_status()


async def _attack(
    name: str, seconds: float, running: Running, bystander: _Bystander
) -> tuple[_Phase, Figures, float]:
    """Attack a server; return the figures of bystander and attacker, and the server's memory."""
    words = ["-m", "benchmarks.flood_attacks", name, running.ws, running.http, "m1"]
    attacker = await asyncio.create_subprocess_exec(
        *(sys.executable, *words, str(seconds)), stdout=asyncio.subprocess.PIPE
    )
    most = 0.0

    async def weigh() -> None:
        nonlocal most
        while True:
            most = max(most, memory_mib(running.pid))
            await asyncio.sleep(PING_SECONDS)

    weighing = asyncio.create_task(weigh())
    try:
        async with bystander.look(ASK_SECONDS) as during:
            assert attacker.stdout is not None
            said = await asyncio.wait_for(attacker.stdout.read(), seconds + STARTING_SECONDS_MAX)
    finally:
        weighing.cancel()
        if attacker.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                attacker.kill()
        await attacker.wait()
    if attacker.returncode:
        raise CommandError(f"the attacker {name} failed")
    return during, json.loads(said), most


async def _until_back(bystander: _Bystander, calm: float) -> tuple[float, _Phase]:
    """Return the seconds until requests are quick again (inf: never), and the measurements."""
    left_at = time.perf_counter()
    async with bystander.look(AFTER_ASK_SECONDS) as after:
        for second in range(int(AFTER_SECONDS_MAX)):
            pause = LOOK_AFTER_SECONDS
            await asyncio.sleep(pause)
            taken = [taken for sent, taken in after.asks if sent >= left_at + second]
            if taken and quantile(taken, 0.99) <= BACK_FACTOR * calm:
                return float(second), after
    return math.inf, after


async def _workloads(data: Path) -> int:
    """Return the number of workload processes that still run after the end of all leases."""
    mark = f"{WORKLOAD}={data}/"
    give_up_at = time.monotonic() + SETTLE_SECONDS_MAX
    while (left := list(marked_processes(mark))) and time.monotonic() < give_up_at:
        pause = LOOK_SECONDS
        await asyncio.sleep(pause)
    return len(left)


def table(figures: Mapping[str, Any]) -> Table:
    """Return a row per attack."""
    shown = Table(
        title=f"A tenant's requests beside another's attack of {figures['seconds']:g} s",
        caption=f"Milliseconds; back: seconds after the attack until p99 over a second is at most "
        f"{BACK_FACTOR:g} times that before; loop: its longest turn, before and during; "
        "worked: processor time of the loop from a request to its answer, p50 and p99; "
        "starved: how long the loop was ready to run and had no core; "
        f"{figures['cores']} cores",
    )
    shown.add_column("attack")
    for heading in (
        *("before", "p50", "p99", "max", "refused", "back", "MiB", "loop"),
        *("worked", "server", "attacker", "starved", "load", "left"),
    ):
        shown.add_column(heading, justify="right")
    for row in figures["attacks"]:
        shown.add_row(
            row["attack"],
            *(
                f"{row[f'{name}_seconds'] * 1000:.0f}"
                for name in ("before_p99", "p50", "p99", "max")
            ),
            f"{row['refused']} of {row['asks']}",
            f"{row['back_seconds']:.0f}",
            f"{row['memory_mib']:.0f}",
            f"{row['loop_before_seconds'] * 1000:.0f}, {row['loop_seconds'] * 1000:.0f}",
            f"{row['worked_p50_seconds'] * 1000:.0f}, {row['worked_p99_seconds'] * 1000:.0f}",
            *(f"{row[f'{name}_cores']:.2f}" for name in ("server", "attacker")),
            f"{row['starved']:.0%}",
            f"{row['load']:.1f}",
            str(row["workloads_left"]),
        )
    return shown
