"""The agent's side of the connection: carries out the server's orders at a backend of its machine.

`commands.agent_program` dials, and runs `AgentHost.serve` over one connection after the other. A
started order continues without a connection: the server repeats the order later, and gets its
result.
"""

import asyncio
import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Final, assert_never

import msgspec
import structlog

from moorage.backends.agents import wire
from moorage.backends.agents.carrying import carry_out
from moorage.backends.base import Backend, BackendError, WorkloadReport
from moorage.backends.local import deadline, workload_store
from moorage.backends.local.measurements import Measurement
from moorage.backends.local.orders import free_port
from moorage.protocol.agent_socket import AgentSocket
from moorage.records.json_values import JsonValue

FENCES_MAX: Final = 1_000
"""Maximum workloads whose fencing number is remembered: the latest ones."""
BEATS_A_MEASUREMENT: Final = 2
"""Beats from one measurement of the machine to the next."""
SILENT_SECONDS_MIN: Final = 10.0
"""Least seconds of the server's silence before the connection is given up."""

log = structlog.get_logger("moored")


class AgentHost:
    """Carries out the orders of the server on this machine.

    Args:
        folder: Holds the fencing numbers of the last orders.
        on_heard: Called for each message that the server confirms, with the sending time of the
            message, by `deadline.now`.
        address: Address of this machine for gang members on other machines; empty: the address of
            the connection to the server.
        measure: Measures the machine, in a thread; None: no metrics are sent.
        epoch: The latest epoch of servers whose orders were accepted here.
    """

    def __init__(
        self,
        backend: Backend,
        folder: Path,
        on_heard: Callable[[float], None] = lambda _: None,
        address: str = "",
        measure: Callable[[], Measurement] | None = None,
        epoch: int = 0,
    ) -> None:
        self._backend = backend
        self._on_heard = on_heard
        self._address = address
        self._measure = measure
        self._epoch = epoch
        self._file = folder / "fences.json"
        self._fences: dict[str, int] = workload_store.read(self._file) or {}
        self._starts: dict[str, asyncio.Task[WorkloadReport]] = {}
        self._calls: dict[int, tuple[wire.AnyOrder, asyncio.Task[None]]] = {}
        self._socket: AgentSocket | None = None
        self._measuring: asyncio.Task[wire.AgentMetrics | None] | None = None
        self._sending = asyncio.Lock()
        self._running: set[asyncio.Task[None]] = set()
        self._writing = asyncio.Lock()
        self._news: deque[WorkloadReport] = deque()
        loop = asyncio.get_running_loop()

        def hear(report: WorkloadReport) -> None:  # Called in any thread.
            self._news.append(report)
            loop.call_soon_threadsafe(self._tell)

        backend.listen(hear)

    async def serve(self, socket: AgentSocket, beat_seconds: float, epoch: int) -> float:
        """Carry out the orders of a connection until it breaks or is silent for too long.

        Args:
            socket: The connection.
            beat_seconds: The pause between two beats.
            epoch: The server's epoch, from its welcome. Orders of earlier epochs are refused from
                now on, even if they arrived before but have not begun.

        Returns:
            The seconds since the server's last frame.
        """
        self._socket = socket
        self._epoch = max(self._epoch, epoch)
        beating = asyncio.create_task(self._beat(socket, beat_seconds))
        silent_seconds = max(SILENT_SECONDS_MIN, wire.BEATS_MISSED_MAX * beat_seconds)
        heard_at = deadline.now()
        try:
            while (frame := await _receive(socket, silent_seconds)) is not None:
                heard_at = deadline.now()
                match wire.decode_instruction(frame):
                    case wire.AgentCall(number, order) as call:
                        task = self._spawn(self._carry_out(socket, call))
                        self._calls[number] = order, task
                    case wire.AgentCancel(number, stop_seconds_max):
                        self._cancel(number, stop_seconds_max)
                    case wire.AgentHeard(at):
                        self._on_heard(at)
                    case wire.AgentWelcome() | wire.AgentFarewell():
                        pass
                    case _ as never:
                        assert_never(never)
        finally:
            self._socket = None
            beating.cancel()
            for order, task in self._calls.values():
                if not isinstance(order, wire.StartOrder | wire.StopOrder):
                    task.cancel()
            self._calls = {}
        return deadline.now() - heard_at

    def _cancel(self, number: int, stop_seconds_max: float | None) -> None:
        order, task = self._calls.get(number, (None, None))
        if isinstance(order, wire.StartOrder) and (start := self._starts.get(order.workload)):
            start.cancel(stop_seconds_max)
        elif task is not None:
            task.cancel()

    async def _carry_out(self, socket: AgentSocket, call: wire.AgentCall) -> None:
        report: wire.AgentDone | wire.AgentFailure
        number = call.id
        try:
            self._refuse_earlier(call.epoch)
            value = wire.encode(await self._done(call.order, socket))
            report = wire.AgentDone(number, msgspec.Raw(value))
        except asyncio.CancelledError:
            report = wire.AgentFailure(number, "failed", "the call was cancelled")
        except Exception as error:  # noqa: BLE001  # A defect is an error of this order, too.
            report = wire.AgentFailure.of(number, error)
        finally:
            if socket is self._socket:
                self._calls.pop(number, None)
        await self._send(socket, report)

    def _refuse_earlier(self, epoch: int) -> None:
        if epoch < self._epoch:
            raise BackendError(
                f"the order of a server with epoch {epoch} was not carried out: a server with epoch"
                f" {self._epoch} has led since"
            )

    async def _done(self, order: wire.AnyOrder, socket: AgentSocket) -> JsonValue:
        match order:
            case wire.MeetOrder():
                return wire.Meeting(self._address or socket.own_address, free_port(""))
            case wire.StartOrder():
                return await self._start(order)
            case _:  # `carry_out` handles all other orders.
                return await carry_out(self._backend, order)

    async def _start(self, order: wire.StartOrder) -> WorkloadReport:
        """Start a workload, or wait for a start that is under way."""
        name, known = order.workload, self._fences.get(order.workload, 0)
        if order.fencing < known:
            raise BackendError(
                f"the order for {name} with fencing number {order.fencing} is outdated: an order"
                f" with number {known} came before"
            )
        if order.fencing > known:
            self._fences.pop(name, None)
            self._fences[name] = order.fencing
            if len(self._fences) > FENCES_MAX:
                del self._fences[next(iter(self._fences))]
            async with self._writing:
                await asyncio.to_thread(workload_store.write, self._file, dict(self._fences))
        start = self._starts.get(name)
        if start is None:
            start = asyncio.create_task(self._backend.start(order.order(self._backend)))
            self._starts[name] = start
            start.add_done_callback(partial(self._note_start, name))
        return await asyncio.shield(start)

    def _note_start(self, name: str, start: "asyncio.Task[WorkloadReport]") -> None:
        del self._starts[name]
        if not start.cancelled():
            start.exception()  # Mark as read: no caller may be left.

    def _spawn(self, work: Coroutine[object, object, None]) -> "asyncio.Task[None]":
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    async def _beat(self, socket: AgentSocket, seconds: float) -> None:
        """Send a beat every `seconds`. Every second beat has metrics, unless the driver is slow."""
        for number in itertools.count():
            metrics = None
            if number % BEATS_A_MEASUREMENT == 0:
                self._measuring = self._measuring or asyncio.create_task(self._metrics())
                done, _ = await asyncio.wait([self._measuring], timeout=seconds / 2)
                if done:
                    metrics, self._measuring = self._measuring.result(), None
            now = deadline.now()
            if metrics is not None:
                metrics.at = now
            await self._send(socket, metrics or wire.AgentBeat(now))
            await asyncio.sleep(seconds)

    async def busy(self) -> dict[str, str]:
        """Return the devices in use by foreign processes, for `AgentHello.busy`."""
        metrics = await self._metrics()
        return {} if metrics is None else metrics.busy

    async def _metrics(self) -> wire.AgentMetrics | None:
        if self._measure is None:
            return None
        try:
            return wire.AgentMetrics(*await asyncio.to_thread(self._measure))
        except Exception as error:  # noqa: BLE001  # A driver may raise any error.
            log.warning("measuring_failed", reason=f"{type(error).__name__}: {error}")
            return None

    def _tell(self) -> None:
        """Send queued news. Without a connection, drop them: the server asks for states later."""
        if self._socket is None:
            self._news.clear()
        else:
            self._spawn(self._send(self._socket))

    async def _send(self, socket: AgentSocket, report: wire.Report | None = None) -> None:
        """Send queued news, then a call's report, so that earlier news arrive before it."""
        async with self._sending:
            while self._news:
                await socket.send(wire.encode(wire.AgentNews(self._news.popleft())))
            if report is not None:
                await socket.send(wire.encode(report))

    async def cancel_starts(self) -> None:
        """Cancel all starts under way."""
        starts = list(self._starts.values())
        for start in starts:
            start.cancel()
        await asyncio.gather(*starts, return_exceptions=True)

    async def close(self) -> None:
        """Close the backend. Workloads continue to run; starts under way are cancelled."""
        with contextlib.suppress(asyncio.CancelledError):
            await self.cancel_starts()
        await self._backend.close()


async def _receive(socket: AgentSocket, seconds: float) -> bytes | None:
    """Return the next frame; None: the connection broke, or was silent for `seconds`."""
    try:
        async with asyncio.timeout(seconds):
            return await socket.receive()
    except TimeoutError:
        socket.abort()
        return None
