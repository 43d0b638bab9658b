"""`python -m benchmarks.agents`: kills agents and the server under load, and cuts agents off.

Each agent reaches the server through its own proxy, which holds back bytes during a partition.
Clients request leases whose commands write numbered lines and then end. At the end, every command
must have started once and succeeded, with complete output, and no process may be left. Each
workload records its start in a common file, and creates a folder while it uses its GPU.

All agents are on this machine. Each declares eight GPUs, which a stand-in for NVML simulates.
"""

import asyncio
import contextlib
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from websockets.asyncio.client import connect
from websockets.exceptions import WebSocketException

from benchmarks.command_line import run_command
from benchmarks.faults.database import free_port
from benchmarks.faults.proxy import Proxy
from benchmarks.processes import marked_processes
from moorage.backends.local.marks import WORKLOAD
from moorage.testing.daemon_process import child, serve_variables
from moorage_client.services import Services
from moorage_policies import catalog as shipped

SEED: Final = 7
LOST_SECONDS: Final = 8
"""The server's setting `agent_lost_seconds`: a machine that is silent for longer counts as lost."""
LINES: Final = (10, 60)
"""Minimum and maximum number of lines that a command writes, one each tenth of a second."""
RESTART_SECONDS: Final = (0.0, 2.0)
"""Minimum and maximum seconds that an agent or the server stays down after a kill."""
SETTLE_SECONDS_MAX: Final = 240.0
"""Maximum seconds until one command ends, in spite of faults on its machine."""
ASKED_PAUSE_SECONDS: Final = 0.8
"""Seconds between two requests of one client."""
AGAIN_SECONDS: Final = 0.3
"""Seconds before an unanswered message is sent again."""
LOOKS: Final = 20
"""Number of timed starts through agents, and as many directly by the server."""
MOORED: Final = [sys.executable, "-P", "-m", "moorage"]

GPUS: Final = 8
"""GPUs of each agent."""
NVML: Final = """
import os
from types import SimpleNamespace as Record
class NVMLError(Exception): pass
class NVMLError_NotSupported(NVMLError): pass
class NVMLError_NotFound(NVMLError): pass
NVML_DEVICE_MIG_ENABLE = NVML_P2P_STATUS_OK = NVML_TEMPERATURE_GPU = 0
NVML_P2P_CAPS_INDEX_NVLINK = 0
def _lacks(*arguments): raise NVMLError_NotSupported
nvmlInit = nvmlShutdown = lambda: None
nvmlSystemGetDriverVersion = lambda: "1"
nvmlDeviceGetCount = lambda: GPUS
nvmlDeviceGetHandleByIndex = lambda index: index
nvmlDeviceGetUUID = lambda handle: f"GPU-{os.environ['DECLARED_MACHINE']}-{handle}"
nvmlDeviceGetName = lambda handle: "Stand-in"
nvmlDeviceGetPciInfo = lambda handle: Record(busId=f"00000000:0{handle}:00.0")
nvmlDeviceGetMemoryInfo = lambda handle: Record(total=1000 << 20, used=0, free=1000 << 20)
nvmlDeviceGetMaxMigDeviceCount = nvmlDeviceGetMigMode = nvmlDeviceGetP2PStatus = _lacks
nvmlDeviceGetUtilizationRates = lambda handle: Record(gpu=0)
nvmlDeviceGetPowerUsage = lambda handle: 70_000
nvmlDeviceGetTemperature = lambda handle, kind: 40
nvmlDeviceGetComputeRunningProcesses = lambda handle: []
""".replace("GPUS", str(GPUS))
"""The module that agents import in place of NVIDIA's bindings."""
WITH_GPU: Final = (
    "g={folder}/held/$MOORAGE_NODE_ID-$CUDA_VISIBLE_DEVICES; "
    'if mkdir "$g" 2>&-; then echo $$ >"$g/pid"; elif [ -d "/proc/$(cat "$g/pid")" ]; '
    'then echo "$g $MOORAGE_LEASE_ID" >>{folder}/shared; fi; {command}; rm -r "$g"; exit'
)
"""Shell text that creates a folder for the GPU, runs a command, and removes the folder.

If another live process has the folder, it records that the GPU is in two leases.
"""

