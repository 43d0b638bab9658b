"""One task steps the core, one commits, and nothing leaves before its facts are durable.

Everything else posts events. While one group of facts is being made durable, the next events are
stepped already (group commit: the slower the disk, the larger the group).
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from moorage.core.allocator import Allocator
from moorage.core.effects import EARLY, Effect, Respond
from moorage.core.events import Asked, Event, Tick
from moorage.core.facts import Fact, Refusal
from moorage.core.state import condense
from moorage.core.turn import Turn
from moorage.ledger.base import Ledger
from moorage.model import Code

BATCH_MAX: Final = 256
"""Events stepped before the loop gets a chance to read sockets again."""
BATCH_SECONDS_MAX: Final = 0.005
"""How long that may take: a page of a large fleet costs as much as a thousand other events."""
UNCOMMITTED_MAX: Final = 20_000
"""Facts waiting for the disk; beyond it events wait in the inbox."""
FULL: Final = Refusal(
    Code.UNAVAILABLE,
    "The disk of the server is full, so it grants no leases; those it has can be renewed and "
    "released. Its operator must make room.",
)


class CommitLoop:
    """Turns events into facts and effects.

    Args:
        allocator: The core; nobody else may step it.
        ledger: Open.
        last_seq: The ledger's last fact.
        carry_out: Called for each effect, in order, once its facts are durable.
        stepped: Called after each step, before anything of it leaves.
        durable: Called with the facts of each turn once they are on the disk, before its effects.
        failed: Called once, with what broke; the process must end.
        checkpoint_every_facts: Facts between checkpoints.

    """

    def __init__(
        self,
        allocator: Allocator,
        ledger: Ledger,
        *,
        last_seq: int,
        carry_out: Callable[[Effect], None],
        stepped: Callable[[Event, Turn], None],
        durable: Callable[[Sequence[Fact]], None],
        failed: Callable[[BaseException], None],
        checkpoint_every_facts: int,
    ) -> None:
        self._allocator = allocator
        self._ledger = ledger
        self._carry_out = carry_out
        self._stepped = stepped
        self._durable = durable
        self._failed = failed
        self._checkpoint_every_facts = checkpoint_every_facts
        self._inbox: deque[Event] = deque()
        self._scheduled = False
        self._turns: list[Turn] = []
        self._facts_waiting = 0
        self._committing = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._work = asyncio.Event()
        self._handed = last_seq
        self._checkpointed = last_seq
        self._checkpoints: set[asyncio.Task[None]] = set()
        # Time of day as of now, counted on by a clock that nobody sets: a step of the system's
        # clock must neither end every lease at once nor keep waiters waiting for hours.
        self._epoch = time.time() - time.monotonic()
        self._now = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at: float | None = None
        self._loop = asyncio.get_running_loop()

    def post(self, event: Event) -> None:
        """Have an event stepped soon, after those posted before it."""
        if isinstance(event, Asked) and event.ask.terms is not None and self._ledger.is_full:
            self._carry_out(Respond(event.to, FULL))
            return
        self._inbox.append(event)
        self._idle.clear()
        self._schedule()

    @property
    def backlog(self) -> int:
        """Events not yet stepped, and facts not yet durable."""
        return len(self._inbox) + self._facts_waiting

    async def settled(self) -> None:
        """Return when every event is stepped and every effect carried out."""
        while not self._idle.is_set():  # What was posted between the bell and here counts too.
            await self._idle.wait()

    async def commit_forever(self) -> None:
        """Make facts durable, then carry out effects. Runs until cancelled."""
        while True:
            await self._work.wait()
            self._work.clear()
            turns, self._turns = self._turns, []
            if not turns:
                continue
            self._committing = True
            facts: list[Fact] = [fact for turn in turns for fact in turn.facts]
            self._handed += len(facts)
            # The state is as of the facts just handed over: nothing was stepped since.
            body = list(condense(self._allocator.state)) if self._is_checkpoint_due() else None
            await self._ledger.append(facts, self._now)
            self._facts_waiting -= len(facts)
            for turn in turns:  # What a turn did is told before what the next one did.
                self._durable(turn.facts)
                self._let_go(turn)
            self._committing = False
            if body is not None:
                # Beside the next commits: grants must not wait for it.
                writing = self._loop.create_task(self._ledger.checkpoint(self._handed, body))
                self._checkpoints.add(writing)
                writing.add_done_callback(self._checkpoint_written)
            self._schedule()
            self._rest()

    async def checkpoint(self) -> None:
        """Write a checkpoint now, after those under way. Only when settled."""
        await asyncio.gather(*self._checkpoints)
        if self._handed > self._checkpointed:
            self._checkpointed = self._handed
            await self._ledger.checkpoint(self._handed, list(condense(self._allocator.state)))

    def _checkpoint_written(self, task: asyncio.Task[None]) -> None:
        self._checkpoints.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failed(error)

    def _is_checkpoint_due(self) -> bool:
        due = self._handed - self._checkpointed >= self._checkpoint_every_facts
        if due:
            self._checkpointed = self._handed
        return due

    def _schedule(self) -> None:
        if not self._scheduled and self._inbox and self._facts_waiting < UNCOMMITTED_MAX:
            self._scheduled = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._scheduled = False
        try:
            until = time.monotonic() + BATCH_SECONDS_MAX
            for _ in range(min(len(self._inbox), BATCH_MAX)):
                self._step(self._inbox.popleft())
                if time.monotonic() > until:
                    break
        except Exception as error:  # noqa: BLE001  # A broken invariant ends the process.
            self._failed(error)
            return
        self._schedule()
        self._set_timer()
        self._rest()

    def _step(self, event: Event) -> None:
        self._now = self._clock()
        turn = self._allocator.step(event, self._now)
        self._stepped(event, turn)
        for effect in turn.effects:
            if isinstance(effect, EARLY):
                self._carry_out(effect)
        if turn.facts or self._turns or self._committing:
            self._turns.append(turn)
            self._facts_waiting += len(turn.facts)
            self._work.set()
        else:
            self._let_go(turn)

    def _let_go(self, turn: Turn) -> None:
        for effect in turn.effects:
            if not isinstance(effect, EARLY):
                self._carry_out(effect)

    def _set_timer(self) -> None:
        at = self._allocator.next_deadline()
        if at == self._timer_at:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = at
        if at is not None:
            self._timer = self._loop.call_later(max(0.0, at - self._clock()), self._tick)

    def _clock(self) -> float:
        """Return seconds since the epoch; it never goes back."""
        return self._epoch + time.monotonic()

    def _tick(self) -> None:
        self._timer = self._timer_at = None
        self.post(Tick())

    def _rest(self) -> None:
        if not self._inbox and not self._turns and not self._committing:
            self._idle.set()
