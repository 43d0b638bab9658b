"""Manages the daemon's workers, which run cells on the nodes of a Ray cluster, for `pool`.

The daemon never imports the library `ray`. A separate process, the bridge, connects to Ray and
starts an agent on each node. The daemon kills the bridge if it hangs and restarts it if it ends.
While no worker is up, all cells are on this machine.
"""

import asyncio
import importlib.util
import json
import os
import re
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Final, cast

import msgspec

from moorage.extras import install_command
from moorage.launch import command
from moorage.sandbox.host.channel import Cell
from moorage.sandbox.host.contract import JailError, Mode, WorkerSettings
from moorage.sandbox.host.processes import CellProcess
from moorage.sandbox.host.spawner import Spawner
from moorage.sandbox.host.worker import RemoteWorker
from moorage.sandbox.wire import frames, relay
from moorage.sandbox.wire.limits import Limits

PING_SECONDS: Final = 1.0
"""Seconds between two pings to the bridge and the agents."""
WORKER_SILENT_SECONDS_MAX: Final = 5.0
"""Longest silence of an agent; after that, its cells count as lost."""
BRIDGE_SILENT_SECONDS_MAX: Final = 15.0
"""Longest silence of the bridge; after that, it is killed."""
PAUSE_SECONDS_MIN: Final = 1.0
"""Pause before an ended bridge is started again, doubled with each failure in a row."""
PAUSE_SECONDS_MAX: Final = 30.0
STABLE_SECONDS: Final = 60.0
"""A bridge that ran for these seconds resets the pause before restarts."""
STOP_SECONDS_MAX: Final = 5.0
"""How long the bridge may take to disconnect from Ray; then it is killed."""
FINDINGS_MAX: Final = 256
"""Maximum nodes for which the reason why they have no worker is stored."""
_ENVIRONMENT: Final = re.compile(
    r"(?:RAY_|PYTHON|LC_|GRPC_|grpc_).*|PATH|HOME|USER|LANG|TMPDIR|TZ|VIRTUAL_ENV|LD_LIBRARY_PATH"
    r"|SSL_CERT_FILE|SSL_CERT_DIR|no_proxy|NO_PROXY"
)
"""Environment variables for the bridge: those that Ray may need, and no secrets."""


