"""Rebuilds the fleet from the ledger's facts, as it was at a time or when a request was decided.

The console's playground and its view of the fleet show such fleets. Without the first facts, which
may be pruned, no fleet can be rebuilt.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

from moorage.core.state.state import State, apply
from moorage.core.turns.effects import Information, Response
from moorage.daemon.history.decisions import Decisions, resources, subject_of
from moorage.daemon.news.fleet_map import FleetMap
from moorage.daemon.news.map_news import pack_text
from moorage.ledger.base import LedgerEntry, LedgerError, LedgerHistory
from moorage.model import Ask, Code, Lease, Tenant
from moorage.protocol.fair_semaphore import FairSemaphore
from moorage.protocol.faults import ServiceError
from moorage.records.json_values import JsonObject
from moorage.records.rights import Caller, Right

RECALLS_OF_TENANT_MAX: Final = 4
"""Maximum requests of one tenant for past fleets at a time; one more is refused as `busy`."""
RECALLS_MAX: Final = 32
"""Maximum requests of all tenants for past fleets at a time."""
FACTS_MAX: Final = 200_000
"""Maximum facts that are applied again for one answer."""


@dataclass(frozen=True, slots=True)
class DecidedAt:
    """A decision about `subject`, made after all facts before `seq`."""

    seq: int
    at: float
    subject: Ask | Lease


class RecalledFleets:
    """Rebuilds fleets from facts.

    Args:
        decisions: Stores requests that were refused at once.
    """

    def __init__(self, ledger: LedgerHistory, decisions: Decisions) -> None:
        self._ledger = ledger
        self._decisions = decisions
        self._turns = FairSemaphore()
        self._recalling: Counter[Tenant] = Counter()

    async def before(self, request: str, caller: Caller) -> JsonObject:
        """Return the clusters and leases as they were when a request was decided.

        Raises:
            ServiceError: `unknown_request`; `unavailable`: the ledger's facts are pruned, or cannot
                be read.
        """
        _, state = await self._recall(request, caller)
        leases = state.leases.values()
        return {
            "clusters": [state.offered(each) for each in state.clusters.values()],
            "held": [share for lease in leases for share in lease.placement],
        }

    async def recall(self, request: str, caller: Caller) -> Response:
        """Return the fleet of `before`, for a page to draw, and the message of the request.

        Raises:
            ServiceError: `unknown_request`; `unavailable`: the ledger's facts are pruned, or cannot
                be read.
        """
        decided, state = await self._recall(request, caller)
        answer = {"at": decided.at, "seq": decided.seq, "request": _message(decided.subject)}
        return Information(answer | {"packed": await self._pack(state, caller)})

    async def at(self, at: float, caller: Caller) -> Response:
        """Return the fleet as it was at a time, for a page to draw.

        Raises:
            ServiceError: `unavailable`: the ledger's facts are pruned, or cannot be read.
        """
        async with self._turn(caller.tenant):
            try:
                state, seq = await self._state(lambda entry: entry.at <= at)
            except LedgerError as error:
                raise _unreadable(error) from error
            packed = await self._pack(state, caller)
        return Information({"at": at, "seq": seq, "packed": packed})

    async def _pack(self, state: State, caller: Caller) -> str:
        shown = FleetMap(state)
        for lease in state.leases.values():
            shown.put(lease)
        shown.take_changes()
        snapshot = shown.snapshot(None if caller.may(Right.READ_ALL) else caller.tenant)
        return await asyncio.to_thread(pack_text, snapshot)

    async def _recall(self, request: str, caller: Caller) -> tuple[DecidedAt, State]:
        async with self._turn(caller.tenant):
            try:
                decided = await self._find_decision(request, caller)
                state, _ = await self._state(lambda entry: entry.seq < decided.seq)
            except LedgerError as error:
                raise _unreadable(error) from error
        return decided, state

    @asynccontextmanager
    async def _turn(self, tenant: Tenant) -> AsyncIterator[None]:
        """Wait for a turn to rebuild a fleet: one is rebuilt at a time, and tenants take turns."""
        count, everyone = self._recalling[tenant], self._recalling.total()
        if count >= RECALLS_OF_TENANT_MAX or everyone >= RECALLS_MAX:
            holder = "of your tenant wait" if count >= RECALLS_OF_TENANT_MAX else "wait here"
            most = count if count >= RECALLS_OF_TENANT_MAX else everyone
            raise ServiceError(
                Code.BUSY, f"{most} past fleets {holder} to be rebuilt; ask again later"
            )
        self._recalling[tenant] += 1
        try:
            async with self._turns.turn(tenant):
                yield
        finally:
            self._recalling[tenant] -= 1
            self._recalling += Counter()  # Drops counts of 0.

    async def _find_decision(self, request: str, caller: Caller) -> DecidedAt:
        may_see_all, refused = caller.may(Right.READ_ALL), self._decisions.refusal(request)
        if refused is not None and (may_see_all or refused.ask.tenant == caller.tenant):
            return DecidedAt(refused.place.seq + 1, refused.at, refused.ask)
        for entry in await self._ledger.history(request):
            found = subject_of(entry.fact)
            if found is not None and (may_see_all or found.tenant == caller.tenant):
                return DecidedAt(entry.seq, entry.at, found)
        reason = (
            f"the ledger has no decision about your request {request}, and the last requests that "
            "were refused at once do not include it"
        )
        raise ServiceError(Code.UNKNOWN_REQUEST, reason, field="request")

    async def _state(self, was: Callable[[LedgerEntry], bool]) -> tuple[State, int]:
        """Return the state after all facts for which `was` is true, and the last fact's number."""
        state, seq = State(), 0
        beyond = await self._ledger.read(FACTS_MAX, 1)
        if await self._ledger.history_start() is not None or any(map(was, beyond)):
            raise _lost_error()
        while page := await self._ledger.read(seq):
            for entry in page:
                if not was(entry):
                    return state, seq
                if entry.seq != seq + 1:  # Facts were pruned meanwhile.
                    raise _lost_error()
                apply(state, entry.fact)
                seq = entry.seq
            await asyncio.sleep(0)
        return state, seq


def _lost_error() -> ServiceError:
    reason = (
        f"this past fleet cannot be rebuilt: that needs all earlier facts, at "
        f"most {FACTS_MAX}, and some may be pruned"
    )
    return ServiceError(Code.UNAVAILABLE, reason)


def _unreadable(error: LedgerError) -> ServiceError:
    return ServiceError(Code.UNAVAILABLE, f"the ledger cannot be read: {error}")


def _message(subject: Ask | Lease) -> JsonObject:
    """Return the message that repeats the request, as far as it is stored."""
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