Figures = dict[str, Any]
Message = dict[str, Any]


class FaultWorld:
    """Runs the server, the agents and the clients, and records what the clients observe.

    Args:
        folder: The folder for all files.
        agents: Number of agents.
    """

    def __init__(self, folder: Path, agents: int) -> None:
        self.folder = folder
        self.starts = folder / "starts"
        (folder / "held").mkdir()
        (folder / "nvml").mkdir()
        (folder / "nvml" / "pynvml.py").write_text(NVML)
        self.names = [f"box-{number}" for number in range(agents)]
        self.proxies: dict[str, Proxy] = {}
        self.running: dict[str, tuple[ExitStack, subprocess.Popen[str]]] = {}
        self.joining: list[float] = []
        self.leases: dict[str, tuple[int, asyncio.Task[tuple[str, int | None, str]]]] = {}
        self.refusals: Counter[str] = Counter()
        self.port = free_port()
        self.http_port = free_port()

    def _run(self, name: str, command: list[str], **environment: str) -> None:
        stack = ExitStack()
        with contextlib.ExitStack() as undo:
            undo.callback(stack.close)
            log = self.folder / f"{name}.log"
            variables = {**serve_variables(), **environment}
            process, _ = stack.enter_context(child(command, log, variables))
            undo.pop_all()
        self.running[name] = stack, process

    def serve(self) -> None:
        """Start the server; return when the server is ready."""
        ports = ["--port", str(self.port), "--http-port", str(self.http_port)]
        command = [*MOORED, "serve", *ports, "--data", str(self.folder / "data"), "--here"]
        self._run("server", command, MOORAGE_AGENT_LOST_SECONDS=str(LOST_SECONDS))

    def join(self, name: str) -> None:
        """Start an agent; return when the agent is connected."""
        data = str(self.folder / "data")
        shown: list[str] = []
        if not (self.folder / name).exists():
            words = [*MOORED, "agent", "token", "--cluster", "lab", "--data", data]
            done = subprocess.run(words, check=True, capture_output=True, text=True)  # noqa: S603  # Our own program.
            shown = ["--token", done.stdout.strip()]
        url = f"ws://127.0.0.1:{self.proxies[name].port}"
        place = ["--server", url, "--data", str(self.folder / name), "--name", name]
        began = time.monotonic()
        gpus = {"PYTHONPATH": str(self.folder / "nvml"), "DECLARED_MACHINE": name}
        self._run(name, [*MOORED, "agent", *place, "--no-machine-id", *shown], **gpus)
        if shown:
            self.joining.append(time.monotonic() - began)

    def kill(self, name: str) -> None:
        """End a program by SIGKILL."""
        stack, process = self.running.pop(name)
        process.kill()
        process.wait()
        stack.close()

    def close(self) -> None:
        """End all programs."""
        for stack, _ in self.running.values():
            stack.close()

    async def say(self, message: Message) -> Message:
        """Send one message repeatedly until it is answered."""
        while True:
            try:
                async with connect(f"ws://127.0.0.1:{self.port}", open_timeout=5) as connection:
                    await connection.send(json.dumps(message))
                    async with asyncio.timeout(30):
                        answer: Message = json.loads(await connection.recv())
                    return answer
            except (OSError, WebSocketException, TimeoutError):
                await asyncio.sleep(AGAIN_SECONDS)

    def request(self, key: str, command: str, cluster: str = "lab", gpus: int = 0) -> Message:
        """Return a request that starts a command."""
        if gpus:
            command = WITH_GPU.format(folder=self.folder, command=command)
        spec = {"category": "process", "command": ["sh", "-c", command]}
        return {
            "adhoc": True,
            "policy_rule_uri": "first_fit:1.0-stable",
            "inputs": {},
            "clusters": [cluster],
            "resources": {"cpu_milli": 10, "gpus": gpus},
            "lease": {"ttl_seconds": 3600, "idempotency_key": key},
            "provision": {"backend": "local", "spec": spec},
        }

    async def load(self, client: int, over: asyncio.Event) -> None:
        """Request leases until `over` is set."""
        chance = random.Random(SEED * 1000 + client)  # So that runs can be repeated.
        for number in itertools.count():
            if over.is_set():
                return
            lines = chance.randint(*LINES)
            command = (
                f"echo $MOORAGE_LEASE_ID >>{self.starts}; i=0; "
                f"while [ $i -lt {lines} ]; do echo $i; i=$((i+1)); sleep 0.1; done; echo whole"
            )
            answer = await self.say(self.request(f"{client}-{number}", command, gpus=1))
            if answer["success"]:
                reading = asyncio.create_task(self.output(answer["lease"]))
                self.leases[answer["lease"]["id"]] = lines, reading
            else:
                self.refusals[answer["error"]["code"]] += 1
            await asyncio.sleep(ASKED_PAUSE_SECONDS)

    async def output(self, lease: Message) -> tuple[str, int | None, str]:
        """Wait for the end of a workload; return its output, its exit code and any error."""
        text, offset = "", 0
        end = time.monotonic() + SETTLE_SECONDS_MAX
        trouble = ""
        while time.monotonic() < end:
            about = {"lease": lease["id"], "token": lease["token"], "offset": offset}
            answer = await self.say({"op": "logs", **about, "wait_seconds": 5})
            if not answer["success"]:
                trouble = answer["message"]
                seen = await self.say({"op": "status", "lease": lease["id"]})
                gone = answer["error"]["code"] == "not_found"
                if gone and seen["lease"]["state"] == "ended":  # The start may have failed.
                    return text, None, seen["lease"].get("reason") or trouble
                await asyncio.sleep(AGAIN_SECONDS)
                continue
            data = answer["data"]
            text, offset = text + data["text"], data["offset"]
            if data["over"]:
                return text, data["exit_code"], ""
        return text, None, trouble or "it did not end"

    async def first_line_seconds(self, cluster: str) -> float:
        """Return the seconds from a request to the first line of its command."""
        begin = time.monotonic()
        key = f"{cluster}-{begin}"
        answer = await self.say(self.request(key, "echo here; exec sleep 1000", cluster))
        lease = answer["lease"]
        about = {"lease": lease["id"], "token": lease["token"]}
        text = ""
        while not text:
            answer = await self.say({"op": "logs", **about, "wait_seconds": 5})
            text = answer.get("data", {}).get("text", "")
        took = time.monotonic() - begin
        await self.say({"op": "release", **about})
        return took