class _Line(asyncio.Protocol):
    """The connection to the bridge, over a socket."""

    def __init__(self, take: Callable[[relay.FromBridge], None]) -> None:
        self.closed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._take = take
        self._reader = frames.FrameReader(relay.LINE_BYTES_MAX)
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        try:
            for body in self._reader.feed(data):
                self._take(relay.decode_from_bridge(body))
        except msgspec.MsgspecError as error:
            self.end(f"the bridge broke its protocol: {error}")
        if self._reader.error:
            self.end(f"the bridge broke its protocol: {self._reader.error}")

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        self.end("the bridge ended")

    def write(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def end(self, reason: str) -> None:
        if not self.closed.done():
            self.closed.set_result(reason)
        if self._transport is not None:
            self._transport.close()


@dataclass
class _Bridge:
    """One running bridge process."""

    process: subprocess.Popen[bytes]
    line: _Line
    outgoing: dict[str, list[bytes]] = field(default_factory=dict[str, list[bytes]])
    reason: str = ""
    pinged_at: float = 0.0
    """Time of the unanswered ping to the bridge; 0 if none is unanswered."""


class Workers:
    """Starts the bridge to Ray, and manages all workers that the bridge reports.

    Args:
        settings: The address of Ray, and the receiver of its reports.
        limits: All limits of the sandbox.
        mode: `jail`, or `unsafe` without the jail.
        make: Wraps a spawned process as a cell; see `Spawner`.
        changed: Called when a worker is added, so that work need not wait.
        counters: Counts `worker_starts`, `worker_losses` and `bridge_restarts`.

    Attributes:
        findings: The latest state of each known node, and of Ray.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        limits: Limits,
        mode: Mode,
        make: Callable[[CellProcess, Spawner], Cell],
        changed: Callable[[], None],
        counters: Counter[str],
    ) -> None:
        self.findings: dict[str, str] = {}
        self._settings = settings
        self._limits = limits
        self._mode: Mode = mode
        self._make = make
        self._changed = changed
        self._counters = counters
        self._workers: dict[str, RemoteWorker] = {}
        self._bridge: _Bridge | None = None
        self._running: asyncio.Task[None] | None = None
        self._looked_at = 0.0

    # Methods for the pool ------------------------------------------------------------------

    @property
    def up(self) -> list[RemoteWorker]:
        """The workers that can have cells."""
        return list(self._workers.values())

    @property
    def cells_max(self) -> int:
        """The largest number of cells on all workers."""
        return sum(worker.cells_max for worker in self._workers.values())

    def choose(self, avoided: Iterable[str]) -> RemoteWorker | None:
        """Return the worker with the most room, except avoided ones; None if none has room."""
        free = [each for each in self._workers.values() if each.name not in avoided]
        chosen = max(free, key=lambda each: each.room, default=None)
        return chosen if chosen is not None and chosen.room > 0 else None

    def living(self) -> Iterable[Cell]:
        """Yield the live cells of all workers."""
        for worker in self._workers.values():
            yield from worker.living.values()

    # Life ----------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the bridge without waiting; Ray may become reachable later.

        Raises:
            JailError: Ray is not installed here.
        """
        if importlib.util.find_spec("ray") is None:
            raise JailError("workers", f"`policy_workers` needs {install_command('ray')}")
        self._running = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        """Disconnect from Ray and end the bridge, within a limited time."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)

    async def _run(self) -> None:
        pause = PAUSE_SECONDS_MIN
        while True:
            began = time.monotonic()
            try:
                bridge = self._bridge = await self._open()
            except OSError as error:
                self._find("Ray", f"the process that speaks to it cannot be started: {error}")
                await asyncio.sleep(PAUSE_SECONDS_MAX)
                continue
            try:
                reason = await self._serve(bridge)
            finally:
                self._bridge = None
                for name in list(self._workers):
                    self._lose(name, "the connection to Ray was lost")
                await self._end(bridge)
            self._counters["bridge_restarts"] += 1
            self._find("Ray", bridge.reason or reason)
            if time.monotonic() - began > STABLE_SECONDS:
                pause = PAUSE_SECONDS_MIN
            await asyncio.sleep(pause)
            pause = min(pause * 2, PAUSE_SECONDS_MAX)

    async def _open(self) -> _Bridge:
        ours, theirs = socket.socketpair()
        settings = relay.AgentSettings(
            self._settings.address,
            self._settings.cells,
            self._limits,
            self._mode,
            version("moorage"),
        )
        described = {"line": theirs.fileno(), "settings": msgspec.to_builtins(settings)}
        with theirs:
            process = subprocess.Popen(  # noqa: ASYNC220, S603  # Forks at once; our own program.
                command("moorage.sandbox.workers.bridge", json.dumps(described)),
                env={k: each for k, each in os.environ.items() if _ENVIRONMENT.fullmatch(k)},
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                process_group=0,  # Ctrl-C is for the daemon.
            )
        ours.settimeout(0)
        loop = asyncio.get_running_loop()
        _, line = await loop.create_unix_connection(lambda: _Line(self._take), sock=ours)
        return _Bridge(process, line)

    async def _serve(self, bridge: _Bridge) -> str:
        """Ping the bridge and the agents until the bridge ends; return why it ended."""
        while True:
            self._looked_at = time.monotonic()
            done, _ = await asyncio.wait([bridge.line.closed], timeout=PING_SECONDS)
            if done:
                return bridge.line.closed.result()
            now = time.monotonic()
            if now - self._looked_at > 2 * PING_SECONDS:
                continue  # This process was delayed: their messages are still unread.
            if bridge.pinged_at and now - bridge.pinged_at > BRIDGE_SILENT_SECONDS_MAX:
                return "the process that speaks to Ray hangs"
            if not bridge.pinged_at:
                bridge.pinged_at = now
                bridge.line.write(relay.pack(relay.Ping(0)))
            for worker in self.up:
                if worker.silent_seconds(now) > WORKER_SILENT_SECONDS_MAX:
                    reason = f"it was silent for {WORKER_SILENT_SECONDS_MAX:g} s"
                    self._drop(worker.name, reason)
                else:
                    worker.ping()

    async def _end(self, bridge: _Bridge) -> None:
        bridge.line.end("it was stopped")
        process = bridge.process
        loop = asyncio.get_running_loop()
        waiting = loop.run_in_executor(None, process.wait)
        try:
            await asyncio.wait([waiting], timeout=STOP_SECONDS_MAX)
        finally:
            process.kill()
            await waiting

    # Messages of the bridge ----------------------------------------------------------------

    def _take(self, message: relay.FromBridge) -> None:
        bridge = self._bridge
        if bridge is None:
            return
        if isinstance(message, relay.Carry):
            self._carry(message)
        elif isinstance(message, relay.Pong):
            bridge.pinged_at = 0.0
        elif isinstance(message, relay.WorkerUp):
            worker = RemoteWorker(
                message,
                self._limits,
                self._mode,
                self._make,
                self._counters,
                lambda each: self._send(message.worker, each),
            )
            self._workers[worker.name] = worker
            self._counters["worker_starts"] += 1
            self._find(worker.node, f"up, {worker.cells_max} cells", good=True)
            self._changed()
        elif isinstance(message, relay.WorkerDown):
            self._find(message.node, message.reason[: relay.REASON_CHARACTERS_MAX])
            self._lose(message.worker, message.reason[: relay.REASON_CHARACTERS_MAX])
        else:
            bridge.reason = message.reason[: relay.REASON_CHARACTERS_MAX]

    def _carry(self, message: relay.Carry) -> None:
        for body in message.bodies:
            worker = self._workers.get(message.worker)
            if worker is None:
                return  # The worker was lost, perhaps because of its last message.
            try:
                worker.take(body)
            except msgspec.MsgspecError as error:
                reason = f"it broke the protocol: {error}"
                self._drop(worker.name, reason)

    def _drop(self, name: str, reason: str) -> None:
        if self._bridge is not None:
            self._bridge.line.write(relay.pack(relay.Drop(name, reason)))
        self._lose(name, reason)

    def _send(self, name: str, message: relay.ToAgent) -> None:
        """Queue a message to an agent; all messages of one event loop turn are sent together."""
        bridge = self._bridge
        if bridge is None or name not in self._workers:
            return
        if not bridge.outgoing:
            asyncio.get_running_loop().call_soon(self._flush, bridge)
        bridge.outgoing.setdefault(name, []).append(relay.encode(message))

    def _flush(self, bridge: _Bridge) -> None:
        outgoing, bridge.outgoing = bridge.outgoing, {}
        for name, bodies in outgoing.items():
            batch: list[bytes] = []
            for body in bodies:
                if batch and sum(map(len, batch)) + len(body) > relay.BATCH_BYTES_MAX:
                    bridge.line.write(relay.pack(relay.Carry(name, batch)))
                    batch = []
                batch.append(body)
            bridge.line.write(relay.pack(relay.Carry(name, batch)))

    def _lose(self, name: str, reason: str) -> None:
        worker = self._workers.pop(name, None)
        if worker is not None:
            self._counters["worker_losses"] += 1
            self._find(worker.node, reason)
            worker.lose()

    def _find(self, place: str, finding: str, *, good: bool = False) -> None:
        """Store a finding about a node, and log it if it is new."""
        if self.findings.get(place) == finding:
            return
        self.findings.pop(place, None)
        self.findings[place] = finding
        if len(self.findings) > FINDINGS_MAX:
            del self.findings[next(iter(self.findings))]
        self._settings.tell(place, finding, good)
