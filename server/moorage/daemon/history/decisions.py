"""`decisions`: lists recent decisions, newest first, for the console.

Grants, places in the queue and what became of them are in the ledger. An immediate refusal is no
fact: this module stores the last refusals, each with the number of the last fact at that time.
"""

import re
from dataclasses import dataclass
from time import time
from typing import Final

from msgspec.structs import replace

from moorage.core.reports import explain
from moorage.core.state.facts import Dequeued, Ended, Fact, Granted, Queued, Refusal, Requeued
from moorage.core.state.tenant_memory import TenantMemory
from moorage.core.turns.effects import Consult, Forget, Information, Respond, Response
from moorage.core.turns.events import CONSULTED, Asked, Event
from moorage.core.turns.turn import Turn
from moorage.ledger.base import PAGE_FACTS_MAX, LedgerEntry, LedgerError, LedgerHistory
from moorage.model import Ask, Code, Lease, RequestId
from moorage.protocol.messages import DecisionListing
from moorage.records.json_values import JsonObject
from moorage.records.requests import resources_of
from moorage.records.rights import Caller, Right

REFUSALS_MAX: Final = 10_000
"""Maximum stored refusals; with one more, the tenant with most refusals loses its oldest."""
KEPT_BYTES_MAX: Final = 4_096
"""Maximum bytes of a request that is stored with its refusal; larger requests are not stored."""
WINDOWS_MAX: Final = 5
"""Maximum pages of the ledger that one answer searches; the next call searches on."""
KINDS: Final = {"refused": "dequeued", "requeued": "requeued"}
"""The kind of fact that records each state of a decision, by state."""
FILTERS: Final = ("state", "policy_rule_uri", "code", "request", "tenant")

_CURSOR: Final = re.compile(r"([0-9]{1,18}):([0-9]{1,18})")

Row = JsonObject
Subject = Ask | Lease


@dataclass(frozen=True, slots=True, order=True)
class LedgerPlace:
    """The place of a decision: the fact `seq` (`number` is 0), or refusal `number` after it."""

    seq: int
    number: int


@dataclass(frozen=True, slots=True)
class RefusedAtOnce:
    """A request that was refused at once."""

    place: LedgerPlace
    at: float
    ask: Ask
    refusal: Refusal


