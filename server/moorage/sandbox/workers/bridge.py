"""The bridge: a process of the daemon that speaks to Ray, and starts an agent on each of its nodes.

`sandbox.host.workers` starts the bridge with one end of a socket. The bridge ends when the socket
closes, and so do all agents, which are actors of its job. If Ray cannot be reached or is lost, the
bridge reports that and ends, and the daemon starts another one.
"""

import asyncio
import contextlib
import json
import logging
import os
import socket
import sys
from collections.abc import Callable
from typing import Any, Final

import msgspec
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from moorage.records.json_values import JsonMapping
from moorage.sandbox.wire import relay
from moorage.sandbox.wire.frames import HEADER
from moorage.sandbox.workers.agent import Agent

CONNECT_SECONDS_MAX: Final = 60.0
"""Longest time to connect to Ray, or to list its nodes, in seconds."""
NODES_SECONDS: Final = 2.0
"""Seconds between two checks of Ray's nodes."""
START_SECONDS_MAX: Final = 60.0
"""Longest time from the order of an agent to its passed self-test; Ray may lack free processors."""
LOST_PAUSE_SECONDS: Final = 3.0
"""Pause before another agent is started on a node where an agent was lost."""
REFUSED_PAUSE_SECONDS: Final = 60.0
"""Pause on a node where no agent could start, or none may run policies."""
STOP_SECONDS_MAX: Final = 3.0
"""Longest time to disconnect from Ray, in seconds."""


