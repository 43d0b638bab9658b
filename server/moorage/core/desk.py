"""The desk that the core's clerks share: the state, the turn being written, the records kept.

Only the core uses it. `be` is the one way to make a fact true and keep it.
"""

from typing import Any, Final

from moorage.core.state import State, apply
from moorage.core.words import Address, Answer, Effect, Fact, Tell, Turn
from moorage.model import RequestId

DECISIONS_MAX: Final = 10_000
"""Decision records kept for `why`; older ones come from the ledger's history."""


class Desk:
    """What one turn is written on.

    Attributes:
        state: What the facts say.
        now: Seconds since the epoch, for this turn.
        turn: Facts and effects of this turn, so far.
        decisions: Recent decision records, by request, oldest first.
        wakes: Whether what waits may be served now; the allocator looks when all else is decided.

    """

    def __init__(self) -> None:
        self.state = State()
        self.now = 0.0
        self.turn = Turn()
        self.decisions: dict[str, dict[str, Any]] = {}
        self.wakes = False

    def begin(self, now: float) -> Turn:
        """Begin a turn at `now`, in seconds since the epoch."""
        self.now, self.turn, self.wakes = now, Turn(), False
        return self.turn

    def be(self, fact: Fact) -> None:
        """Make a fact true and keep it."""
        apply(self.state, fact)
        self.turn.facts.append(fact)

    def do(self, effect: Effect) -> None:
        """Have something done once the facts are durable."""
        self.turn.effects.append(effect)

    def tell(self, to: Address, answer: Answer) -> None:
        """Answer a message."""
        self.turn.effects.append(Tell(to, answer))

    def record(self, request: RequestId, record: dict[str, Any]) -> None:
        """Remember why a request was answered as it was."""
        self.decisions.pop(request, None)
        self.decisions[request] = record
        if len(self.decisions) > DECISIONS_MAX:
            del self.decisions[next(iter(self.decisions))]
