"""A server that stands by: it answers who leads, at both doors, until it leads itself.

`daemon.start` makes one where several servers may use one database.
"""

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, Final

import structlog
from prometheus_client.metrics_core import Metric

from moorage.core.turns.effects import Address
from moorage.daemon.observability.counters import gauges
from moorage.daemon.tasks import Tasks
from moorage.gateway.deliver import Request, Taking
from moorage.gateway.server import Gateway
from moorage.model import Code, SessionId
from moorage.protocol.agent_socket import AgentSocket
from moorage.protocol.faults import ServiceError
from moorage.protocol.replies import failure
from moorage.records.rights import Caller
from moorage.storage.base import Election, Seat, StorageFailed

POLL_SECONDS: Final = 0.05
"""Between two looks whether there is a leader: as long as nothing leads, clients wait."""
RETRY_SECONDS: Final = 0.5
"""Between two tries to reach the database."""
log = structlog.get_logger("moored")


class Standby:
    """Waits for its turn; see `gateway.deliver.Deliver` and `AgentDoor` for what it answers.

    Args:
        election: Decides who leads.
        gateway: Has the sockets.
        tasks: Learn of a defect.

    Attributes:
        leads: Its turn has come.

    """

    def __init__(self, election: Election, gateway: Gateway, tasks: Tasks) -> None:
        self.leads = False
        self.failed = tasks.fail
        self._broken = tasks.broken
        self._election = election
        self._gateway = gateway
        self._finding = ""

    async def wait(self, seat: Seat, stopping: asyncio.Event) -> None:
        """Return once this server leads, or is to stop.

        Raises:
            StorageError: It can never lead this database.
            BaseException: What broke one of its tasks.

        """
        while not stopping.is_set():
            if self._broken.done():
                await self._broken
            pause = POLL_SECONDS
            try:
                self.leads = await asyncio.to_thread(self._election.stand, seat)
            except StorageFailed as error:  # It may be another one's turn to be the primary.
                pause = RETRY_SECONDS
                self._note(str(error))
            else:
                self._note("")
            if self.leads:
                return
            with suppress(TimeoutError):
                await asyncio.wait_for(stopping.wait(), pause)
        self._election.resign()

    def _note(self, finding: str) -> None:
        if finding and finding != self._finding:
            log.warning("standby", finding=finding)
        self._finding = finding

    def refusal(self) -> ServiceError:
        """Return what all requests are answered that need the leader: all there are."""
        leader = self._election.leader
        where = "none leads at the moment; try again" if leader is None else leader.seat.ws
        reason = f"This server stands by, and takes no requests. Ask the one that leads: {where}."
        return ServiceError(Code.NOT_LEADER, reason, details=self._addresses())

    def readiness(self) -> tuple[bool, dict[str, Any]]:
        """Return that requests are not served here, and where they are."""
        return False, {"role": "standby", **self._addresses()}

    def _addresses(self) -> dict[str, str | None]:
        leader = self._election.leader
        return {
            "leader": None if leader is None else leader.seat.ws,
            "leader_http": None if leader is None else leader.seat.http,
        }

    def opened(self, session: SessionId, caller: Caller) -> None:
        """Note that a session exists."""

    def lost(self, session: SessionId, caller: Caller) -> None:
        """Note that a session is over."""

    def request(
        self, to: Address, caller: Caller, message: Request, warnings: Sequence[str] = ()
    ) -> Taking:
        """Answer who leads."""
        del caller, warnings
        no = self.refusal()
        self._gateway.tell(to, failure(no.code, no.reason, details=no.details, id=message.id))
        return None

    def admits(self, secret: str | None) -> bool:
        """Let agents in, since without a leader their keys cannot be looked at."""
        return secret is not None

    async def serve(self, secret: str, address: str, socket: AgentSocket) -> None:
        """Have an agent try another server."""


def role_gauges(role: str) -> Iterable[Metric]:
    """Yield which of the two this server is."""
    about = "1 for the role that this server has among those on its database"
    yield gauges(
        "moorage_server_role",
        about,
        "role",
        ((each, float(each == role)) for each in ("writer", "standby")),
    )
