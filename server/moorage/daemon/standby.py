"""A standby server: answers reads, and refers other requests to the leader, until it leads.

`daemon.start` makes a `Standby` if several servers may use one database.
"""

import asyncio
import time
from collections.abc import Coroutine, Iterable, Sequence
from contextlib import suppress
from typing import Final, NamedTuple

import structlog
from prometheus_client.metrics_core import Metric

from moorage.core.turns.effects import Address
from moorage.daemon.following import WAIT_SECONDS_MAX, Applied, Follower
from moorage.daemon.observability.counters import gauges, gauges_of
from moorage.daemon.requests.router import Router
from moorage.daemon.tasks import Tasks
from moorage.gateway.deliver import Deliver, Request, Taking
from moorage.gateway.server import Gateway
from moorage.model import Code, SessionId
from moorage.protocol import messages as wire
from moorage.protocol.agent_socket import AgentSocket
from moorage.protocol.faults import ServiceError
from moorage.protocol.replies import Shared, failure
from moorage.records.json_values import JsonObject
from moorage.records.rights import Caller
from moorage.storage.base import Election, Seat, StorageFailed
from moorage.web.services import StandbyReads

HOLD_SECONDS_MAX: Final = 2.0
"""Maximum seconds that requests wait for the next leader after the last leader has left."""
RETRY_SECONDS: Final = 0.5
"""Seconds between two attempts to reach the database."""
_READS: Final = (
    wire.FleetListing,
    wire.LeaseListing,
    wire.QueueListing,
    wire.QuotaListing,
    wire.ReservationListing,
    wire.Status,
    wire.Why,
    wire.DecisionListing,
    wire.DecisionFleet,
    wire.PastFleet,
    wire.WatchTopics,
    wire.Resume,
)
"""Operations that a standby answers from its applied facts."""
log = structlog.get_logger("moored")


class Reading(NamedTuple):
    """The parts that answer reads while another server leads."""

    following: Follower
    router: Router


