"""One client's session: handles its messages in order, and sends each reply to it.

The gateway makes one session per connection. Every message gets a number; a message without `id` is
also given the next place in the line of replies, and its reply waits there for the replies before
it. A reply to a message with `id` goes out as soon as it is known.

Nothing is dropped and nothing grows without bound: at `inflight_max` unanswered and unwritten
messages, the session stops reading until some of these messages are gone.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from websockets.exceptions import ConnectionClosed

from moorage.core.turns.effects import Address
from moorage.gateway.connection import GatewayConnection
from moorage.gateway.deliver import Deliver, Request
from moorage.gateway.settings import HELD_BYTES_MAX, GatewaySettings
from moorage.model import Code, SessionId
from moorage.protocol.codes import Close
from moorage.protocol.errors import BadMessage
from moorage.protocol.fair_semaphore import FairSemaphore
from moorage.protocol.json_bounds import LARGE_BYTES
from moorage.protocol.loop_shares import LoopShares
from moorage.protocol.messages import (
    AllocationRequest,
    DecisionFleet,
    DecisionListing,
    FleetListing,
    LeaseListing,
    Logs,
    PastFleet,
    QueueListing,
    QuotaListing,
    ReservationListing,
    Resume,
    Status,
    WhatIf,
    Why,
    decode_and_warn,
)
from moorage.protocol.replies import event, failure, failure_from
from moorage.records.rights import Caller


@dataclass(slots=True)
class Counts:
    """Counters of the gateway since it started.

    Args:
        sessions_total: Sessions opened.
        messages_total: Messages read.
        malformed_total: Messages among them that could not be read.
        replies_total: Replies given, also to clients that had left before the reply.
        events_total: Messages that were pushed.
        missed_total: Messages that were not pushed, since the client left too many unread.
        slow_readers_total: Sessions dropped because they did not read.
        refused_full_total: Handshakes refused because all sessions were taken.
        refused_unauthorized_total: Handshakes refused without a valid token.
        refused_foreign_total: Requests refused: from other sites' pages, or under another host
            name.
    """

    sessions_total: int = 0
    messages_total: int = 0
    malformed_total: int = 0
    replies_total: int = 0
    events_total: int = 0
    missed_total: int = 0
    slow_readers_total: int = 0
    refused_full_total: int = 0
    refused_unauthorized_total: int = 0
    refused_foreign_total: int = 0


_LISTINGS: Final = frozenset(
    {DecisionFleet, DecisionListing, FleetListing, LeaseListing, PastFleet, QueueListing}
)
"""Messages whose answers are large: a session gets them one after the other."""

_READS: Final = _LISTINGS | {Logs, QuotaListing, ReservationListing, Status, WhatIf, Why}
"""The messages that change nothing."""

_BINARY = failure(
    Code.BAD_MESSAGE,
    "The message came as binary; send JSON as a text message.",
    expected="a text message",
)

_STOPPING = "The server is stopping; connect again in a moment."


class Session:
    """A session, from the opening handshake until its last message can arrive.

    A session that loses its connection buffers its messages until it is resumed over another one.

    Args:
        connection: The session's connection, already open.
        deliver: The receiver of the session's requests.
        settings: The limits of the gateway.
        counts: The counters, which all sessions share.
        turns: The turns of all sessions to read large messages.
        shares: Limits the time for small messages in one turn of the event loop.
        drop: Starts closing the connection with a code and a reason.

    Attributes:
        deliver: The present receiver of its requests; it may change.
        lasts: Whether the session can be resumed after a lost connection.
        expiry_timer: Closes the session if it is not resumed in time.
    """

    def __init__(
        self,
        connection: GatewayConnection,
        caller: Caller,
        deliver: Deliver,
        settings: GatewaySettings,
        counts: Counts,
        turns: FairSemaphore,
        shares: LoopShares,
        drop: Callable[["Session", int, str], None],
    ) -> None:
        self.id: SessionId = connection.session_id
        self.caller = caller
        self.tenant = caller.tenant
        self.connection = connection
        self.draining = False
        self.lasts = settings.resume_seconds > 0
        self.expiry_timer: asyncio.TimerHandle | None = None
        self.deliver = deliver
        self._settings = settings
        self._counts = counts
        self._turns = turns
        self._shares = shares
        self._drop = drop
        self._loop = asyncio.get_running_loop()
        self._number = 0
        self._listing = 0
        """Number of the last unanswered message that reads a list; 0: none."""
        self._unanswered: dict[int, str | int | None] = {}
        """Number of each unanswered message, and its `id`; None: it has a place in the line."""
        self._line: deque[int] = deque()
        self._early: dict[int, bytes] = {}
        """Replies that wait for earlier replies in the line."""
        self._parked: set[int] = set()
        self._patient: set[int] = set()
        """Numbers of unanswered messages whose requests have `wait_seconds`."""
        self._outbox: deque[bytes] = deque()
        self._events: deque[bytes] = deque()
        self._missed = 0
        self._held = 0
        """Bytes of replies and news that wait for another connection."""
        self._resume: Resume | None = None
        self._taking: asyncio.Future[None] | None = None
        """The next message must not be handled before this future is done."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._flush_due = False
        self._gone = False
        self._left = False
        """Whether the client had left at the end of the session's last wait."""
        self._slow: asyncio.TimerHandle | None = None
        self._space: asyncio.Future[None] | None = None
        self._idle: asyncio.Future[None] | None = None
        self._listen(connection)

    def _listen(self, connection: GatewayConnection) -> None:
        connection.on_text = self._take_at_once
        connection.on_writable = self._writable
        connection.on_lost = self._note_loss

    @property
    def gone(self) -> bool:
        """Whether the session has no connection."""
        return self._gone

    @property
    def in_flight(self) -> int:
        """The number of messages without a written reply, except those that wait in the queue."""
        waiting = len(self._unanswered) - len(self._parked)
        return waiting + len(self._early) + len(self._outbox)

    @property
    def parked(self) -> int:
        """The number of messages whose requests wait in the queue."""
        return len(self._parked)

    # In ------------------------------------------------------------------------------------

    async def serve(self) -> Resume | None:
        """Read messages until the client leaves; then handle small messages that it sent before.

        Returns:
            The client's request to resume another session over this connection, or None.
        """
        connection = self.connection
        try:
            if self._tasks:  # Tasks of the previous connection are handled in order.
                await asyncio.wait(self._tasks)
            while True:
                frame = await connection.recv()  # A message that `_take_at_once` has left.
                if self.connection is not connection:
                    return None
                take = self._take_large if len(frame) > LARGE_BYTES else self._take_small
                taking = await take(frame)
                del frame  # Otherwise the frame stays in memory until the next one.
                if self._resume is not None:
                    resume, self._resume = self._resume, None
                    return resume
                if self.connection is not connection:
                    return None
                self._taking = taking
                await self._until_ready(connection)  # Further frames stay in the queue.
        except ConnectionClosed:
            if self._tasks and self.connection is connection:
                await asyncio.wait(self._tasks)
            return None

    async def _until_ready(self, connection: GatewayConnection) -> None:
        """Wait until the last message is handled, and there is room for the next one."""
        if (taking := self._taking) is not None:
            await asyncio.wait([taking])
            if self._taking is taking:
                self._taking = None
        while self._full() and not self._gone and self.connection is connection:
            self._space = self._loop.create_future()
            await self._space
            self._left = connection.has_left

    def _take_at_once(self, data: bytes) -> bool:
        """Handle a small message in the callback that read it, without waking the reader's task.

        Returns:
            Whether the message was handled. If not, the reader's task must handle it: it knows how
            to wait, to resume another session, and to refuse text that is not UTF-8.
        """
        if (
            len(data) > LARGE_BYTES
            or (self._taking is not None and not self._taking.done())
            or self._full()
            or b"resume" in data
            or b"\\u" in data  # `resume` may be written with escapes.
        ):
            return False
        try:
            text = data.decode()
        except UnicodeDecodeError:
            return False
        try:
            self._taking = self._take(text)
        except Exception as error:  # noqa: BLE001  # Every one is a defect, and goes to `fail`.
            self._defect(error)
        return True

    async def _take_small(self, frame: str | bytes) -> asyncio.Future[None] | None:
        """Handle a small message as soon as it is its tenant's turn."""
        connection = self.connection
        await self._until_ready(connection)  # A message taken at once may have filled the session.
        if self.connection is not connection:
            return None
        if (turn := self._shares.turn(self.tenant)) is not None:
            await turn
            if self.connection is not connection:
                return None
            self._left = connection.has_left
        began = time.perf_counter()  # The clock of uvloop counts whole milliseconds.
        taking = self._take(frame)
        self._shares.spend(self.tenant, time.perf_counter() - began)
        return taking

    async def _take_large(self, frame: str | bytes) -> asyncio.Future[None] | None:
        """Handle a large message when it is its turn; drop it if its connection is gone.

        Thousands of messages may wait when their senders leave.
        """
        connection = self.connection
        with connection.taking(len(frame)):
            await self._until_ready(connection)
            async with self._turns.turn(self.tenant):
                if self.connection is not connection or connection.has_left:
                    return None
                return self._take(frame)

    def is_for(self, caller: Caller) -> bool:
        """Return whether a caller may resume this session: tenant and role must be the same."""
        mine = self.caller
        return self.lasts and (mine.tenant, mine.role) == (caller.tenant, caller.role)

    def resume(self, other: "Session", message: Resume) -> None:
        """Continue over the connection of `other`, which ends; answer its `resume` message."""
        self.connection.let_go()
        other._stop_slow_timer()  # noqa: SLF001  # `other` is of this class.
        self._stop_slow_timer()
        self.connection, self.caller = other.connection, other.caller
        self._gone, self._left, self._held = False, False, 0
        self._listen(self.connection)
        if self.connection.paused:
            self._writable(False)  # noqa: FBT003  # As in `GatewayConnection`.
        if self._space is not None and not self._space.done():
            self._space.set_result(None)  # Wakes the reader of the previous connection.
        self._space = None
        self._number += 1
        # The reply to `resume` has no place in the line, where it would wait for earlier replies.
        self._unanswered[self._number] = "" if message.id is None else message.id
        self._hand_over(Address(self.id, self._number), message, ())
        self._flush()  # At once: the next connection that resumes it must not get this reply.

    def unanswered(self, but: int) -> list[str | int | None]:
        """Return the ids of unanswered messages, except `but`; None stands for a missing id."""
        ids = (each for number, each in self._unanswered.items() if number != but)
        return [*(each for each in ids if each is not None), *(None for _ in self._line)]

    def _full(self) -> bool:
        """Return whether the next message has to wait.

        A page of a list costs a thousand times as much as another answer. So a client gets its
        pages one by one, and none while it does not read.
        """
        if self._listing not in self._unanswered:
            self._listing = 0
        return (
            self.in_flight >= self._settings.inflight_max
            or self.connection.paused
            or self._listing > 0
        )

    def _take(self, frame: str | bytes) -> asyncio.Future[None] | None:
        """Handle one message; read the next one once the returned future, if any, is done."""
        self._number += 1
        number = self._number
        self._counts.messages_total += 1
        if isinstance(frame, bytes):
            self._refuse(number, None, _BINARY)
            return None
        if self.draining and len(frame) > LARGE_BYTES:  # Decoding it would delay the stop.
            self._refuse(number, None, failure(Code.SHUTTING_DOWN, _STOPPING))
            return None
        try:
            message, warnings = decode_and_warn(frame)
        except BadMessage as error:
            self._refuse(number, error.id, failure_from(error))
            return None
        if self._is_pointless(message):
            return None
        if type(message) in _LISTINGS:
            self._listing = number
        self._expect(number, message.id)
        if isinstance(message, AllocationRequest) and message.lease and message.lease.wait_seconds:
            if len(self._patient) >= self._settings.parked_max:
                self.tell(number, failure(Code.BUSY, self._waiting_too, id=message.id))
                return None
            self._patient.add(number)
        if self.draining:
            self.tell(number, failure(Code.SHUTTING_DOWN, _STOPPING, id=message.id))
            return None
        if type(message) is Resume:
            self._ask_to_resume(number, message)
            return None
        to = Address(self.id, number)
        return self._hand_over(to, message, warnings)

    def _is_pointless(self, message: Request) -> bool:
        """Return whether the answer to a message is of no use, since the client has left."""
        if self.lasts:  # A session may be resumed; only lists are too large for its buffer.
            return self._gone and type(message) in _LISTINGS
        if isinstance(message, AllocationRequest) and message.lease:
            return self._left  # The lease would have no holder.
        return self._gone and type(message) in _READS

    def _ask_to_resume(self, number: int, message: Resume) -> None:
        if number > 1:
            reason = "Send `resume` as the first message of a connection."
            self.tell(number, failure(Code.BAD_MESSAGE, reason, field="op", id=message.id))
        elif not self._gone:
            self._resume = message

    def _hand_over(
        self, to: Address, message: Request, warnings: Sequence[str]
    ) -> asyncio.Future[None] | None:
        try:
            taking = self.deliver.request(to, self.caller, message, warnings)
        except Exception as error:  # noqa: BLE001  # Every one is a defect, and goes to `fail`.
            self._defect(error)
            return None
        if taking is None or isinstance(taking, asyncio.Future):
            return taking
        task = self._loop.create_task(taking)
        self._tasks.add(task)
        task.add_done_callback(self._forget_task)
        return task if message.id is None else None

    def _forget_task(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._defect(error)

    @property
    def _waiting_too(self) -> str:
        most = self._settings.parked_max
        return f"{most} requests of this connection wait already, the most that may; try later."

    def _expect(self, number: int, identity: str | int | None) -> None:
        self._unanswered[number] = identity
        if identity is None:
            self._line.append(number)

    def _refuse(self, number: int, identity: str | int | None, reply: bytes) -> None:
        self._counts.malformed_total += 1
        self._expect(number, identity)
        self.tell(number, reply)

    def _defect(self, error: BaseException) -> None:
        self.deliver.fail(error)
        self._drop(self, Close.DEFECT, "the server met a defect")

    # Out -----------------------------------------------------------------------------------

    def tell(self, number: int, reply: bytes) -> None:
        """Answer one of the session's messages.

        Raises:
            AssertionError: The message has been answered, or never existed.
        """
        if number not in self._unanswered:
            raise AssertionError(f"message {number} of session {self.id} has no open request")
        in_line = self._unanswered.pop(number) is None
        self._parked.discard(number)
        self._patient.discard(number)
        self._counts.replies_total += 1
        if self._gone:
            self._hold(reply)
        if not in_line:
            self._outbox.append(reply)
        elif self._line[0] != number:
            self._early[number] = reply
            return
        else:
            self._line.popleft()
            self._outbox.append(reply)
            while self._line and self._line[0] in self._early:
                self._outbox.append(self._early.pop(self._line.popleft()))
        self._flush_soon()

    def park(self, number: int) -> None:
        """Stop counting a message as in flight: its request waits in the queue."""
        if number in self._unanswered and len(self._parked) < self._settings.parked_max:
            self._parked.add(number)
            self._settle()

    @property
    def reads_on(self) -> bool:
        """Whether all news are sent to the client, or will be at once."""
        return not (self._gone or self._events or self._missed or self.connection.paused)

    def push(self, news: bytes) -> None:
        """Send news. A client that leaves too many unread misses some, and gets their number.

        A client that reads nothing at all is disconnected, as for replies: see `slow_seconds_max`.
        """
        if self._gone and not self.lasts:
            return
        too_much = self._gone and self._held + len(news) > HELD_BYTES_MAX
        if self._missed or too_much or len(self._events) >= self._settings.events_max:
            self._missed += 1
            self._counts.missed_total += 1
            return
        if self._gone:
            self._held += len(news)
        self._counts.events_total += 1
        self._events.append(news)
        self._flush_soon()

    def idle(self) -> asyncio.Future[None]:
        """Return a future that is done once due replies are written and the buffer is not full."""
        idle = self._idle = self._loop.create_future()
        self._settle()
        return idle

    def abandon(self) -> None:
        """Cancel the messages that wait for their turn, since the gateway stops."""
        for task in self._tasks:
            task.cancel()

    def _hold(self, reply: bytes) -> None:
        """Count replies that wait for a resume; if there are too many, end the session."""
        self._held += len(reply)
        if self.lasts and self._held > HELD_BYTES_MAX:
            self._drop(self, Close.TRY_LATER, "too many replies were waiting for the client")

    def _flush_soon(self) -> None:
        # Once per turn of the loop: replies of one turn are sent together.
        if not self._flush_due:
            self._flush_due = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_due = False
        connection = self.connection
        if self._gone and not self.lasts:
            self._outbox.clear()
            self._events.clear()
            self._missed = 0
        # While closing, write nothing: resumable sessions buffer, others drop.
        takes = connection.open or not self.lasts
        for unwritten in (self._outbox, self._events):
            while takes and unwritten and not connection.paused:
                connection.write(_piece(unwritten, self._settings.write_buffer_bytes_max))
        if takes and self._missed and not connection.paused:
            missed, self._missed = self._missed, 0
            connection.write([event("missed", {"missed": missed})])
        self._settle()

    def _settle(self) -> None:
        """Wake the reader, which waits until fewer messages are in flight."""
        if self._space is not None and (self._gone or not self._full()):
            if not self._space.done():
                self._space.set_result(None)
            self._space = None
        written = self._gone or not (self.in_flight or self.connection.paused)
        if self._idle is not None and written:
            if not self._idle.done():
                self._idle.set_result(None)
            self._idle = None

    def _writable(self, writable: bool) -> None:  # Has the type of `on_writable`.
        self._stop_slow_timer()
        if writable:
            self._flush_soon()
        else:
            self._slow = self._loop.call_later(self._settings.slow_seconds_max, self._too_slow)

    def _too_slow(self) -> None:
        self._slow = None
        self._counts.slow_readers_total += 1
        limit = self._settings.slow_seconds_max
        self._drop(self, Close.TRY_LATER, f"replies were left unread for {limit:g} seconds")

    def _stop_slow_timer(self) -> None:
        if self._slow is not None:
            self._slow.cancel()
            self._slow = None

    def _note_loss(self) -> None:
        """Record that the session has no client now; a client may resume it."""
        self._gone = True
        self.lasts = self.lasts and not self.connection.said_goodbye
        self._held = sum(map(len, (*self._outbox, *self._events, *self._early.values())))
        self._stop_slow_timer()
        self._flush_soon()


def _piece(unwritten: deque[bytes], bytes_max: int) -> list[bytes]:
    """Remove one text from the front, and more texts while there is room for them."""
    piece: list[bytes] = []
    taken = 0
    while unwritten and taken < bytes_max:
        piece.append(unwritten.popleft())
        taken += len(piece[-1])
    return piece
