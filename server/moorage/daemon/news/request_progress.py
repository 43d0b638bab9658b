"""`stream`: sends a client the progress of its request, before and after the one reply.

The messages are `queued` with the position and the expected time, `deciding` while the policy takes
longer than a moment, `decided`, and for a workload `starting` and `ready`. Each message has the
request's `id`. Facts are sent once they are on the disk.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Final

from moorage.backends.base import WorkloadReport
from moorage.core.state.facts import Ended, Fact, Granted, Queued, Requeued, Started
from moorage.core.turns.effects import Address, LeaseNews, Response
from moorage.model import Lease, RequestId, SessionId
from moorage.protocol.replies import MessageId, progress
from moorage.records.json_values import JsonObject, JsonValue

PAUSE_SECONDS: Final = 1.0
"""Seconds between two checks of the positions in the queue."""
DECIDING_SECONDS_MAX: Final = 60.0
"""Maximum seconds between two `deciding` messages; each interval is twice the one before."""
SHARE_MAX: Final = 0.05
"""Maximum share of time for checking positions: the longer the queue, the rarer the checks."""
MOVED_SECONDS_MIN: Final = 10.0
"""Least change of an expected time that is sent, in seconds; also at least a fifth of the wait."""
MOVED_SHARE_MIN: Final = 0.2
_SETTLED: Final = frozenset({"active", "warm", "ending", "ended"})
"""States of a lease whose workload is ready, or will not start any more."""


@dataclass(slots=True)
class _Streamed:
    """A message with `stream`. Several messages may repeat one request."""

    to: Address
    message_id: MessageId
    position: int | None = None
    """Position in the queue; 0: not known yet; None: the request does not wait."""
    expected_at: float | None = None
    """The last sent estimate of when the request is served, in seconds since the epoch."""
    deciding_since: float | None = None
    """When the policy began to decide; None: it is not consulted now."""
    deciding_due: float = 0.0
    """Seconds of deciding after which the next `deciding` message is due."""
    sent: JsonObject = field(default_factory=JsonObject)


class RequestProgress:
    """Sends the progress of requests with `stream` to their clients.

    Args:
        push: Sends a message to a session, or counts the message as missed.
        positions: Returns the positions of those requests that are in the queue.
        expected: Returns when the requests in the queue are served, as far as known.
    """

    def __init__(
        self,
        push: Callable[[SessionId, bytes], None],
        positions: Callable[[Iterable[RequestId]], Mapping[RequestId, int]],
        expected: Callable[[Iterable[RequestId]], Mapping[RequestId, float]],
    ) -> None:
        self._push = push
        self.positions = positions
        self._expected = expected
        self._streamed: dict[RequestId, list[_Streamed]] = {}
        self._by_address: dict[Address, RequestId] = {}
        self._queued = asyncio.Event()

    def add(self, to: Address, request: RequestId, message_id: MessageId) -> None:
        """Send the progress of a request to the session at an address."""
        self._streamed.setdefault(request, []).append(_Streamed(to, message_id))
        self._by_address[to] = request

    def repeat(self, to: Address, first: RequestId, message_id: MessageId, *, waits: bool) -> None:
        """Send the progress of an open request also to the address of a message that repeats it.

        Args:
            to: The address; it was added with the id of the repeated request.
            first: The open request.
            message_id: The `id` of the message.
            waits: Whether the open request is in the queue.
        """
        self._drop(self._by_address[to], to)
        others = self._streamed.get(first, ())
        since = next((each.deciding_since for each in others), None)
        self.add(to, first, message_id)
        streamed = self._streamed[first][-1]
        if waits:
            streamed.position = 0
        elif not others:  # The start of its policy was not noted.
            since = time.monotonic()
        streamed.deciding_since, streamed.deciding_due = since, PAUSE_SECONDS
        self._queued.set()

    def drop_session(self, session: SessionId) -> None:
        """Forget a session."""
        for to in [each for each in self._by_address if each.session == session]:
            del self._by_address[to]
        for name, streamed in [*self._streamed.items()]:
            self._keep(name, [each for each in streamed if each.to.session != session])

    def note_durable(self, facts: Sequence[Fact]) -> None:
        """Send the progress that durable facts report. Runs on the hot path."""
        if not self._streamed:
            return
        for fact in facts:
            match fact:
                case Queued(ask):
                    self._wait(ask.id)
                case Requeued(lease, _, reason):
                    self._tell(lease, "queued", reason=reason)
                    self._wait(lease)
                case Granted(lease):
                    names = ("placement", "fencing", "expires_at")
                    placed = {name: getattr(lease, name) for name in names}
                    self._tell(lease.id, "decided", lease=lease.id, **placed)
                case Started(lease, _, endpoint):
                    self._tell(lease, "ready", endpoint=endpoint)
                    self._streamed.pop(lease, None)
                case Ended(lease, _, reason):
                    self._tell(lease, "ended", reason=reason)
                    self._streamed.pop(lease, None)
                case _:  # Other facts change nothing of how far a request is.
                    pass

    def observe_consultation(self, request: RequestId) -> None:
        """Record that a policy is consulted for a request and begins to decide. On the hot path."""
        for streamed in self._streamed.get(request, ()) if self._streamed else ():
            streamed.deciding_since, streamed.deciding_due = time.monotonic(), PAUSE_SECONDS
            self._queued.set()

    def note_evaluation(self, request: RequestId) -> None:
        """Record that the policy of a request has answered. Runs on the hot path."""
        for streamed in self._streamed.get(request, ()) if self._streamed else ():
            streamed.deciding_since = None

    def workload(self, workload: WorkloadReport) -> None:
        """Send the progress of a workload."""
        if not workload.phase.over:
            name = RequestId(workload.id)
            self._tell(name, "starting", phase=workload.phase, detail=workload.detail)

    def note_answer(self, to: Address, answer: Response) -> None:
        """Record a reply: no progress follows it, unless a workload starts."""
        request = self._by_address.pop(to, None)
        if request is None:
            return
        lease = answer.lease if isinstance(answer, LeaseNews) else None
        if lease is None or lease.provision is None:
            self._drop(request, to)
        elif lease.id != request:
            self._follow_workload(request, to, lease)

    async def run(self) -> None:
        """Send changed positions, and messages about long decisions. Runs until cancelled."""
        while True:
            await self._queued.wait()
            self._queued.clear()
            while any(map(_changes, self._all())):
                began = time.perf_counter()
                self._tell_positions()
                self._tell_decisions()
                taken = time.perf_counter() - began
                await asyncio.sleep(
                    max(PAUSE_SECONDS, taken / SHARE_MAX)
                )  # Positions have no event.

    def _wait(self, request: RequestId) -> None:
        for streamed in self._streamed.get(request, ()):
            streamed.position = 0
            self._queued.set()

    def _tell_positions(self) -> None:
        waiting = {
            name: those
            for name, streamed in self._streamed.items()
            if (those := [each for each in streamed if each.position is not None])
        }
        if not waiting:
            return
        turns, now = self._expected(waiting), time.time()
        for request, position in self.positions(waiting).items():
            turn = turns.get(request)
            expected = {} if turn is None else {"expected_at": turn}
            for each in waiting[request]:
                if each.position != position or _is_new_estimate(each.expected_at, turn, now):
                    self._send(each, request, "queued", position=position, **expected)
                    each.position, each.expected_at = position, turn

    def _tell_decisions(self) -> None:
        now = time.monotonic()
        for request, those in self._streamed.items():
            for streamed in those:
                since = streamed.deciding_since
                if since is not None and now - since >= streamed.deciding_due:
                    seconds = now - since
                    streamed.deciding_due = seconds + min(seconds, DECIDING_SECONDS_MAX)
                    self._send(streamed, request, "deciding", seconds=round(seconds, 1))

    def _tell(self, request: RequestId, state: str, **more: JsonValue) -> None:
        for streamed in self._streamed.get(request, ()):
            self._send(streamed, request, state, **more)

    def _send(self, streamed: _Streamed, request: RequestId, state: str, **more: JsonValue) -> None:
        if state not in {"queued", "deciding"}:
            streamed.position = streamed.deciding_since = None
        data = {"request": request, "state": state, **more}
        if data != streamed.sent:  # A workload repeats its reports.
            streamed.sent = data
            self._push(streamed.to.session, progress(streamed.message_id, data))

    def _all(self) -> Iterator[_Streamed]:
        return chain.from_iterable(self._streamed.values())

    def _follow_workload(self, request: RequestId, to: Address, lease: Lease) -> None:
        """Send the progress of a lease's workload to an address whose request repeated another.

        Args:
            request: The id of the repeated request, under which the address was added.
            to: The address.
            lease: The lease of the first request.
        """
        (message_id,) = (each.message_id for each in self._streamed[request] if each.to == to)
        self._drop(request, to)
        if lease.state not in _SETTLED:
            position = 0 if lease.state == "queued" else None
            self._streamed.setdefault(lease.id, []).append(_Streamed(to, message_id, position))
            self._queued.set()

    def _drop(self, request: RequestId, to: Address) -> None:
        """Send no more progress of a request to an address."""
        self._keep(request, [each for each in self._streamed.get(request, ()) if each.to != to])

    def _keep(self, request: RequestId, streamed: list[_Streamed]) -> None:
        if streamed:
            self._streamed[request] = streamed
        else:
            self._streamed.pop(request, None)


def _changes(streamed: _Streamed) -> bool:
    """Return whether a request's progress may change without an event: it waits or is deciding."""
    return streamed.position is not None or streamed.deciding_since is not None


def _is_new_estimate(before: float | None, after: float | None, now: float) -> bool:
    """Return whether an expected time changed by enough to be sent again."""
    if before is None or after is None:
        return before is not after
    return abs(after - before) > max(MOVED_SECONDS_MIN, MOVED_SHARE_MIN * (before - now))
