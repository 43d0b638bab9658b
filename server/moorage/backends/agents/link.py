"""The server's side of the connection to one agent: calls, their reports, and news.

`backend` makes the calls; the daemon brings the socket and runs `AgentLink.run`.
"""

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable
from typing import Final, assert_never

import msgspec

from moorage.backends.agents.wire import (
    AgentBeat,
    AgentCall,
    AgentCancel,
    AgentDone,
    AgentFailure,
    AgentHeard,
    AgentHello,
    AgentMetrics,
    AgentNews,
    AnyOrder,
    decode_report,
    encode,
)
from moorage.backends.base import WorkloadReport
from moorage.backends.completion import stop_bound
from moorage.protocol.agent_socket import AgentSocket

CANCEL_SECONDS_MAX: Final = 30.0
"""Seconds that an agent may take to confirm the end of a cancelled call."""


class LinkLost(Exception):  # noqa: N818  # An event for `AgentMachine`, not an error.
    """The connection broke before the agent reported the result of a call."""


class AgentLink:
    """A connection to an agent that the server has accepted.

    Args:
        on_news: Called with each report that is not the answer to a call.
        epoch: This server's epoch, which is sent with each order.

    Attributes:
        heard_at: Monotonic time of the last frame.
        measured: The encoded frame of the last `AgentMetrics`, which takes less memory than the
            object.
        busy: Devices in use by foreign processes, from the last metrics; None: not measured yet.
        measured_at: Arrival of the last metrics, in seconds since the epoch.
    """

    def __init__(
        self, socket: AgentSocket, on_news: Callable[[WorkloadReport], None], epoch: int
    ) -> None:
        self.heard_at = time.monotonic()
        self.measured = b""
        self.busy: dict[str, str] | None = None
        self.measured_at = 0.0
        self._socket = socket
        self._on_news = on_news
        self._epoch = epoch
        self._ids = itertools.count(1)
        self._calls: dict[int, tuple[AnyOrder, asyncio.Future[msgspec.Raw]]] = {}
        self._gone = False

    @property
    def server_address(self) -> str:
        """The address at which the agent reaches this machine."""
        return self._socket.own_address

    async def run(self) -> None:
        """Read frames until the connection breaks.

        Raises:
            msgspec.MsgspecError: The agent sent an invalid frame.
        """
        try:
            while (frame := await self._socket.receive()) is not None:
                self.heard_at = time.monotonic()
                match decode_report(frame):
                    case AgentDone(id, value):
                        self._settle(id, value)
                    case AgentFailure() as failed:
                        self._settle(failed.id, failed)
                    case AgentNews(report):
                        self._on_news(report)
                    case AgentBeat(at):
                        self._socket.answer(encode(AgentHeard(at)))
                    case AgentMetrics() as metrics:
                        self._note_metrics(metrics)
                    case AgentHello():
                        pass
                    case _ as never:
                        assert_never(never)
        finally:
            self._gone = True
            self._socket.abort()
            for _, waiting in self._calls.values():
                if not waiting.done():
                    waiting.set_exception(LinkLost())
                    waiting.exception()  # Mark as read: the caller may have been cancelled.

    def _note_metrics(self, metrics: AgentMetrics) -> None:
        self.measured, self.busy, self.measured_at = encode(metrics), metrics.busy, time.time()
        if metrics.at is not None:
            self._socket.answer(encode(AgentHeard(metrics.at)))

    def rely_on_beats(self) -> None:
        """Stop the socket's own pings; the server detects a silent agent by `heard_at` instead."""
        self._socket.rely_on_beats()

    def abort(self) -> None:
        """End the connection; `run` returns."""
        self._socket.abort()

    async def call(self, order: AnyOrder) -> msgspec.Raw:
        """Send the agent an order; return its answer.

        A cancelled call ends after the agent has cancelled the order.

        Raises:
            LinkLost: The connection broke; the agent may have carried out the order.
            BackendError: The agent's backend failed; its other errors are raised, too.
        """
        if self._gone:
            raise LinkLost
        number = next(self._ids)
        report = asyncio.get_running_loop().create_future()
        self._calls[number] = order, report
        try:
            await self._socket.send(encode(AgentCall(number, order, self._epoch)))
            return await asyncio.shield(report)
        except asyncio.CancelledError as error:
            await self._socket.send(encode(AgentCancel(number, stop_bound(error))))
            with contextlib.suppress(Exception):  # The result no longer matters.
                await asyncio.wait_for(asyncio.shield(report), CANCEL_SECONDS_MAX)
            raise
        finally:
            self._calls.pop(number, None)

    def _settle(self, number: int, outcome: "msgspec.Raw | AgentFailure") -> None:
        order, report = self._calls.get(number, (None, None))
        if order is None or report is None or report.done():
            return
        if isinstance(outcome, AgentFailure):
            name = getattr(order, "workload", "")
            report.set_exception(outcome.error(name))
            report.exception()  # As above.
        else:
            report.set_result(outcome)
