"""The state condensed into facts: the body of a checkpoint. The commit loop is the caller."""

import math
from collections.abc import Iterator
from itertools import chain, starmap

from msgspec.structs import replace

from moorage.core.state.facts import (
    Carried,
    ClockMoved,
    ClusterRemoved,
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
from moorage.core.state.waiters import Waiter
from moorage.model import Cluster, Tenant


def condense(state: State) -> Iterator[Fact]:
    """Return the fewest facts that restore `state`: the body of a checkpoint.

    The facts of leases and waiters are built lazily, while the caller iterates, as there may be
    very many.
    """
    leases = (*state.ended.values(), *state.leases.values())
    waiters, overtaken = (*state.waiting.values(),), (*state.overtaken.items(),)
    return chain(
        [*_fleet(state), *_shares(state)],
        map(Carried, leases),
        map(_waiting, waiters),
        starmap(Overtaken, overtaken),
        [*_left(state), *_past(state), Counted(state.fencing)],
    )


def _fleet(state: State) -> Iterator[Fact]:
    if state.clock_moved_at > -math.inf:
        yield ClockMoved(state.clock_moved_at, 0.0)
    for cluster in state.clusters.values():
        yield ClusterSet(cluster)
    yield from state.cordons.values()
    for reservation in state.reserved.by_id.values():
        yield Reserved(reservation)


def _left(state: State) -> Iterator[Fact]:
    """Yield facts that repeat the removal of nodes with leases, so their machines stay known."""
    for name, nodes in state.identities.left().items():
        cluster = state.clusters.get(name)
        before = cluster or Cluster(name, ())
        yield ClusterSet(replace(before, nodes=(*before.nodes, *nodes)))
        yield ClusterRemoved(name) if cluster is None else ClusterSet(cluster)


def _waiting(waiter: Waiter) -> Fact:
    if waiter.lease is not None:
        return Carried(waiter.lease)
    return Queued(waiter.ask, waiter.at, waiter.deadline)


def _past(state: State) -> Iterator[Fact]:
    for (tenant, project), past in state.accounts.past():
        yield UsageCarried(tenant, project, *past)
    for likeness, counts in state.durations.counts():
        yield DurationsCarried(*likeness, counts)


def _shares(state: State) -> Iterator[Fact]:
    """Yield the half-life and the quotas; these facts must come before those of past use."""
    accounts = state.accounts
    if accounts.half_life:
        yield HalfLifeSet(accounts.half_life, accounts.as_of())
    for (tenant, project), quota in accounts.quotas.items():
        yield QuotaSet(tenant, project, quota, 0.0, Tenant(""))