class Bridge:
    """One connection to Ray."""

    def __init__(self, settings: relay.AgentSettings, writer: asyncio.StreamWriter) -> None:
        self._settings = settings
        self._writer = writer
        self._agents: dict[str, _RunningAgent] = {}
        """Agents by the worker's name."""
        self._tasks: dict[str, asyncio.Task[None]] = {}
        """The task that keeps an agent running, by the node's id."""
        self._started = 0

    def say(self, message: relay.FromBridge) -> None:
        """Send a message to the daemon."""
        self._writer.write(relay.pack(message))

    async def connect(self) -> None:
        """Connect to Ray, and check its nodes from then on."""
        async with asyncio.timeout(CONNECT_SECONDS_MAX):
            await asyncio.to_thread(
                ray.init,
                address=self._settings.address,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
        while True:
            async with asyncio.timeout(CONNECT_SECONDS_MAX):
                nodes = await asyncio.to_thread(ray.nodes)
            for node in nodes:
                name, cells = node["NodeID"], self._cells_on(node)
                if cells and name not in self._tasks:
                    self._tasks[name] = asyncio.create_task(self._keep(name, node, cells))
            await asyncio.sleep(NODES_SECONDS)

    async def obey(self, reader: asyncio.StreamReader) -> None:
        """Carry out the daemon's orders until the daemon disconnects."""
        while True:
            (length,) = HEADER.unpack(await reader.readexactly(HEADER.size))
            message = relay.decode_to_bridge(await reader.readexactly(length))
            if isinstance(message, relay.Ping):
                self.say(relay.Pong(message.number))
                continue
            agent = self._agents.get(message.worker)
            if agent is None:
                continue  # The agent was lost meanwhile.
            if isinstance(message, relay.Carry):
                agent.push(message.bodies)
            else:
                agent.drop(message.reason)

    async def stop(self, *tasks: "asyncio.Future[None]") -> None:
        """Stop calling Ray, since Ray ends processes that call it during its shutdown."""
        ending = [*tasks, *self._tasks.values()]
        for task in ending:
            task.cancel()
        await asyncio.wait(ending, timeout=1)

    def _cells_on(self, node: JsonMapping) -> int:
        cores = int(node.get("Resources", {}).get("CPU", 0))
        return min(cores, self._settings.cells) if node["Alive"] else 0

    async def _keep(self, node_id: str, node: JsonMapping, cells: int) -> None:
        """Run an agent on a node until the agent is lost; then start no agent there for a while."""
        self._started += 1
        place = f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']}, {node_id[:8]})"
        agent = _RunningAgent(f"{self._started}/{node_id[:8]}")
        was_up = False
        try:
            report = await asyncio.wait_for(
                agent.start(node_id, cells, self._settings), START_SECONDS_MAX
            )
            if report.refused:
                reason = f"the node cannot run policies: {report.refused}"
            else:
                was_up = True
                self._agents[agent.name] = agent
                self.say(relay.WorkerUp(agent.name, place, cells, report.layers, report.probes))
                reason = await agent.serve(self.say)
        except TimeoutError:
            reason = (
                f"Ray started no agent within {START_SECONDS_MAX:g} s;"
                f" are {cells} processors free there?"
            )
        except Exception as error:  # noqa: BLE001  # No error of one agent ends another.
            reason = f"{type(error).__name__}: {error}"
        self._agents.pop(agent.name, None)
        agent.end()
        name = agent.name if was_up else ""
        self.say(relay.WorkerDown(name, place, _brief(reason)))
        await asyncio.sleep(LOST_PAUSE_SECONDS if was_up else REFUSED_PAUSE_SECONDS)
        del self._tasks[node_id]


class _RunningAgent:
    """The agent of one node, as an actor of Ray."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._actor: Any = None
        self._pushes = 0
        self._dropped: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def start(self, node_id: str, cells: int, settings: relay.AgentSettings) -> relay.Report:
        """Start the agent on a node, with a processor for each cell."""
        self._actor = (
            ray.remote(Agent)
            .options(
                num_cpus=cells,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
                max_restarts=0,
                max_task_retries=0,
            )
            .remote()
        )
        packed = await self._actor.start.remote(msgspec.msgpack.encode(settings))
        return msgspec.msgpack.decode(packed, type=relay.Report)

    def push(self, bodies: list[bytes]) -> None:
        """Send messages to the agent; if the agent has died, a failed pull shows that."""
        self._actor.push.remote(self._pushes, bodies)
        self._pushes += 1

    async def serve(self, say: Callable[[relay.FromBridge], None]) -> str:
        """Carry messages of the agent until it is lost, and return the reason."""
        while True:
            pull = asyncio.ensure_future(_outcome(self._actor.pull.remote()))
            await asyncio.wait([pull, self._dropped], return_when=asyncio.FIRST_COMPLETED)
            if self._dropped.done():
                pull.cancel()
                return self._dropped.result()
            if bodies := pull.result():
                say(relay.Carry(self.name, bodies))

    def drop(self, reason: str) -> None:
        if not self._dropped.done():
            self._dropped.set_result(reason)

    def end(self) -> None:
        """Kill the actor, with all that it forked."""
        if self._actor is not None:
            with contextlib.suppress(Exception):  # The actor is gone already, or Ray is.
                ray.kill(self._actor)


async def _outcome(reference: Any) -> Any:
    return await reference


def _brief(reason: str) -> str:
    """Return the end of a long message of Ray; its beginning is only a traceback."""
    lines = [line.strip() for line in reason.splitlines() if line.strip()]
    text = "; ".join([lines[0], *lines[1:][-2:]]) if lines else "no reason was given"
    return text[: relay.REASON_CHARACTERS_MAX]


async def _run(settings: relay.AgentSettings, line: socket.socket) -> None:
    reader, writer = await asyncio.open_unix_connection(sock=line)
    bridge = Bridge(settings, writer)
    obeying = asyncio.ensure_future(bridge.obey(reader))
    connected = asyncio.ensure_future(bridge.connect())
    await asyncio.wait([obeying, connected], return_when=asyncio.FIRST_COMPLETED)
    if connected.done() and (error := connected.exception()) is not None:
        bridge.say(relay.Unreachable(_brief(f"{type(error).__name__}: {error}")))
        with contextlib.suppress(OSError):
            await writer.drain()
    await bridge.stop(obeying, connected)
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(asyncio.to_thread(ray.shutdown), STOP_SECONDS_MAX)
    os._exit(0)  # Python would wait for a thread that Ray blocks.


def main() -> None:
    """Serve the daemon until it closes the line."""
    described = json.loads(sys.argv[1])
    settings = msgspec.convert(described["settings"], relay.AgentSettings)
    asyncio.run(_run(settings, socket.socket(fileno=described["line"])))


if __name__ == "__main__":
    main()
