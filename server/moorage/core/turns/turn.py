"""One turn of the core: its facts and effects, and the writer that all parts of the core share.

The allocator begins a turn at every event, and the daemon commits the turn. Only `record` applies a
fact and adds it to the turn.
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
    """One step's facts and effects; only effects in `EARLY` leave before the facts are durable."""

    facts: list[Fact] = msgspec.field(default_factory=list)
    effects: list[Effect] = msgspec.field(default_factory=list)


DECISIONS_MAX: Final = 10_000
"""Maximum decision records in memory for `why`; with one more, the oldest record of the tenant with
most records is forgotten. For a forgotten grant or wait, `why` reads the ledger's history."""


class TurnWriter:
    """Applies the facts of the current turn, and collects them with the turn's effects.

    Attributes:
        state: The state after the facts so far.
        now: Seconds since the epoch, for this turn.
        turn: The facts and effects of this turn so far.
        decisions: Recent decision records, by request.
        wakes: Whether waiters may be served now; the allocator checks them at the end of the turn.
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
        """Apply a fact to the state and add it to the turn."""
        apply(self.state, fact)
        self.turn.facts.append(fact)

    def emit(self, effect: Effect) -> None:
        """Add an effect to the turn; it is carried out once the facts are durable."""
        self.turn.effects.append(effect)

    def respond(self, to: Address, answer: Response) -> None:
        """Add the answer to a message as an effect."""
        self.turn.effects.append(Respond(to, answer))

    def explain(self, ask: Ask, record: JsonObject) -> None:
        """Store the reasons for the answer to a request."""
        self.decisions[ask.id] = record
        self._by_tenant.add(ask.tenant, ask.id)
        if len(self.decisions) > DECISIONS_MAX:
            del self.decisions[self._by_tenant.forget()]
