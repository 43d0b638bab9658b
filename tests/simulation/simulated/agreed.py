"""The free part of a node beside its reservations, computed independently for `laws`."""

from collections import Counter
from collections.abc import Collection
from math import inf
from typing import Any

from moorage.core.state.reserved import NodeReservation
from moorage.model import Node, Share

Pair = tuple[str, str]


def holds(share: Share) -> Counter[str]:
    """Return the amounts of a share on its node; devices by their ids."""
    return Counter(
        {
            "cpu": share.cpu_milli,
            "memory": share.memory_mib,
            **{f"gpu {gpu}": share.gpu_milli for gpu in share.gpus},
        }
    )


def others(model: Any, pair: Pair, tenant: str | None, until: float) -> list[NodeReservation]:
    """Return other tenants' reservations of a node that begin before a time."""
    found = [each for each in model.reserved.values() if pair in each.nodes]
    return [each for each in found if each.tenant != tenant and each.starts_at < until]


def free_for(
    model: Any, pair: Pair, at: float, tenant: str | None, gone: Collection[str] = ()
) -> Counter[str] | None:
    """Return the part of a node that a tenant can get at a later moment, without some leases."""
    node = model.node(Share(*pair))  # type: ignore[arg-type]  # Plain values in tests.
    if node is None:
        return None
    free = _whole(node)
    there = [
        (lease, share)
        for name, lease in model.leases.items()
        if name not in gone and name not in model.ending and name not in model.warm
        if model.expires[name] > at
        for share in lease.placement
        if (share.cluster_id, share.node_id) == pair
    ]
    for _, share in there:
        free.subtract(holds(share))
    begun = [x for x in others(model, pair, tenant, inf) if x.starts_at <= at < x.ends_at]
    if not all(each.parts for each in begun):
        return None
    for owner in {each.tenant for each in begun}:
        parts = [x.parts[x.nodes.index(pair)] for x in begun if x.tenant == owner]
        unused, gpus = sum(map(holds, parts), Counter()), {gpu for x in parts for gpu in x.gpus}
        for lease, share in there:
            if lease.tenant == owner and gpus & set(share.gpus):
                unused.subtract(holds(share))
        free.subtract(+unused)
    return free


def moments(model: Any, pair: Pair, tenant: str | None, now: float, until: float) -> set[float]:
    """Return the starts of other tenants' reservations of a node; `now` for those begun."""
    return {max(now, each.starts_at) for each in others(model, pair, tenant, until)}


def overrun(model: Any, lease: Any, share: Share, after: float, *, at_once: bool) -> float | None:
    """Return the first time from `after` at which a lease blocks a reservation; None: never.

    A tenant's other leases may also take space that its reservation needs. So older leases of other
    tenants are not compared with begun reservations; new ones (`at_once`) are.
    """
    pair, needs = (share.cluster_id, share.node_id), holds(share).items()
    begun = moments(model, pair, lease.tenant, after, inf)
    starts = {x.starts_at for x in others(model, pair, lease.tenant, inf) if x.starts_at >= after}
    if lease.granted_at <= model.clock_moved_at:
        starts = begun  # The lease may be older, from before the calendar was set.
    for at in sorted(begun if at_once else starts):
        free = free_for(model, pair, at, lease.tenant, {lease.id})
        if free is None or any(free.get(key, much) < much for key, much in needs if much):
            return at
    return None


def taken_from(
    model: Any, pair: Pair, tenant: str, now: float, until: float, gone: Collection[str] = ()
) -> Counter[str]:
    """Return the part of a node that a tenant's new lease must not use, besides held amounts."""
    node, found = model.node(Share(*pair)), Counter[str]()  # type: ignore[arg-type]  # As above.
    if node is None:
        return found
    free = _free(model, pair, node)
    for at in moments(model, pair, tenant, now, until):
        then = free_for(model, pair, at, tenant, gone)
        found |= free - then if then is not None else free
    return found & free  # The node may have become smaller.


def reserved_by_others(
    model: Any, pair: Pair, tenant: str, now: float, until: float
) -> Counter[str]:
    """Return the most that others reserve of a node at one time, until a given time."""
    found = Counter[str]()
    for at in moments(model, pair, tenant, now, until):
        there = (x for x in others(model, pair, tenant, inf) if x.starts_at <= at < x.ends_at)
        parts = [x.parts[x.nodes.index(pair)] for x in there if x.parts]
        found |= sum(map(holds, parts), Counter[str]())
    return found & _whole(model.node(Share(*pair)))  # type: ignore[arg-type]  # As above.


def _whole(node: Node) -> Counter[str]:
    found = Counter({"cpu": node.cpu_milli, "memory": node.memory_mib})
    found.update({f"gpu {gpu.id}": 1000 for gpu in node.gpus})
    return found


def is_own(model: Any, lease: Any, share: Share) -> bool:
    """Return whether a lease holds on a node only what its tenant reserved there."""
    pair, gpus, cpu, memory = (share.cluster_id, share.node_id), set[str](), 0, 0
    for each in model.reserved.values():
        if each.tenant == lease.tenant and each.begun and each.parts and pair in each.nodes:
            part = each.parts[each.nodes.index(pair)]
            gpus, cpu = gpus | set(part.gpus), cpu + part.cpu_milli
            memory += part.memory_mib
    return set(share.gpus) <= gpus and share.cpu_milli <= cpu and share.memory_mib <= memory


def beyond_own(model: Any, pair: Pair, tenant: str) -> Counter[str] | None:
    """Return the free part of a node beyond a tenant's reservations; None: no reservation there."""
    node = model.node(Share(*pair))  # type: ignore[arg-type]  # As above.
    if node is None:
        return None
    free = _free(model, pair, node)
    parts = [
        each.parts[each.nodes.index(pair)]
        for each in model.reserved.values()
        if each.tenant == tenant and each.begun and each.parts and pair in each.nodes
    ]
    own, gpus = sum(map(holds, parts), Counter()), {gpu for part in parts for gpu in part.gpus}
    for lease in model.leases.values():
        for share in lease.placement:
            there = (share.cluster_id, share.node_id) == pair and lease.tenant == tenant
            if there and gpus & set(share.gpus):
                own.subtract(holds(share))
    own = +own & free
    return free - own if own else None


def _free(model: Any, pair: Pair, node: Node) -> Counter[str]:
    free = Counter({"cpu": node.cpu_milli - model.cpu[pair]})
    free["memory"] = node.memory_mib - model.memory[pair]
    free.update({f"gpu {gpu.id}": 1000 - model.devices[*pair, gpu.id] for gpu in node.gpus})
    return free
