"""Dry runs: predicts the effect of an operation, and changes nothing; the allocator calls it."""

from dataclasses import dataclass

from msgspec import to_builtins
from msgspec.structs import replace

from moorage.core.fit.feasibility import Feasibility
from moorage.core.lifecycle.cordons import Cordons
from moorage.core.lifecycle.leases import LeaseLifecycle
from moorage.core.lifecycle.warm_reuse import WarmReuse
from moorage.core.queue.open_requests import OpenRequests
from moorage.core.reports import forecast
from moorage.core.reports.explain import waiter_row
from moorage.core.state import refusals
from moorage.core.state.facts import Cordoned, Refusal
from moorage.core.state.state import RELEASED, State
from moorage.core.turns.effects import Information, LeaseNews, Response
from moorage.core.turns.events import CancelAsked, CordonAsked, DryRun, FlushAsked, ReleaseAsked
from moorage.model import Lease, LeaseState
from moorage.records.json_values import JsonObject
from moorage.records.leases import ReleasePreview


@dataclass(frozen=True, slots=True)
class DryRuns:
    """Predicts the effects of operations for dry runs.

    Args:
        state: The present state, which is only read.
        feasibility: Decides which demands fit.
        requests: The open requests.
        leases: Finds leases and their owners.
        warm: Finds warm leases.
        cordons: Finds the leases in a place.
    """

    _state: State
    _feasibility: Feasibility
    _requests: OpenRequests
    _leases: LeaseLifecycle
    _warm: WarmReuse
    _cordons: Cordons

    def answer(self, run: DryRun, now: float) -> Response:
        """Return the effect that an operation would have."""
        match run.event:
            case ReleaseAsked() as event:
                return self._release(event, run, now)
            case CancelAsked() as event:
                return self._cancel(event)
            case FlushAsked(_, tenant, cluster):
                flushed = [lease.id for lease in self._warm.warm_leases(tenant, cluster)]
                return Information({"dry_run": True, "flushed": flushed})
            case CordonAsked() as event:
                return self._cordon(event, now, sees_all=run.sees_all)

    def _release(self, event: ReleaseAsked, run: DryRun, now: float) -> Response:
        found = self._leases.find_owned(event.lease, event.token_digest, event.tenant)
        if isinstance(found, Refusal):
            return found
        if found.over:
            return LeaseNews(found, owner=False)
        state: LeaseState = "warm" if _stays_warm(found) else "ended"
        ends = replace(found, state=state, reason=RELEASED)
        return LeaseNews(ends, reasons=self._next_waiters(found, run, now), owner=False)

    def _next_waiters(self, lease: Lease, run: DryRun, now: float) -> JsonObject:
        """Return the waiters that could be served after a release, and the seconds until then."""
        beside = [self._state.leases.get(each) for each in run.beside]
        own = [each for each in beside if each is not None and each.tenant == lease.tenant]
        state, waiting = self._state, self._requests.queue.in_turn(forecast.WAITERS_MAX)
        ending = list({each.id: each for each in [lease, *own]}.values())
        warm = tuple(each.id for each in ending if _stays_warm(each))
        served = forecast.waiters_after(state, self._feasibility, waiting, ending, now)
        shown = [
            each
            for each in served
            if run.sees_all or state.waiting[each].ask.tenant == lease.tenant
        ]
        preview = ReleasePreview(warm, tuple(shown), len(served) - len(shown), run.stop_seconds)
        row: JsonObject = to_builtins(preview)
        return row

    def _cancel(self, event: CancelAsked) -> Response:
        request = self._requests.first_with(event.tenant, event.request) or event.request
        waiter, ask = self._state.waiting.get(request), self._requests.find(request)
        if ask is None or ask.tenant != event.tenant:
            return refusals.not_waiting(event.request)
        row = {"request": request} if waiter is None else waiter_row(waiter)
        return Information({"dry_run": True, "state": "cancelled", **row})

    def _cordon(self, event: CordonAsked, now: float, *, sees_all: bool) -> Response:
        refusal = self._cordons.refusal(event)
        if refusal is not None:
            return refusal
        until = 0.0 if event.seconds is None else now + event.seconds
        place, drains = (event.cluster, event.node), event.mode == "drain"
        cordon = Cordoned(*place, now, event.tenant, event.reason, drains, until)
        there = self._cordons.there(event)
        others = [] if sees_all else [each for each in there if each.tenant != event.tenant]
        answer: JsonObject = {
            "cluster_id": event.cluster,
            "node_id": event.node or None,
            "leases": [each.id for each in there if sees_all or each.tenant == event.tenant],
            "unavailable": None if event.mode == "uncordon" else cordon.why,
        }
        if not sees_all:
            tenants = {each.tenant for each in others}
            answer["others"] = {"leases": len(others), "tenants": len(tenants)}
        return Information({"dry_run": True, **answer})


def _stays_warm(lease: Lease) -> bool:
    return lease.state == "active" and bool(lease.likeness)