class Standby:
    """Waits until this server leads; until then it is the `Deliver` and `AgentDoor` of the server.

    It answers some reads, and refers all other requests and agents to the leader.

    Args:
        rollout: The setting `rollout`.

    Attributes:
        leads: Whether this server leads now.
        reading: The parts that answer reads; None: the state is not loaded, or outdated.
        followed: The applied state, with which the server continues when it leads; or None.
    """

    def __init__(
        self, election: Election, gateway: Gateway, tasks: Tasks, rollout: str = ""
    ) -> None:
        self.leads = False
        self.reading: Reading | None = None
        self.followed: Applied | None = None
        self._sessions: dict[SessionId, Caller] = {}
        self._have_read: set[SessionId] = set()
        self._known_at = time.monotonic()
        """When this standby last knew all facts, while it follows no leader; else outdated."""
        self._vacant_since: float | None = None
        """Since when no server leads, as far as known; None: a server leads, or none ever led."""
        self._found = asyncio.Event()
        """Is set while another server leads, or this server is ready to lead."""
        self._heir: Deliver | None = None
        self.fail = tasks.fail
        self._broken = tasks.broken
        self._election = election
        self._gateway = gateway
        self._rollout = rollout
        self._finding = ""

    async def wait(self, seat: Seat, stopping: asyncio.Event) -> None:
        """Wait until this server leads, or must stop.

        Raises:
            StorageError: This server can never lead this database.
            BaseException: One of its tasks failed.
        """
        while not stopping.is_set():
            if self._broken.done():
                await self._broken
            pause = 0.0
            try:
                self.leads = await asyncio.to_thread(self._election.stand, seat)
            except StorageFailed as error:  # Another database server may become the primary.
                pause = RETRY_SECONDS
                self._note(str(error))
            else:
                self._note("")
            self._look()
            if self.leads:
                self.reading = None
                return
            if pause:
                with suppress(TimeoutError):
                    await asyncio.wait_for(stopping.wait(), pause)
        self._election.resign()

    def _look(self) -> None:
        """Record since when there is no leader; once a server leads, wake waiting requests."""
        if self._election.leader is not None and not self.leads:
            self._vacant_since = None
            self._found.set()
        elif self._found.is_set() or (self.leads and self._vacant_since is None):
            self._vacant_since = time.monotonic()
            self._found.clear()

    def vacant_seconds(self) -> float:
        """Return the seconds since this server saw that no server led; 0: a server leads."""
        since = self._vacant_since
        return 0.0 if since is None else time.monotonic() - since

    def metrics(self) -> Iterable[Metric]:
        """Yield the role, and the seconds by which a standby lags, also if it does not follow."""
        if self.leads:
            return role_metrics("writer")
        known_at = self._known_at if self.reading is None else self.reading.following.known_at
        return role_metrics("standby", time.monotonic() - known_at)

    def hand_over(self, heir: Deliver) -> None:
        """Let `heir` answer the requests that wait here, since this server now leads."""
        self._heir = heir
        self._found.set()

    def is_idle(self, session: SessionId) -> bool:
        """Return whether a session has only requests that wait for the next leader."""
        return session not in self._have_read

    def _note(self, finding: str) -> None:
        if finding and finding != self._finding:
            log.warning("leader_not_followed", finding=finding)
        self._finding = finding

    def refusal(self, why: str = "needs the leading server") -> ServiceError:
        """Return the refusal of requests that only the leader answers."""
        leader = self._election.leader
        where = "no server leads at the moment; try again" if leader is None else leader.seat.ws
        reason = f"This server stands by, and this request {why}: {where}."
        return ServiceError(Code.NOT_LEADER, reason, details=self._addresses())

    def doubt(self) -> ServiceError | None:
        """Return why reads are refused here; None if they are answered."""
        reading = self.reading
        if reading is None:
            return self.refusal()
        if reading.following.is_fresh:
            return None
        return self.refusal("needs current facts; ask the leader")

    def stamp(self) -> Shared:
        """Return the revision and the time of an answer, and the leader."""
        if self.reading is None:
            return {}
        following, leader = self.reading.following, self._election.leader
        at, where = round(following.as_of, 3), "" if leader is None else leader.seat.ws
        return {"revision": following.revision, "as_of": at, "leader": where}

    def readiness(self) -> tuple[bool, JsonObject]:
        """Return which server answers requests, and whether this server is ready to replace it.

        A roll-out ends the old leader once enough of the new servers are ready.
        """
        reading, leader = self.reading, self._election.leader
        succeeds = self._rollout and leader is not None and leader.seat.rollout != self._rollout
        known = {
            "revision": None if reading is None else reading.following.revision,
            "as_of": None if reading is None else round(reading.following.as_of, 3),
        }
        is_ready = bool(succeeds and reading is not None and reading.following.is_fresh)
        return is_ready, {"role": "standby", **self._addresses(), **known}

    def reads(self) -> StandbyReads:
        """Return the functions with which HTTP refuses a read, or adds the age of the data."""
        return StandbyReads(refusal=self.refusal, doubt=self.doubt, headers=self._headers)

    def _headers(self) -> list[tuple[bytes, bytes]]:
        stamp = self.stamp()
        if self.reading is not None:
            stamp["as_of"] = round(min(stamp["as_of"], self.reading.following.documents_as_of), 3)
        leader = self._addresses()["leader_http"]
        said = {**stamp, "leader": leader or ""}
        return [
            (f"moorage-{name.replace('_', '-')}".encode(), str(value).encode())
            for name, value in said.items()
        ]

    def read(self, reading: Reading | None) -> None:
        """Answer reads from these parts from now on; None: stop answering reads."""
        if self.reading is not None:
            self._known_at = self.reading.following.known_at
        self.reading = reading
        if reading is not None:
            for session, caller in self._sessions.items():
                reading.router.open_session(session, caller)

    def _addresses(self) -> dict[str, str | None]:
        leader = self._election.leader
        return {
            "leader": None if leader is None else leader.seat.ws,
            "leader_http": None if leader is None else leader.seat.http,
        }

    def open_session(self, session: SessionId, caller: Caller) -> None:
        """Note that a session exists."""
        self._sessions[session] = caller
        if self.reading is not None:
            self.reading.router.open_session(session, caller)

    def drop_session(self, session: SessionId, caller: Caller) -> None:
        """Note that a session is over."""
        self._sessions.pop(session, None)
        self._have_read.discard(session)
        if self.reading is not None:
            self.reading.router.drop_session(session, caller)

    def request(
        self, to: Address, caller: Caller, message: Request, warnings: Sequence[str] = ()
    ) -> Taking:
        """Answer a read; refer any other request to the leader."""
        reading = self.reading
        no = self.doubt() if isinstance(message, _READS) else self.refusal()
        if reading is None or no is not None:
            if self._is_vacant():
                return self._hold(to, caller, message, warnings)
            self._refuse(to, message, no or self.refusal())
            return None
        self._have_read.add(to.session)
        if getattr(message, "min_revision", 0) > reading.following.revision:
            return self._request_later(to, caller, message, warnings)
        return reading.router.request(to, caller, message, warnings)

    def _is_vacant(self) -> bool:
        """Return whether the last leader has just left."""
        since = self._vacant_since
        return since is not None and time.monotonic() - since < HOLD_SECONDS_MAX

    async def _hold(
        self, to: Address, caller: Caller, message: Request, warnings: Sequence[str]
    ) -> None:
        """Wait for a leader, then answer: as the leader, or with the leader's address."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._found.wait(), HOLD_SECONDS_MAX)
        if self._heir is None:
            self._refuse(to, message, self.refusal())
        elif to.session in self._sessions and self.is_idle(to.session):
            taking = self._heir.request(to, caller, message, warnings)
            if isinstance(taking, Coroutine):  # The next message must not wait for a future.
                await taking

    async def _request_later(
        self, to: Address, caller: Caller, message: Request, warnings: Sequence[str]
    ) -> None:
        """Answer once the facts up to the request's `min_revision` are applied."""
        reading, wanted = self.reading, getattr(message, "min_revision", 0)
        if reading is not None and await reading.following.has(wanted) and reading == self.reading:
            taking = reading.router.request(to, caller, message, warnings)
            if isinstance(taking, Coroutine):  # The next message must not wait for a future.
                await taking
            return
        why = f"must reflect fact {wanted}, which did not arrive within {WAIT_SECONDS_MAX:g} s"
        self._refuse(to, message, self.refusal(f"{why}; ask the server that leads"))

    def _refuse(self, to: Address, message: Request, no: ServiceError) -> None:
        self._gateway.tell(to, failure(no.code, no.reason, details=no.details, id=message.id))

    async def admits(self, secret: str | None) -> bool:
        """Accept every agent's connection, since only the leader can check its key."""
        return secret is not None

    async def serve(self, secret: str, address: str, socket: AgentSocket) -> None:
        """Refer an agent to the leader."""


def role_metrics(role: str, behind_seconds: float | None = None) -> Iterable[Metric]:
    """Yield whether this server leads or stands by, and by how many seconds a standby lags."""
    about = "1 for the role that this server has among those on its database"
    yield gauges(
        "moorage_server_role",
        about,
        "role",
        ((each, float(each == role)) for each in ("writer", "standby")),
    )
    behind = [] if behind_seconds is None else [((), behind_seconds)]
    yield gauges_of(
        "moorage_standby_behind_seconds", "Seconds since a standby last knew all facts", (), behind
    )
