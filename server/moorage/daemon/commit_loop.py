"""Steps the core in one task and commits in another; no effect leaves before its facts are durable.

All other tasks post events. While one group of facts is being made durable, the next events are
stepped already (group commit: the slower the disk, the larger the group). If no more facts are
expected, the ledger gets the next group before the first one is durable.
"""

import asyncio
import math
import time
from collections import deque
from collections.abc import Coroutine, Iterator, Sequence
from typing import Any, Final, NamedTuple, Protocol

import structlog

from moorage.config.settings import Config
from moorage.core.allocator import Allocator
from moorage.core.state.checkpoint import condense
from moorage.core.state.facts import Fact, Refusal
from moorage.core.turns.effects import EARLY, Effect, Respond
from moorage.core.turns.events import Asked, ClockSet, Event, ReleaseAsked, Stalled, Tick
from moorage.core.turns.turn import Turn
from moorage.daemon.clock import BEAT_SECONDS, STALL_SECONDS_MIN, CalendarRecord, Clock
from moorage.daemon.inbox import Inbox
from moorage.daemon.tasks import Tasks
from moorage.ledger.base import Ledger
from moorage.model import Code

BATCH_MAX: Final = 256
"""Maximum events that the loop steps before sockets are read again."""
BATCH_SECONDS_MAX: Final = 0.005
"""Maximum seconds of a batch: listing a large fleet takes as long as a thousand other events."""
GROUP_FACTS_MAX: Final = 1_000
"""Maximum facts in one group, rounded up to whole turns: encoding a group takes milliseconds."""
LONE_FACTS_MAX: Final = 16
"""Maximum facts for whose commit the loop waits if it has nothing else to do."""
GROUPS_MAX: Final = 2
"""Groups given to the ledger at a time: it begins the second without a pause after the first."""
UNCOMMITTED_MAX: Final = 20_000
"""Maximum facts that wait for the disk; beyond this, events stay in the inbox."""
READ_SECONDS: Final = 1.0
"""Seconds after a stall in which sockets are read before anything expires."""
FULL: Final = Refusal(
    Code.UNAVAILABLE,
    "The disk of the server is full, so it grants no leases. Existing leases can be renewed and "
    "released. The server's operator must free space.",
)

log = structlog.get_logger("moored")


class Effects(Protocol):
    """Receives the results of the core's steps."""

    def observe_step(self, event: Event, turn: Turn, seconds: float) -> None:
        """Observe a step and its duration in seconds, before any of its effects is carried out."""

    def observe_commit(self, facts: Sequence[Fact], last: int, seconds: float) -> None:
        """Observe facts up to the `last` seq that became durable, and the duration in seconds.

        This call comes before `note_durable` for each turn and before any effect of the group.
        """

    def note_durable(self, facts: Sequence[Fact]) -> None:
        """Observe the facts of a turn once they are durable, before its effects are carried out."""

    def carry_out(self, effect: Effect) -> None:
        """Carry out an effect; the effects of a turn come in order."""


class _Group(NamedTuple):
    """Facts that are made durable together.

    Args:
        turns: The turns of these facts, and turns without facts whose effects wait for them.
        facts: The facts, in order.
        stored: Returns the seq of the last fact once all are durable.
        began: The time at which the ledger got the facts, by the monotonic clock.
        checkpoint: The state with these facts, and their last seq; None: no checkpoint is due.
    """

    turns: list[Turn]
    facts: list[Fact]
    stored: Coroutine[Any, Any, int]
    began: float
    checkpoint: tuple[int, Iterator[Fact]] | None


