"""Computes the part of a node that a lease may use until a later moment, beside reservations.

Whenever a reservation begins, its part and the leases that still last must fit on the node
together. `reservations` chooses nodes by this rule; grants, renewals and preemption obey the rule.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import Final

from moorage.core.state.facts import Cordoned
from moorage.core.state.reserved import NodeReservation, Place
from moorage.core.state.state import State
from moorage.model import Lease, Nodes, Placement, RequestId, Share, Tenant
from moorage.policy import Fleet

Amounts = Counter[tuple[str, str]]
"""CPU in milli, memory in MiB, and milli of each device, by (resource, device name)."""
_HOLDS: Final = frozenset({"granted", "starting", "active"})


def amounts(share: Share) -> Amounts:
    """Return the amounts that a share holds of its node."""
    found = Amounts({("cpu", ""): share.cpu_milli, ("memory", ""): share.memory_mib})
    for gpu in share.gpus:
        found["gpu", gpu] = share.gpu_milli
    return found


def shares(place: Place, of: Amounts) -> Iterator[Share]:
    """Yield shares that together hold the given amounts: one share per number of device milli."""
    cluster_id, node_id = place
    devices: dict[int, list[str]] = defaultdict(list)
    for (kind, gpu), milli in of.items():
        if kind == "gpu":
            devices[milli].append(gpu)
    beside = {"cpu_milli": of["cpu", ""], "memory_mib": of["memory", ""]}
    yield Share(cluster_id, node_id, **beside)  # type: ignore[arg-type]  # Plain strings in a fleet.
    for milli, gpus in devices.items():
        yield Share(cluster_id, node_id, tuple(gpus), milli)  # type: ignore[arg-type]  # As above.


def room(
    state: State, place: Place, at: float, tenant: Tenant | None, without: RequestId | None = None
) -> Amounts | None:
    """Return the amounts of a node that a tenant's lease may use at a later moment.

    Args:
        state: The present state.
        place: The node.
        at: The moment, in seconds since the epoch. Leases that end by then, or have to give way,
            count as free.
        tenant: The tenant whose own reservations are ignored; None: no reservation is ignored.
        without: A lease that counts as free.

    Returns:
        The amounts; negative: missing. None if the whole node is reserved or no longer exists.
    """
    row = state.fleet.row(*place)
    if row is None:
        return None
    free = total(state, row)
    staying = [
        (lease, share)
        for lease, share in _leases_on(state, place)
        if lease.id != without and not lease.over and lease.expires_at > at
    ]
    for _, share in staying:
        free.subtract(amounts(share))
    theirs = [x for x in state.reserved.of_others(place, tenant) if x.starts_at <= at < x.ends_at]
    if not all(each.parts for each in theirs):
        return None
    free.subtract(_unused_reservations(theirs, place, staying))
    return free


def parts_reserved_by_others(
    state: State,
    tenant: Tenant,
    now: float,
    until: float,
    *,
    ignore_leases: bool = False,
    only_own: Nodes = (),
) -> Placement:
    """Return the free parts of nodes that a tenant's lease until `until` may not take.

    Args:
        state: The present state.
        tenant: The lease's tenant.
        now: Seconds since the epoch.
        until: The end of the lease.
        ignore_leases: Whether to assume that all leases have ended. Then only reserved parts are
            returned, without those that leases of the reservations' own tenants hold.
        only_own: Nodes on which the lease may use only the tenant's own reserved part.

    Returns:
        Shares of nodes that are reserved in part; wholly reserved nodes are excluded elsewhere.
    """
    found: list[Share] = []
    for place in state.reserved.on:
        theirs = before(state, place, tenant, until)
        row = state.fleet.row(*place) if theirs or place in only_own else None
        if row is None:
            continue
        free, excluded = _free(state, row), Amounts()
        for at in {max(now, each.starts_at) for each in theirs}:
            if ignore_leases:
                excluded |= _unheld(state, place, theirs, at)
            elif (left := room(state, place, at, tenant)) is not None:
                excluded |= free - left
        if not ignore_leases:
            excluded &= free
        if place in only_own:
            excluded |= free - own(state, place, tenant)
        found += shares(place, excluded) if excluded else ()
    return tuple(found)


def before(state: State, place: Place, tenant: Tenant, until: float) -> list[NodeReservation]:
    """Return the reservations of a node by other tenants that begin before `until`."""
    return [x for x in state.reserved.of_others(place, tenant) if x.starts_at < until]


def own(state: State, place: Place, tenant: Tenant) -> Amounts:
    """Return the free part of a node that a tenant has reserved and may use already."""
    mine = [
        each
        for each in state.reserved.on.get(place, {}).values()
        if each.tenant == tenant and each.begun
    ]
    row = state.fleet.row(*place) if mine else None
    if row is None:
        return Amounts()
    return _unused_reservations(mine, place, _leases_on(state, place)) & _free(state, row)


def begins(state: State, lease: Lease, after: float) -> float:
    """Return when the first reservation begins for which a lease must leave; inf: no reservation.

    Args:
        state: The present state.
        lease: A lease, granted or about to be.
        after: The lease's end, in seconds since the epoch.
    """
    at = math.inf
    for share in state.held_by(lease) if state.reserved else ():
        place = (share.cluster_id, share.node_id)
        theirs = state.reserved.of_others(place, lease.tenant)
        moments = {each.starts_at for each in theirs if each.starts_at >= after}
        if lease.granted_at <= state.clock_moved_at and any(x.starts_at < after for x in theirs):
            moments.add(after)  # The clock may have moved past the start of a reservation.
        for moment in sorted(moments):
            if moment < at and not _fits(share, room(state, place, moment, lease.tenant, lease.id)):
                at = moment
    return at


def leaves_by(state: State, lease: Lease) -> float:
    """Return the latest end that drains and reservations allow a lease; inf: no limit."""
    reserved = begins(state, lease, lease.expires_at)
    return min([reserved, *(each.until for each in _drains(state, lease))])


def drain_of(state: State, lease: Lease) -> str:
    """Return the operator and the reason of the drain that ends a lease; "" if no drain does."""
    ends = (each.why for each in _drains(state, lease) if each.until <= lease.expires_at)
    return next(ends, "")


def _drains(state: State, lease: Lease) -> list[Cordoned]:
    """Return the drains of the nodes of a lease."""
    if not state.cordons:
        return []
    places = {(share.cluster_id, name) for share in lease.placement for name in (share.node_id, "")}
    found = [state.cordons[place] for place in sorted(places & state.cordons.keys())]
    return [each for each in found if each.until]


def keeps_to_itself(state: State, lease: Lease) -> bool:
    """Return whether a lease uses devices reserved by its tenant; such a lease is not preempted."""
    return bool(state.reserved) and any(
        each.tenant == lease.tenant and _is_of(share, each.part(place))
        for share in lease.placement
        for place in [(share.cluster_id, share.node_id)]
        for each in state.reserved.on.get(place, {}).values()
    )


def _leases_on(state: State, place: Place) -> list[tuple[Lease, Share]]:
    """Return the leases on a node, with their shares of it."""
    return [(state.leases[name], share) for name, share in state.places.get(place, {}).items()]


def _is_of(share: Share, part: Share | None) -> bool:
    return part is not None and not set(part.gpus).isdisjoint(share.gpus)


def _fits(share: Share, left: Amounts | None) -> bool:
    """Return whether a node has room for a share; ignore devices that no longer exist."""
    needs = amounts(share).items()
    return left is not None and all(left.get(key, much) >= much for key, much in needs if much)


def _unused_reservations(
    reservations: Iterable[NodeReservation], place: Place, leases: list[tuple[Lease, Share]]
) -> Amounts:
    """Return the reserved parts of a node that no lease of the tenant holds."""
    found, by_tenant = Amounts(), defaultdict[Tenant, list[Share]](list)
    for each in reservations:
        if (part := each.part(place)) is not None:
            by_tenant[each.tenant].append(part)
    for tenant, parts in by_tenant.items():
        left = sum(map(amounts, parts), Amounts())
        for lease, share in leases:
            if lease.tenant == tenant and any(_is_of(share, part) for part in parts):
                left.subtract(amounts(share))
        found += +left
    return found


def amounts_reserved_at(
    reservations: Iterable[NodeReservation], place: Place, at: float
) -> Amounts:
    """Return the amounts of a node that the given partial reservations hold at a moment."""
    found = Amounts()
    for each in reservations:
        if each.starts_at <= at < each.ends_at and (part := each.part(place)) is not None:
            found += amounts(part)
    return found


def _unheld(state: State, place: Place, theirs: list[NodeReservation], at: float) -> Amounts:
    """Return the parts of a node that are reserved at a moment and not held by their tenants."""
    here = _leases_on(state, place)
    holding = [(x, share) for x, share in here if x.notice is None and x.state in _HOLDS]
    return _unused_reservations(
        (x for x in theirs if x.starts_at <= at < x.ends_at), place, holding
    )


def total(state: State, row: int) -> Amounts:
    """Return the total amounts of a node."""
    fleet = state.fleet
    found = Amounts(
        {("cpu", ""): int(fleet.cpu_total[row]), ("memory", ""): int(fleet.memory_total[row])}
    )
    for gpu, milli in zip(fleet.gpu_ids[row], fleet.gpu_total[row].tolist(), strict=False):
        found["gpu", gpu] = milli
    return found


def set_free(fleet: Fleet, row: int, left: Amounts) -> None:
    """Set the free amounts of a node in a copy of the fleet."""
    devices = [left["gpu", gpu] for gpu in fleet.gpu_ids[row]]
    devices += [0] * (fleet.gpu_free.shape[1] - len(devices))
    fleet.set_capacity(row, left["cpu", ""], left["memory", ""], devices)


def _free(state: State, row: int) -> Amounts:
    cpu, memory, devices = state.fleet.capacity(row)
    found = Amounts({("cpu", ""): cpu, ("memory", ""): memory})
    for gpu, milli in zip(state.fleet.gpu_ids[row], devices, strict=False):
        found["gpu", gpu] = milli
    return found
