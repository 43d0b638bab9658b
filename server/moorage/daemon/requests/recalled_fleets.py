"""The fleet as it was when a request was decided, made again of the ledger's facts.

The console's playground asks for it. A ledger whose first facts were pruned can tell no more.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from moorage.core.effects import Information, Response
from moorage.core.facts import Fact, Granted, Queued
from moorage.core.fleet_map import FleetMap
from moorage.core.state import State, apply
from moorage.daemon.requests.decisions import Decisions, resources
from moorage.daemon.requests.map_news import packed_text
from moorage.ledger.base import Ledger, LedgerError
from moorage.model import Ask, Code, Lease, Tenant
from moorage.protocol.faults import ServiceError

FACTS_MAX: Final = 200_000
"""Facts that are applied again for one answer."""


@dataclass(frozen=True, slots=True)
class DecidedAt:
    """A decision: the facts before `seq` were true, and `subject` is what it was about."""

    seq: int
    at: float
    subject: Ask | Lease


class RecalledFleets:
    """Makes fleets of facts.

    Args:
        ledger: Has them.
        decisions: Has what was refused at once.
        is_operator: Tells who may see what was decided for others.

    """

    def __init__(
        self, ledger: Ledger, decisions: Decisions, is_operator: Callable[[Tenant], bool]
    ) -> None:
        self._ledger = ledger
        self._decisions = decisions
        self._is_operator = is_operator

    async def before(self, request: str, tenant: Tenant) -> dict[str, Any]:
        """Return the clusters as they were when a request was decided, and what was held there.

        Raises:
            ServiceError: `unknown_request`, `unavailable`.

        """
        _, state = await self._recalled(request, tenant)
        leases = state.leases.values()
        return {
            "clusters": [state.offered(each) for each in state.clusters.values()],
            "held": [share for lease in leases for share in lease.placement],
        }

    async def told(self, request: str, tenant: Tenant) -> Response:
        """Return the same as a page draws it, and the message to ask again.

        Raises:
            ServiceError: As `before`.

        """
        decided, state = await self._recalled(request, tenant)
        shown = FleetMap(state)
        for lease in state.leases.values():
            shown.put(lease)
        shown.take_changed()
        snapshot = shown.snapshot(None if self._is_operator(tenant) else tenant)
        packed = await asyncio.to_thread(packed_text, snapshot)
        message = _message(decided.subject)
        return Information(
            {"at": decided.at, "seq": decided.seq, "request": message, "packed": packed}
        )

    async def _recalled(self, request: str, tenant: Tenant) -> tuple[DecidedAt, State]:
        try:
            decided = await self._decided(request, tenant)
            return decided, await self._state(decided.seq)
        except LedgerError as error:
            raise ServiceError(Code.UNAVAILABLE, f"the ledger cannot be read: {error}") from error

    async def _decided(self, request: str, tenant: Tenant) -> DecidedAt:
        may_see_all, refused = self._is_operator(tenant), self._decisions.refused(request)
        if refused is not None and (may_see_all or refused.ask.tenant == tenant):
            return DecidedAt(refused.place.seq + 1, refused.at, refused.ask)
        for entry in await self._ledger.history(request):
            found = _subject(entry.fact)
            if found is not None and (may_see_all or found.tenant == tenant):
                return DecidedAt(entry.seq, entry.at, found)
        reason = (
            f"the ledger has no decision about {request} of yours, and it is none of the last "
            "requests that were refused at once"
        )
        raise ServiceError(Code.UNKNOWN_REQUEST, reason, field="request")

    async def _state(self, seq: int) -> State:
        if seq > FACTS_MAX or await self._ledger.kept_since() is not None:
            reason = (
                f"the fleet of then cannot be made again: that takes all facts before "
                f"it, {FACTS_MAX} at most, and none may be pruned"
            )
            raise ServiceError(Code.UNAVAILABLE, reason)
        state, after = State(), 0
        while after < seq - 1:
            page = await self._ledger.read(after)
            for entry in page:
                if entry.seq < seq:
                    apply(state, entry.fact)
            after = page[-1].seq if page else seq
            await asyncio.sleep(0)
        return state


def _subject(fact: Fact) -> Ask | Lease | None:
    match fact:
        case Queued(ask):
            return ask
        case Granted(lease):
            return lease
        case _:  # It decides about no request.
            return None


def _message(subject: Ask | Lease) -> dict[str, Any]:
    """Return the message that asks for it again, as far as it is known still."""
    ask = subject if isinstance(subject, Ask) else subject.ask
    wanted = resources(subject)
    message = {"adhoc": True, "policy_rule_uri": subject.policy.uri, "inputs": {}}
    if wanted is not None:
        message["resources"] = wanted
    if ask is None:
        return message
    given = {
        "inputs": ask.inputs,
        "clusters": None if ask.candidates is None else list(ask.candidates),
        "parameters": dict(ask.parameters),
        "settings": dict(ask.settings),
    }
    return message | {name: each for name, each in given.items() if each}