class CommitLoop:
    """Turns events into facts and effects.

    Args:
        allocator: The core; only this loop steps it.
        ledger: The open ledger.
        inbox: The events that the core has not processed yet.
        effects: Carries out the effects of a step, once its facts are durable.
        tasks: Runs the loop's background tasks.
        config: Gives the number of facts between two checkpoints, and the grace after a stall,
            which is the same as after a restart.
    """

    def __init__(
        self,
        allocator: Allocator,
        ledger: Ledger,
        inbox: Inbox,
        effects: Effects,
        tasks: Tasks,
        config: Config,
    ) -> None:
        self._allocator = allocator
        self._ledger = ledger
        self._inbox = inbox
        self._effects = effects
        self._tasks = tasks
        self._checkpoint_every_facts = config.checkpoint_every_facts
        self._grace_seconds = max(config.restart_grace_seconds, READ_SECONDS)
        self._turns: list[Turn] = []
        """Turns that the ledger does not have yet."""
        self._groups: deque[_Group] = deque()
        """Groups that the ledger has received but not stored yet."""
        self._facts_waiting = 0
        self._letting_go = False
        """True: some effects of a stored group have not been carried out yet."""
        self._committed = asyncio.Event()
        self._idle = asyncio.Event()
        self._work = asyncio.Event()
        self._handed, self._checkpointed = ledger.last_seq, ledger.checkpoint_seq
        self._checkpoints: list[asyncio.Task[None]] = []
        self._wanted = False
        """True: the next commit writes a checkpoint."""
        self._serves_later = False
        """True: the waiters that a release may serve have not been checked yet."""
        self._clock = Clock()
        self._calendar = CalendarRecord(None if config.storage else config.data_dir)
        self._now = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at: float | None = None

    @property
    def backlog(self) -> int:
        """Number of events not yet stepped, plus facts not yet durable."""
        return len(self._inbox) + self._facts_waiting

    async def settle(self) -> None:
        """Wait until every event is stepped and every effect carried out."""
        while not self._is_idle():  # Events posted since the bell count, too.
            self._idle.clear()
            await self._idle.wait()

    async def follow_calendar(self) -> None:
        """Move all deadlines if the calendar was set while no server ran.

        No event may be stepped before this call.
        """
        before = max(self._ledger.last_seq - 1, 0)
        last = await self._ledger.read(before, 1)
        moved = self._calendar.calendar_shift(last[0].at) if last else 0.0
        if moved:
            log.warning("calendar_set", seconds=round(moved, 1))
            self._inbox.post(ClockSet(moved))
        self._calendar.write()

    async def step_forever(self) -> None:
        """Step posted events, batch by batch. Runs until cancelled."""
        while True:
            if not self._serves_later:
                await self._inbox.wait()
            while self._facts_waiting >= UNCOMMITTED_MAX:
                self._committed.clear()
                await self._committed.wait()
            until = time.monotonic() + BATCH_SECONDS_MAX
            if self._serves_later:
                self._serve_waiters()
            for _ in range(min(len(self._inbox), BATCH_MAX)):
                self._take(self._inbox.take())
                if time.monotonic() > until:
                    break
            self._hand_over()
            self._set_timer()
            self._inbox.read_on()
            self._note_idle()
            await asyncio.sleep(0)  # Sockets are read in between.
            if self._serves_later:
                await asyncio.sleep(0)  # The reply to the release is written.

    async def commit_forever(self) -> None:
        """Make facts durable, then carry out effects. Runs until cancelled."""
        try:
            while True:
                while not self._groups:
                    self._work.clear()
                    await self._work.wait()
                last = await self._groups[0].stored
                if self._is_disk_stalled():
                    self._clock.note_stall(self._groups[0].began)
                group = self._groups.popleft()
                self._letting_go = True
                self._facts_waiting -= len(group.facts)
                self._hand_over()  # The disk works while effects leave.
                if group.checkpoint is not None:
                    # Write the checkpoint beside the next commits: grants must not wait for it.
                    writing = self._tasks.spawn(self._ledger.checkpoint(*group.checkpoint))
                    self._checkpoints = [each for each in self._checkpoints if not each.done()]
                    self._checkpoints.append(writing)
                self._effects.observe_commit(group.facts, last, time.monotonic() - group.began)
                until = time.monotonic() + BATCH_SECONDS_MAX
                for turn in group.turns:  # News of one turn go before news of the next.
                    self._effects.note_durable(turn.facts)
                    self._let_go(turn)
                    if time.monotonic() > until:  # A slow disk makes groups of thousands.
                        await asyncio.sleep(0)
                        until = time.monotonic() + BATCH_SECONDS_MAX
                self._letting_go = False
                self._hand_over()
                self._committed.set()
                self._note_idle()
        finally:
            for group in self._groups:
                group.stored.close()

    async def watch_clocks(self) -> None:
        """Detect stalls of the loop and changes of the calendar. Runs until cancelled."""
        self._clock.beat()
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            if self._is_disk_stalled():
                continue
            if self._clock.stood_still_seconds or self._clock.drift_seconds:
                self._inbox.post(Tick())
            else:
                self._clock.beat()

    async def checkpoint(self) -> None:
        """Write a checkpoint once earlier checkpoints have ended. Call it only when settled."""
        await asyncio.gather(*self._checkpoints)
        await self._condense()

    async def checkpoint_beside(self) -> None:
        """Write a checkpoint while events are stepped, so that the next start reads less.

        While the loop is busy, the checkpoint waits for the next commit, which may take long.
        """
        await asyncio.gather(*self._checkpoints)
        if self._is_idle():
            await self._condense()
            return
        self._wanted = True
        while self._wanted or any(each.checkpoint is not None for each in self._groups):
            self._committed.clear()
            await self._committed.wait()
        await asyncio.gather(*self._checkpoints)

    async def _condense(self) -> None:
        if self._handed > self._checkpointed:
            self._checkpointed = self._handed
            await self._ledger.checkpoint(self._handed, condense(self._allocator.state))

    def _hand_over(self) -> None:
        """Give the facts of the next turns to the ledger, unless more facts should join them.

        These facts wait while the ledger has a group and more facts may come soon: each group costs
        a sync. No facts come if no policy decides and no event is queued.
        """
        more = bool(self._inbox) or self._allocator.undecided > 0
        if not self._turns or len(self._groups) >= (1 if more else GROUPS_MAX):
            return
        # A checkpoint has the state, so all that was stepped must be handed over with it.
        new = self._handed - self._checkpointed
        due = self._wanted or new >= self._checkpoint_every_facts
        turns = self._take_group(math.inf if due else GROUP_FACTS_MAX)
        facts: list[Fact] = [fact for turn in turns for fact in turn.facts]
        self._handed += len(facts)
        checkpoint: tuple[int, Iterator[Fact]] | None = None
        if due:
            self._wanted = False
            self._checkpointed = self._handed
            checkpoint = self._handed, condense(self._allocator.state)
        began = time.monotonic()
        lone = not (more or self._groups or self._turns) and len(facts) <= LONE_FACTS_MAX
        stored = self._ledger.append(facts, self._now, lone=lone)
        self._groups.append(_Group(turns, facts, stored, began, checkpoint))
        self._work.set()

    def _take_group(self, facts_max: float) -> list[Turn]:
        """Remove and return the turns whose facts are made durable next."""
        taken = count = 0
        while taken < len(self._turns) and count < facts_max:
            count += len(self._turns[taken].facts)
            taken += 1
        group, self._turns = self._turns[:taken], self._turns[taken:]
        return group

    def _is_disk_stalled(self) -> bool:
        """Return whether a slow commit delays all replies, as a stall of the loop would."""
        return bool(self._groups) and time.monotonic() - self._groups[0].began >= STALL_SECONDS_MIN

    def _take(self, event: Event) -> None:
        if type(event) is Tick:  # Here and below: quicker than `isinstance` of a Struct.
            self._mend_time()
        if type(event) is Asked and event.ask.terms is not None and self._ledger.is_full:
            self._effects.carry_out(Respond(event.to, FULL))
        else:
            self._step(event)

    def _mend_time(self) -> None:
        """Report stalls and clock changes to the core before it expires anything."""
        stalled = self._clock.stood_still_seconds
        if stalled:
            self._clock.beat()
            self._step(Stalled(stalled, self._grace_seconds))
        drift = self._clock.follow_calendar()
        if drift:
            self._timer_at = None  # It was computed from the old time.
            self._step(ClockSet(drift))
            self._calendar.write()

    def _step(self, event: Event) -> None:
        self._now = self._clock.now()
        began = time.perf_counter()
        if type(event) is not ReleaseAsked:
            self._take_turn(event, self._allocator.step(event, self._now), began)
            return
        # Finding the next waiters takes longer than the release, so its reply leaves first.
        self._take_turn(event, self._allocator.begin(event, self._now), began)
        self._serves_later = True
        if self._inbox:
            self._serve_waiters()

    def _serve_waiters(self) -> None:
        self._serves_later = False
        began = time.perf_counter()
        if (turn := self._allocator.finish()) is not None:
            self._take_turn(Tick(), turn, began)

    def _take_turn(self, event: Event, turn: Turn, began: float) -> None:
        self._effects.observe_step(event, turn, time.perf_counter() - began)
        held = bool(turn.facts or self._turns or self._groups or self._letting_go)
        if held and not turn.facts and self._groups and not self._turns:
            self._groups[-1].turns.append(turn)
        elif held:
            self._turns.append(turn)
            self._facts_waiting += len(turn.facts)
        if turn.facts and not self._inbox:
            self._hand_over()  # First: a cell that begins to work may take our processor.
        for effect in turn.effects:
            if type(effect) in EARLY:
                self._effects.carry_out(effect)
        if not held:
            self._let_go(turn)

    def _let_go(self, turn: Turn) -> None:
        for effect in turn.effects:
            if type(effect) not in EARLY:
                self._effects.carry_out(effect)

    def _set_timer(self) -> None:
        at = self._allocator.next_deadline()
        if at == self._timer_at:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = at
        if at is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(max(0.0, at - self._clock.now()), self._tick)

    def _tick(self) -> None:
        if self._is_disk_stalled():  # Earlier renewals have no reply yet.
            self._timer = asyncio.get_running_loop().call_later(BEAT_SECONDS, self._tick)
            return
        self._timer = self._timer_at = None
        self._inbox.post(Tick())

    def _is_idle(self) -> bool:
        busy = self._inbox or self._turns or self._groups or self._letting_go
        return not (busy or self._serves_later)

    def _note_idle(self) -> None:
        if self._is_idle():
            self._idle.set()
