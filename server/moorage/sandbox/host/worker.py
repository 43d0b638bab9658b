"""The daemon's side of a worker: an agent on a node of Ray that forks cells.

`workers` uses this module. A cell on a worker is an ordinary `channel.Cell`: it gets the same
frames, and its messages get the same checks. Of the agent's reports only the grammar is checked,
and an agent that violates it loses all its cells.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable

from moorage.sandbox.host.channel import Cell
from moorage.sandbox.host.contract import Mode
from moorage.sandbox.host.processes import CellProcess
from moorage.sandbox.host.spawner import Spawner
from moorage.sandbox.host.zygote import SPAWN_SECONDS_MAX, WORKER_LOST, Death, SpawnError
from moorage.sandbox.wire import relay
from moorage.sandbox.wire.limits import Limits


class _Transport(asyncio.Transport):
    """The transport of a cell on a worker; it sends through the worker's agent."""

    def __init__(self, send: Callable[[relay.ToAgent], None], number: int) -> None:
        super().__init__()
        self._send = send
        self._number = number
        self._sent_bytes = 0
        self.given_bytes = 0

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send bytes to the cell, as in asyncio."""
        self._sent_bytes += len(data)
        self._send(relay.Give(self._number, bytes(data)))

    def get_write_buffer_size(self) -> int:
        """Return the number of bytes that the worker has not yet written to the cell."""
        return self._sent_bytes - self.given_bytes

    def abort(self) -> None:
        """Do nothing: the caller also kills the cell, which closes its channel."""


class RemoteProcess:
    """The process of a cell on a worker; it has the interface of `CellProcess`."""

    def __init__(self, worker: "RemoteWorker", number: int) -> None:
        self.pid = number
        self.worker = worker.name
        self.cell: asyncio.Protocol | None = None
        self._worker = worker
        self._transport = _Transport(worker.send, number)
        self._pinged = 0
        self._early: list[relay.CellSaid | relay.Closed] = []

    @property
    def in_touch(self) -> bool:
        return self._worker.last_pong >= self._pinged

    async def join(self, cell: asyncio.Protocol) -> None:
        self.cell = cell
        cell.connection_made(self._transport)
        early, self._early = self._early, []
        for message in early:
            self.take(message)

    def take(self, message: relay.CellSaid | relay.Closed) -> None:
        """Pass bytes of the cell, or the end of its channel, to the `Cell` object."""
        if self.cell is None:
            self._early.append(message)  # Bytes may come with the report of the fork.
        elif isinstance(message, relay.Closed):
            self.cell.connection_lost(None)
        else:
            self._transport.given_bytes = message.given_bytes
            self.cell.data_received(message.data)

    def kill(self) -> None:
        self._worker.forget(self.pid)
        self._worker.send(relay.Kill(self.pid))

    def ask_where(self) -> None:
        self._worker.send(relay.AskWhere(self.pid))
        self._pinged = self._worker.ping()

    def cpu_seconds(self) -> float:
        """Return 0: the worker's cores are reserved for cells, so their CPU time does not count."""
        return 0.0

    def demote(self) -> bool:
        return True

    def restore(self, niceness: int) -> bool:
        del niceness
        return True

    def step_aside(self) -> None:
        """Do nothing: the worker's cores are reserved for cells."""


