"""One turn of the core: its facts and effects, and the writer that the parts of the core share.

The allocator begins a turn at every event, and the daemon commits it. `record` is the one way to
make a fact true and keep it.
"""

from typing import Final

import msgspec

from moorage.core.state.facts import Fact
from moorage.core.state.state import State, apply
from moorage.core.state.tenant_memory import TenantMemory
from moorage.core.turns.effects import Address, Effect, Respond, Response
from moorage.model import Ask, RequestId
from moorage.records.json_values import JsonObject


class Turn(msgspec.Struct, frozen=True, gc=False):
    """The result of one step: the facts are durable before any effect but those of `EARLY`."""

    facts: list[Fact] = msgspec.field(default_factory=list)
    effects: list[Effect] = msgspec.field(default_factory=list)


DECISIONS_MAX: Final = 10_000
"""Decision records in memory for `why`; beyond it the oldest of the tenant with most is forgotten.
What was granted or queued comes from the ledger's history then."""


class TurnWriter:
    """The writer of one turn.

    Attributes:
        state: What the facts say.
        now: Seconds since the epoch, for this turn.
        turn: Facts and effects of this turn, so far.
        decisions: Recent decision records, by request.
        wakes: Whether what waits may be served now; the allocator looks when all else is decided.
    """

    def __init__(self) -> None:
        self.state = State()
        self.now = 0.0
        self.turn = Turn()
        self.decisions: dict[str, JsonObject] = {}
        self._by_tenant = TenantMemory[RequestId]()
        self.wakes = False

    def begin(self, now: float) -> Turn:
        """Begin a turn at `now`, in seconds since the epoch."""
        self.now, self.turn, self.wakes = now, Turn(), False
        return self.turn

    def record(self, fact: Fact) -> None:
        """Make a fact true and keep it."""
        apply(self.state, fact)
        self.turn.facts.append(fact)

    def emit(self, effect: Effect) -> None:
        """Emit an effect, to be carried out once the facts are durable."""
        self.turn.effects.append(effect)

    def respond(self, to: Address, answer: Response) -> None:
        """Answer a message."""
        self.turn.effects.append(Respond(to, answer))

    def explain(self, ask: Ask, record: JsonObject) -> None:
        """Remember the reasons for the answer to a request."""
        self.decisions[ask.id] = record
        self._by_tenant.add(ask.tenant, ask.id)
        if len(self.decisions) > DECISIONS_MAX:
            del self.decisions[self._by_tenant.forget()]
