"""The agent: an actor on a node of Ray that forks cells there, and carries their messages.

`bridge` starts an agent on each node. Like the daemon, it serves only once its own attacks on the
jail have failed. The agent does not read the messages that it carries.
"""

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Final, cast

import msgspec

from moorage.policy import Fleet
from moorage.records.json_values import JsonValue
from moorage.sandbox.host.contract import CallRefusedError, Document, JailError, Mode
from moorage.sandbox.host.processes import LocalProcess
from moorage.sandbox.host.sandbox import Sandbox
from moorage.sandbox.host.zygote import Death, SpawnError, Zygote
from moorage.sandbox.wire import relay

PULL_SECONDS: Final = 2.0
"""How long a pull waits for messages."""
OUTGOING_BYTES_MAX: Final = 16 << 20
"""Maximum bytes that may wait for a pull; beyond it, no cell's output is read."""


class _NoServices:
    """Services for the self-test, which calls none of them."""

    async def call(self, client: str, method: str, arguments: tuple[JsonValue, ...]) -> JsonValue:
        raise CallRefusedError(f"an agent has no {client}.{method}{arguments}")

    def at_hand(self, client: str, method: str, ids: Sequence[str]) -> Mapping[str, bytes]:
        del client, method, ids
        return {}

    def documents(self, cluster_ids: Sequence[str]) -> Sequence[Document]:
        del cluster_ids
        return ()


class _Channel(asyncio.Protocol):
    """The agent's end of the channel of one cell."""

    def __init__(self, agent: "Agent", number: int, process: LocalProcess) -> None:
        self.process = process
        self._agent = agent
        self._number = number
        self._transport: asyncio.Transport | None = None
        self._written_bytes = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        assert self._transport is not None  # Bytes were just read from it.
        given_bytes = self._written_bytes - self._transport.get_write_buffer_size()
        self._agent.tell(relay.CellSaid(self._number, data, given_bytes))
        if self._agent.full:
            self._transport.pause_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        self._agent.tell(relay.Closed(self._number))

    def give(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._written_bytes += len(data)
            self._transport.write(data)

    def go_on(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def close(self) -> None:
        self.process.kill()
        if self._transport is not None:
            self._transport.abort()


class Agent:
    """An actor of Ray: `start`, then `push` and `pull` during its life."""

    def __init__(self) -> None:
        self._zygote: Zygote | None = None
        self._cells: dict[int, _Channel | None] = {}
        """Cells by the daemon's number; None while a cell is being forked."""
        self._numbers: dict[int, int] = {}
        """Cells by process id, also those that were killed and have not ended yet."""
        self._outgoing: deque[bytes] = deque()
        self._outgoing_bytes = 0
        self._news = asyncio.Event()
        self._next = 0
        self._early: dict[int, list[bytes]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._broken = ""

    async def start(self, packed: bytes) -> bytes:
        """Test the jail here by attacks, and start the process that cells are forked from."""
        settings = msgspec.msgpack.decode(packed, type=relay.AgentSettings)
        return msgspec.msgpack.encode(await self._start(settings))

    async def _start(self, settings: relay.AgentSettings) -> relay.Report:
        release = version("moorage")
        if settings.release != release:
            reason = f"the node has moorage {release}; install {settings.release} there"
            return relay.Report({}, {}, reason)
        mode: Mode = "unsafe" if settings.mode == "unsafe" else "jail"
        sandbox = Sandbox(
            fleet=Fleet(),
            services=_NoServices(),
            deliver=lambda _event: None,
            limits=settings.limits,
            mode=mode,
        )
        try:
            stands = await sandbox.start()
            self._zygote = Zygote(settings.limits, mode, self._note_end, self._note_loss)
            await self._zygote.start()
        except JailError as error:
            return relay.Report({}, {}, str(error))
        finally:
            await sandbox.close()
        return relay.Report(dict(stands.layers), dict(stands.probes))

    async def push(self, number: int, bodies: list[bytes]) -> None:
        """Handle messages of the daemon, in the order of their numbers."""
        self._early[number] = bodies
        while self._next in self._early:
            for body in self._early.pop(self._next):
                self._obey(relay.decode_to_agent(body))
            self._next += 1

    async def pull(self) -> list[bytes]:
        """Return messages for the daemon; wait briefly if there are none.

        Raises:
            RuntimeError: No more cells can be forked.
        """
        if not self._outgoing and not self._broken:
            self._news.clear()
            try:
                await asyncio.wait_for(self._news.wait(), PULL_SECONDS)
            except TimeoutError:
                return []
        if self._broken:
            raise RuntimeError(self._broken)
        was_full, bodies, size = self.full, list[bytes](), 0
        while self._outgoing and size < relay.BATCH_BYTES_MAX:
            bodies.append(self._outgoing.popleft())
            size += len(bodies[-1])
        self._outgoing_bytes -= size
        if was_full and not self.full:
            for cell in filter(None, self._cells.values()):
                cell.go_on()
        return bodies

    @property
    def full(self) -> bool:
        """Whether too many bytes wait for the daemon's next pull."""
        return self._outgoing_bytes > OUTGOING_BYTES_MAX

    def tell(self, message: relay.FromAgent) -> None:
        """Queue a message for the daemon."""
        self._outgoing.append(relay.encode(message))
        self._outgoing_bytes += len(self._outgoing[-1])
        self._news.set()

    def _obey(self, message: relay.ToAgent) -> None:
        if isinstance(message, relay.Ping):
            self.tell(relay.Pong(message.number))
            return
        if isinstance(message, relay.Spawn):
            self._cells[message.cell] = None
            task = asyncio.get_running_loop().create_task(self._spawn(message.cell))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            return
        cell = self._cells.get(message.cell)
        if isinstance(message, relay.Kill):
            self._cells.pop(message.cell, None)
        if cell is None:
            return  # The cell was killed meanwhile, or never existed.
        if isinstance(message, relay.Give):
            cell.give(message.data)
        elif isinstance(message, relay.AskWhere):
            cell.process.ask_where()
        else:
            cell.close()

    async def _spawn(self, number: int) -> None:
        assert self._zygote is not None  # `start` has set it.
        try:
            process = await self._zygote.spawn()
        except SpawnError as error:
            self._cells.pop(number, None)
            self.tell(relay.Unborn(number, str(error)))
            return
        if number not in self._cells:
            process.kill()
            return
        self._numbers[process.pid] = number
        cell = self._cells[number] = _Channel(self, number, process)
        self.tell(relay.Born(number))
        await process.join(cell)

    def _note_end(self, pid: int, death: Death) -> None:
        number = self._numbers.pop(pid, None)
        if number is not None:
            self.tell(relay.CellEnded(number, death.cause, death.innocent, death.held_mib))

    def _note_loss(self) -> None:
        self._broken = "the zygote, from which cells are forked, died"
        self._news.set()