class Decisions:
    """Lists recent decisions: grants and queueing from the ledger, and the stored refusals.

    Args:
        ledger: The ledger, which has the facts. This object is made before any fact is stepped.
    """

    def __init__(self, ledger: LedgerHistory) -> None:
        self.ledger = ledger
        self._seq = ledger.last_seq
        self._open: dict[RequestId, Ask] = {}
        self._refused: dict[int, RefusedAtOnce] = {}
        self._by_tenant = TenantMemory[int]()
        self._by_request: dict[str, RefusedAtOnce] = {}
        self._number = 0

    def observe_step(self, event: Event, turn: Turn) -> None:
        """Note refusals of this step. Runs on the hot path."""
        ask: Ask | None = None
        if type(event) is Asked:  # Here and below: quicker than `isinstance` of a Struct.
            ask = event.ask
        elif isinstance(event, CONSULTED):
            ask = self._open.pop(event.request, None)
        if ask is not None and not turn.facts:
            self._note(ask, turn)
        self._seq += len(turn.facts)
        for effect in turn.effects:
            if type(effect) is Consult:
                self._open[effect.ask.id] = effect.ask
            elif type(effect) is Forget:
                self._open.pop(effect.request, None)

    def _note(self, ask: Ask, turn: Turn) -> None:
        answer = None
        for effect in turn.effects:
            if isinstance(effect, Consult) and effect.ask.id == ask.id:
                return  # The policy is consulted again.
            if answer is None and isinstance(effect, Respond):
                answer = effect.answer
        if not isinstance(answer, Refusal):
            return
        if ask.size > KEPT_BYTES_MAX:
            ask = replace(ask, inputs={}, parameters={}, settings={}, provision=None)
        self._number += 1
        refused = RefusedAtOnce(LedgerPlace(self._seq, self._number), time(), ask, answer)
        self._refused[self._number] = refused
        self._by_tenant.add(ask.tenant, self._number)
        self._by_request[ask.id] = refused
        if len(self._refused) > REFUSALS_MAX:
            oldest = self._refused.pop(self._by_tenant.forget())
            self._by_request.pop(oldest.ask.id, None)

    def refusal(self, request: str) -> RefusedAtOnce | None:
        """Return a request that was refused at once, if its refusal is still stored."""
        return self._by_request.get(request)

    async def page(self, message: DecisionListing, caller: Caller) -> Response:
        """Return one page of decisions: those of the caller's tenant, or all if it may see all."""
        wanted = message.equalities()
        for name in wanted:
            if name not in FILTERS:
                known = ", ".join(FILTERS)
                reason = f"filters.{name}: expected one of {known}."
                return Refusal(Code.BAD_MESSAGE, reason, f"filters.{name}", f"one of {known}")
        if not caller.may(Right.READ_ALL):
            wanted["tenant"] = caller.tenant
        before = (
            _place(message.cursor) if message.cursor else LedgerPlace(self.ledger.last_seq + 1, 0)
        )
        if before is None:
            expected = "`next` of the page before"
            return Refusal(Code.BAD_MESSAGE, f"after: expected {expected}.", "after", expected)
        rows: list[Row] = []
        end: LedgerPlace | None = before
        try:
            since = await self.ledger.history_start()
            for _ in range(WINDOWS_MAX):
                found, end = await self._window(before, wanted)
                room = message.limit - len(rows)
                if len(found) > room:
                    found = found[:room]
                    end = found[-1][0]
                rows += [row for _, row in found]
                if end is None or len(rows) == message.limit:
                    break
                before = end
        except LedgerError as error:
            return Refusal(Code.UNAVAILABLE, f"the ledger cannot be read: {error}")
        following = None if end is None else f"{end.seq}:{end.number}"
        return Information({"decisions": rows, "next": following, "kept_since": since})

    async def _window(
        self, before: LedgerPlace, wanted: JsonObject
    ) -> tuple[list[tuple[LedgerPlace, Row]], LedgerPlace | None]:
        """Return the decisions before a place, newest first, and the place to search next."""
        top = before.seq if before.number else before.seq - 1
        top = min(top, self.ledger.last_seq)
        bottom = max(1, top - PAGE_FACTS_MAX + 1)
        state = wanted.get("state")
        entries = await self._entries(bottom, top, KINDS.get(str(state)))
        # Numbers have no gaps: if the first fact has a higher number, older facts are pruned.
        more = bottom > 1 and bool(entries) and entries[0].seq == bottom
        end = LedgerPlace(bottom, 0) if more else LedgerPlace(0, 0)
        found = [
            (each.place, _row(each.place.seq, each.at, each.ask, _refusal_row(each.refusal)))
            for each in self._refused.values()
            if end <= each.place < before
        ]
        asks: dict[str, Subject] = {}
        for entry in entries:
            row = await self._decision_row(entry, asks, state)
            if row is not None:
                found.append((LedgerPlace(entry.seq, 0), row))
        found = [
            each
            for each in found
            if all(each[1].get(name) == value for name, value in wanted.items())
        ]
        return sorted(found, key=lambda each: each[0], reverse=True), end if more else None

    async def _entries(self, bottom: int, top: int, kind: str | None) -> list[LedgerEntry]:
        entries: list[LedgerEntry] = []
        after = bottom - 1
        while after < top:
            page = await self.ledger.read(after, top - after, kind)
            entries += [entry for entry in page if entry.seq <= top]
            after = page[-1].seq if page else top
        return entries

    async def _decision_row(
        self, entry: LedgerEntry, asks: dict[str, Subject], state: object
    ) -> Row | None:
        match entry.fact:
            case Queued(ask):
                asks[ask.id] = ask
                outcome: Row = {"state": "queued", "reason": "It waits in the queue."}
                return _row(entry.seq, entry.at, ask, outcome)
            case Granted(lease):
                asks.setdefault(lease.id, lease)
                outcome = {"reason": explain.grant_reason(lease), "placement": lease.placement}
                return _row(entry.seq, entry.at, asks[lease.id], {"state": "granted", **outcome})
            case Dequeued(request, _, refusal):
                outcome = _refusal_row(refusal)
            case Requeued(request, _, reason):
                outcome = {"state": "requeued", "reason": reason}
            case Ended(request, _, reason):
                outcome = {"state": "ended", "reason": reason}
            case _:  # Such a fact decides about no request.
                return None
        if state not in {None, outcome["state"]}:
            return None  # The subject need not be looked up.
        subject = asks.get(request) or await self._subject(request)
        return None if subject is None else _row(entry.seq, entry.at, subject, outcome)

    async def _subject(self, request: RequestId) -> Subject | None:
        entries = await self.ledger.history(request, limit=1)
        return subject_of(entries[0].fact) if entries else None


def subject_of(fact: Fact) -> Subject | None:
    """Return the request or lease that a fact records; None for any other fact."""
    match fact:
        case Queued(ask):
            return ask
        case Granted(lease):
            return lease
        case _:  # Such a fact decides about no request.
            return None


def resources(subject: Subject) -> JsonObject | None:
    """Return the requested resources, or the granted ones of a lease whose request is forgotten."""
    ask = subject if isinstance(subject, Ask) else subject.ask
    if ask is not None:
        return None if ask.demand is None else resources_of(ask.demand)
    if not isinstance(subject, Lease) or not subject.placement:
        return None
    share = subject.placement[0]
    return {
        "gpus": len(share.gpus),
        "gpu_milli": share.gpu_milli,
        "cpu_milli": share.cpu_milli,
        "memory_mib": share.memory_mib,
        "nodes": len(subject.placement),
    }


def _place(cursor: str) -> LedgerPlace | None:
    found = _CURSOR.fullmatch(cursor)
    return None if found is None else LedgerPlace(int(found[1]), int(found[2]))


def _refusal_row(refusal: Refusal) -> Row:
    return {"state": "refused", "code": refusal.code.value, "reason": refusal.reason}


def _row(seq: int, at: float, subject: Subject, outcome: Row) -> Row:
    return {
        "request": subject.id,
        "at": at,
        "seq": seq,
        "tenant": subject.tenant,
        "policy_rule_uri": subject.policy.uri,
        "resources": resources(subject),
        **outcome,
    }