async def measure(folder: Path, counts: tuple[int, int, int, int]) -> Figures:
    """Play all faults under load; return the errors found, and durations.

    Args:
        folder: An empty folder.
        counts: Numbers of agents, kills of agents, kills of the server, and partitions.
    """
    agents, agent_kills, server_kills, partitions = counts
    world = FaultWorld(folder, agents)
    chance = random.Random(SEED)  # So that runs can be repeated.
    try:
        await asyncio.to_thread(world.serve)
        with Services(f"http://127.0.0.1:{world.http_port}", "") as services:
            with contextlib.suppress(Exception):  # `--here` has published it.
                services.publish_policy(shipped.document("first_fit"))
            (own,) = [each["id"] for each in services.clusters()]
        for name in world.names:
            world.proxies[name] = Proxy(world.port)
            await world.proxies[name].open()
            await asyncio.to_thread(world.join, name)
        _say(f"{agents} agents have joined")
        here = [await world.first_line_seconds(own) for _ in range(LOOKS)]
        there = [await world.first_line_seconds("lab") for _ in range(LOOKS)]
        over = asyncio.Event()
        loads = [asyncio.create_task(world.load(client, over)) for client in range(4)]
        faults: list[Callable[[], Any]] = []
        faults += [lambda: _restart(world, chance.choice(world.names), world.join, chance)] * (
            agent_kills
        )
        faults += [lambda: _restart(world, "server", lambda _: world.serve(), chance)] * (
            server_kills
        )
        cut: list[asyncio.Task[None]] = []

        async def partition() -> None:  # The other agents run on meanwhile.
            seconds = chance.choice((1, 2, 5, 10, 20, 60))
            proxy = world.proxies[chance.choice(world.names)]
            cut.append(asyncio.create_task(proxy.partition(seconds)))

        faults += [partition] * partitions
        chance.shuffle(faults)
        for fault in faults:
            await asyncio.sleep(chance.uniform(0.2, 1.5))
            await fault()
            _say(f"{len(world.leases)} leases")
        over.set()
        await asyncio.gather(*loads, *cut)
        _say("all faults were made")
        found = await _examine(world)
    finally:
        await asyncio.to_thread(world.close)
    found["left_behind"] = [pid for pid, _ in marked_processes(f"{WORKLOAD}={folder}")]
    return {
        "agents": agents,
        "gpus": GPUS * agents,
        "kills_of_agents": agent_kills,
        "kills_of_server": server_kills,
        "partitions": partitions,
        "join_seconds": round(statistics.median(world.joining), 3),
        "join_seconds_max": round(max(world.joining), 3),
        "first_line_ms": round(1000 * statistics.median(there), 1),
        "first_line_ms_local": round(1000 * statistics.median(here), 1),
        "first_line_ratio": round(statistics.median(there) / statistics.median(here), 2),
        "leases": len(world.leases),
        "refusals": dict(world.refusals),
        **found,
    }