class RemoteWorker(Spawner):
    """Makes cells on one node of Ray.

    Args:
        up: The bridge's report of the agent's start.
        limits: All limits of the sandbox.
        mode: `jail`, or `unsafe` without the jail.
        make: Wraps a spawned process as a cell; see `Spawner`.
        counters: Counts spawned cells; see `Spawner`.
        send: Sends messages to the worker's agent.

    Attributes:
        name: Name of this start of the agent.
        node: The node, as shown to people.
        cells_max: Maximum number of cells on the worker.
        last_pong: Number of the latest answered ping.
    """

    def __init__(
        self,
        up: relay.WorkerUp,
        limits: Limits,
        mode: Mode,
        make: Callable[[CellProcess, Spawner], Cell],
        counters: Counter[str],
        send: Callable[[relay.ToAgent], None],
    ) -> None:
        super().__init__(limits, mode, make, lambda: None, counters)
        self.name, self.node, self.cells_max = up.worker, up.node, up.cells
        self.layers, self.probes = up.layers, up.probes
        self.orphaned = WORKER_LOST
        self.last_pong = 0
        self.send = send
        self._pings = self._number = 0
        self._waiting_since = 0.0
        self._processes: dict[int, RemoteProcess] = {}
        self._orders: dict[int, asyncio.Future[RemoteProcess]] = {}
        self._zygote = self
        self._up.set()

    @property
    def room(self) -> int:
        """The number of further cells that the worker can have."""
        return self.cells_max - len(self.living) - self.spawning if self.up else 0

    def ping(self) -> int:
        """Send a ping to the agent; return the ping's number."""
        if self.last_pong == self._pings:
            self._waiting_since = time.monotonic()
        self._pings += 1
        self.send(relay.Ping(self._pings))
        return self._pings

    def silent_seconds(self, now: float) -> float:
        """Return for how many seconds the agent has left a ping unanswered."""
        return 0.0 if self.last_pong == self._pings else now - self._waiting_since

    async def spawn(self) -> RemoteProcess:
        """Fork a cell on the worker, or raise `SpawnError`; see `Source`."""
        self._number += 1
        number = self._number
        future: asyncio.Future[RemoteProcess] = asyncio.get_running_loop().create_future()
        self._orders[number] = future
        self._processes[number] = RemoteProcess(self, number)
        self.send(relay.Spawn(number))
        try:
            return await asyncio.wait_for(future, SPAWN_SECONDS_MAX)
        except BaseException as error:
            if number in self._processes:
                self._processes[number].kill()
            if isinstance(error, TimeoutError):
                raise SpawnError(f"{self.node} did not answer an order to start a cell") from error
            raise
        finally:
            del self._orders[number]

    def ended(self) -> bool:
        """Return whether the worker is gone; see `Source`."""
        return not self.up

    async def close(self) -> None:
        """Do nothing: the cells end with their agent, and `lose` reports that."""

    def forget(self, number: int) -> None:
        """Ignore all further messages of a cell except the one about its end."""
        self._processes.pop(number, None)

    def take(self, body: bytes) -> None:
        """Handle one message of the agent.

        Raises:
            msgspec.MsgspecError: The bytes are not a message.
        """
        message = relay.decode_from_agent(body)
        if isinstance(message, relay.Pong):
            if message.number > self.last_pong:
                self.last_pong = min(message.number, self._pings)
                self._waiting_since = time.monotonic()
            return
        process = self._processes.get(message.cell)
        if isinstance(message, relay.CellEnded):
            cause = message.cause[: relay.REASON_CHARACTERS_MAX]
            self._note_end(message.cell, Death(cause, message.innocent, message.held_mib))
        elif process is None:
            return  # The cell was killed meanwhile.
        elif isinstance(message, (relay.CellSaid, relay.Closed)):
            process.take(message)
        elif (order := self._orders.get(message.cell)) is not None and not order.done():
            if isinstance(message, relay.Born):
                order.set_result(process)
            else:
                order.set_exception(SpawnError(message.reason[: relay.REASON_CHARACTERS_MAX]))

    def lose(self) -> None:
        """Mark the worker as gone, and report the work of its cells as lost."""
        self._closing = True
        self._up.clear()
        for order in self._orders.values():
            if not order.done():
                order.set_exception(SpawnError(f"{self.node} was lost"))
        for pid in list(self._end_reports):
            self._report_end(pid, self.orphaned)
        for process in list(self._processes.values()):
            if process.cell is not None:
                process.cell.connection_lost(None)
        self._processes.clear()
