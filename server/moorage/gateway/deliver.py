"""The interface between gateway and daemon.

The daemon passes its `Deliver` to `Gateway`, and answers through `Gateway.tell`.
"""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Protocol

from moorage.core.turns.effects import Address
from moorage.model import SessionId
from moorage.protocol.agent_socket import AgentSocket
from moorage.protocol.messages import AllocationRequest, BlockRequest, Operation
from moorage.records.rights import Caller

Request = AllocationRequest | BlockRequest | Operation
Taking = asyncio.Future[None] | Coroutine[object, object, None] | None
"""The remaining steps of accepting a request: see `Deliver.request`."""


class AgentDoor(Protocol):
    """Serves the agents of machines, on a separate path and without sessions.

    The gateway carries the agents' frames, and knows nothing of them.
    """

    async def admits(self, secret: str | None) -> bool | None:
        """Return whether a token or key permits a handshake; None: the store cannot be read now."""

    async def serve(self, secret: str, address: str, socket: AgentSocket) -> None:
        """Serve an agent until the connection is gone."""


class Deliver(Protocol):
    """Handles the requests of clients. The gateway calls it from its event loop.

    Every request must be answered with exactly one `Gateway.tell`, during the call or later. No
    method may raise: an exception is a defect, which the gateway passes to `fail`.
    """

    def open_session(self, session: SessionId, caller: Caller) -> None:
        """Register a session, before its first request."""

    def request(
        self, to: Address, caller: Caller, message: Request, warnings: Sequence[str] = ()
    ) -> Taking:
        """Handle a request; its reply has the `warnings`. Runs on the hot path.

        Returns:
            None if the request was accepted. A future if it was refused because of a limit: the
            session's next message is read once the future is done. A coroutine, which the caller
            runs, if accepting it takes time.

        A session's requests without `id` come strictly in order, each after the previous one was
        accepted. Requests with `id` may come concurrently with them and with one another. The
        coroutine must return in bounded time, even if the session is gone: requests that a client
        sent before it left still count. The call is cancelled only if the gateway stops and the
        call has not returned in time.
        """

    def drop_session(self, session: SessionId, caller: Caller) -> None:
        """Handle the end of a session that was not resumed. The session sends no more requests."""

    def fail(self, error: BaseException) -> None:
        """Report an unexpected exception, which is a defect. The daemon ends the process."""
