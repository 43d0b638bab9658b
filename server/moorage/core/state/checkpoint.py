"""The state condensed into facts: the body of a checkpoint. The commit loop is the caller."""

import math
from collections.abc import Iterator

from moorage.core.state.facts import (
    Carried,
    ClockMoved,
    ClusterSet,
    Counted,
    DurationsCarried,
    Fact,
    HalfLifeSet,
    Overtaken,
    Queued,
    QuotaSet,
    Reserved,
    UsageCarried,
)
from moorage.core.state.state import State
from moorage.model import Tenant


def condense(state: State) -> Iterator[Fact]:
    """Yield the fewest facts that make `state` from nothing: the body of a checkpoint."""
    if state.clock_moved_at > -math.inf:
        yield ClockMoved(state.clock_moved_at, 0.0)
    for cluster in state.clusters.values():
        yield ClusterSet(cluster)
    yield from state.cordons.values()
    for reservation in state.reserved.by_id.values():
        yield Reserved(reservation)
    yield from _shares(state)
    for lease in (*state.ended.values(), *state.leases.values()):
        yield Carried(lease)
    for waiter in state.waiting.values():
        if waiter.lease is None:
            yield Queued(waiter.ask, waiter.at, waiter.deadline)
        else:
            yield Carried(waiter.lease)
    for request, times in state.overtaken.items():
        yield Overtaken(request, times)
    for (tenant, project), past in state.accounts.past():
        yield UsageCarried(tenant, project, *past)
    for likeness, counts in state.durations.counts():
        yield DurationsCarried(*likeness, counts)
    yield Counted(state.fencing)


def _shares(state: State) -> Iterator[Fact]:
    """Yield the limits of accounts, which come before their use."""
    accounts = state.accounts
    if accounts.half_life:
        yield HalfLifeSet(accounts.half_life, accounts.as_of())
    for (tenant, project), quota in accounts.quotas.items():
        yield QuotaSet(tenant, project, quota, 0.0, Tenant(""))