async def _restart(
    world: FaultWorld, name: str, start: Callable[[str], None], chance: random.Random
) -> None:
    await asyncio.to_thread(world.kill, name)
    await asyncio.sleep(chance.uniform(*RESTART_SECONDS))
    await asyncio.to_thread(start, name)


async def _examine(world: FaultWorld) -> Figures:
    """Wait for the end of all workloads; return the errors of leases and workloads."""
    lost, failed, not_reached = [], [], []
    for name, (lines, reading) in world.leases.items():
        text, code, trouble = await reading
        if not text and "is not heard of since" in trouble:
            not_reached.append(name)
            continue
        whole = "".join(f"{number}\n" for number in range(lines)) + "whole\n"
        if text != whole:
            lost.append(f"{name}: {len(text)} of {len(whole)} characters; {trouble}")
        elif code != 0:
            failed.append(f"{name}: {code}; {trouble}")
    starts = Counter(world.starts.read_text().split() if world.starts.exists() else ())
    orphans = [name for name in starts if name not in world.leases]
    end = time.monotonic() + SETTLE_SECONDS_MAX
    while (running := _running(world)) and time.monotonic() < end:  # noqa: ASYNC110  # No event exists.
        await asyncio.sleep(AGAIN_SECONDS)  # Ended workloads are being stopped.
    shared = world.folder / "shared"
    return {
        "gpus_held_twice": shared.read_text().splitlines() if shared.exists() else [],
        "double": [name for name, times in starts.items() if times > 1],
        "ended_unstarted_on_a_lost_machine": len(not_reached),
        "started_all_the_same": [name for name in not_reached if name in starts],
        "never_started": [
            name for name in world.leases if name not in starts and name not in not_reached
        ],
        "orphaned": [*orphans, *(f"{each.parents[2].name}/{each.name}" for each in running)],
        "lost_output": lost,
        "ended_badly": failed,
    }


def _running(world: FaultWorld) -> list[Path]:
    return [each for each in world.folder.glob("*/local/running/*") if each.is_dir()]


def _say(text: str) -> None:
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {text}\n")


def main(
    agents: Annotated[int, typer.Option(help="How many agents.")] = 4,
    agent_kills: Annotated[int, typer.Option(help="kill -9 of agents.")] = 20,
    server_kills: Annotated[int, typer.Option(help="kill -9 of the server.")] = 10,
    partitions: Annotated[int, typer.Option(help="Partitions of 1 to 60 s.")] = 5,
) -> None:
    """Kill agents and the server under load, and cut agents off; print the faults."""
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as folder:
        counts = agents, agent_kills, server_kills, partitions
        figures = asyncio.run(measure(Path(folder), counts))
    typer.echo(json.dumps(figures, indent=2))
    wrong = (
        "gpus_held_twice",
        "double",
        "started_all_the_same",
        "never_started",
        "orphaned",
        "lost_output",
        "ended_badly",
        "left_behind",
    )
    raise typer.Exit(int(any(figures[each] for each in wrong)))


if __name__ == "__main__":
    run_command(main)
