"""The state of the allocator, which only `apply` changes, and only by a fact.

`Allocator` and the ledger's checkpoints are the callers. The state follows from the facts alone, so
a replayed ledger gives the same state in every release.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, assert_never

from msgspec.structs import replace

from moorage.core.state.accounts import Accounts, Past, capacity_of
from moorage.core.state.deadlines import Deadlines
from moorage.core.state.durations import Durations
from moorage.core.state.facts import (
    Carried,
    ClockMoved,
    ClusterRemoved,
    ClusterSet,
    Cordoned,
    Counted,
    Dequeued,
    DurationsCarried,
    Ended,
    Ending,
    Fact,
    Finished,
    Granted,
    HalfLifeSet,
    Moved,
    Overtaken,
    Paused,
    Preempted,
    Queued,
    QuotaSet,
    Renewed,
    Requeued,
    Reserved,
    Resumed,
    Spared,
    Started,
    Uncordoned,
    Unreserved,
    UsageCarried,
    WaitExtended,
    Warmed,
)
from moorage.core.state.growth import Growth, places_left_by
from moorage.core.state.identities import Identities, Place
from moorage.core.state.lease_indexes import LeaseGroups, LostDevices, shown
from moorage.core.state.reserved import ReservedNodes
from moorage.core.state.tenant_loads import TenantLoads
from moorage.core.state.tenant_memory import TenantMemory
from moorage.core.state.waiters import Waiter
from moorage.model import (
    GPU_MILLI,
    Ask,
    Cluster,
    ClusterId,
    DeviceId,
    Lease,
    Notice,
    Outcome,
    Placement,
    RequestId,
    Share,
    Tenant,
)
from moorage.policy import Fleet

ENDED_MAX: Final = 10_000
"""Maximum ended leases that `release`, `status` and repeated requests still find. With one more,
only the ledger's history has the oldest lease of the tenant with the most ended leases.
"""
RELEASED: Final = "released"
"""The end reason of a lease that its owner released: its workload may stay warm."""
REPLACED_MAX: Final = 32
"""Maximum changed clusters whose rows are replaced one by one; with more, all columns are rebuilt.
"""

_Places = dict[Place, dict[RequestId, Share]]


@dataclass(slots=True)
class State:
    """All state that follows from the ledger's facts.

    Attributes:
        clusters: The inventory.
        leases: Leases that hold capacity.
        ended: The last `ENDED_MAX` ended leases, oldest first.
        ended_by_tenant: Selects the ended lease to forget next.
        waiting: Requests and leases in the queue, in the order in which they entered it.
        waiting_loads: Number and bytes of each tenant's waiters.
        overtaken: For each waiter, how often it was the oldest that a later grant overtook.
        keys: The request that owns an idempotency key of a tenant.
        warm: The released leases whose workloads wait for the next request.
        resetting: Released leases whose workloads are being reset to become warm.
        preemptible: The leases that requests of higher priority may preempt.
        noticed: Leases whose clients know when the lease will be preempted.
        groups: The leases with anti-affinity.
        places: For each node, the leases on it, and the share that each of them holds.
        fencing: The last fencing number given out.
        clock_moved_at: The time at which the calendar was last set, in seconds since the epoch. A
            lease granted before this time may overlap a reservation of another tenant.
        cordons: Nodes, and clusters (node ""), that operators took out of service.
        reserved: The reservations.
        identities: The machines of the nodes.
        lost: The devices that leases hold but their nodes no longer have.
        durations: Durations of ended leases.
        gains: Counts capacity gains, and leases that may be evicted from now on; a refusal is valid
            until this changes.
        growth: The nodes whose capacity grew since the queue last read them.
        accounts: Use and limits of tenants and projects, warm leases included.
    """

    clusters: dict[ClusterId, Cluster] = field(default_factory=dict[ClusterId, Cluster])
    leases: dict[RequestId, Lease] = field(default_factory=dict[RequestId, Lease])
    ended: dict[RequestId, Lease] = field(default_factory=dict[RequestId, Lease])
    ended_by_tenant: TenantMemory[RequestId] = field(
        default_factory=TenantMemory[RequestId], compare=False
    )
    waiting: dict[RequestId, Waiter] = field(default_factory=dict[RequestId, Waiter])
    waiting_loads: TenantLoads = field(default_factory=TenantLoads, compare=False)
    overtaken: dict[RequestId, int] = field(default_factory=dict[RequestId, int])
    keys: dict[tuple[Tenant, str], RequestId] = field(
        default_factory=dict[tuple[Tenant, str], RequestId]
    )
    cordons: dict[Place, Cordoned] = field(default_factory=dict[Place, Cordoned])
    reserved: ReservedNodes = field(default_factory=ReservedNodes)
    warm: dict[RequestId, None] = field(default_factory=dict[RequestId, None], compare=False)
    resetting: dict[RequestId, None] = field(default_factory=dict[RequestId, None], compare=False)
    preemptible: dict[RequestId, None] = field(default_factory=dict[RequestId, None], compare=False)
    noticed: dict[RequestId, None] = field(default_factory=dict[RequestId, None], compare=False)
    groups: LeaseGroups = field(default_factory=LeaseGroups, compare=False)
    places: _Places = field(default_factory=_Places, compare=False)
    fencing: int = 0
    clock_moved_at: float = -math.inf
    gains: int = field(default=0, compare=False)
    growth: Growth = field(default_factory=Growth, compare=False)
    accounts: Accounts = field(default_factory=Accounts, compare=False)
    durations: Durations = field(default_factory=Durations)
    identities: Identities = field(default_factory=Identities, compare=False)
    lost: LostDevices = field(default_factory=LostDevices, compare=False)
    deadlines: Deadlines = field(init=False, compare=False)
    _fleet: Fleet = field(default_factory=Fleet, compare=False)
    _fleet_behind: dict[ClusterId, None] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        """Build the index of deadlines."""
        self.deadlines = Deadlines(self.deadline_of)

    @property
    def fleet(self) -> Fleet:
        """The inventory in columns; its free amounts exclude the shares of leases.

        The first read after a change of the inventory updates it: the rows of a few changed
        clusters are replaced, and ten thousand changed clusters cost one rebuild. The fleet stays
        the same object, since the feeds of the policies' processes refer to it.
        """
        if self._fleet_behind:
            behind, self._fleet_behind = self._fleet_behind, {}
            rebuilt = len(behind) > REPLACED_MAX
            if rebuilt:
                self._fleet.install(map(self.offered, self.clusters.values()))
            else:
                for cluster_id in behind:
                    cluster = self.clusters.get(cluster_id)
                    if cluster is None:
                        self._fleet.remove(cluster_id)
                    else:
                        self._fleet.put(self.offered(cluster))
            for lease in self.leases.values():
                for share in lease.placement:
                    if rebuilt or share.cluster_id in behind:
                        self._fleet.take(share)
            self.lost.withhold(self._fleet, self.identities.place_of)
        return self._fleet

    def offered(self, cluster: Cluster) -> Cluster:
        """Return a copy of a cluster in which cordoned nodes are marked."""
        if not self.cordons:
            return cluster
        whole = self.cordons.get((cluster.id, ""))
        by = (self.cordons.get((cluster.id, node.id), whole) for node in cluster.nodes)
        nodes = (
            node if each is None else replace(node, unavailable=each.why)
            for node, each in zip(cluster.nodes, by, strict=True)
        )
        return replace(cluster, nodes=tuple(nodes))

    def clusters_held_elsewhere(self) -> Iterator[Cluster]:
        """Yield clusters with the duplicates that count once leases under old node names end."""
        left = {
            f"{name}/{node.id}" for name, nodes in self.identities.left().items() for node in nodes
        }
        for name in self.identities.duplicates if left else ():
            cluster = self.offered(self.clusters[name])
            nodes = [node for node in cluster.nodes if node.duplicate_of in left]
            yield replace(cluster, nodes=tuple(replace(node, duplicate_of="") for node in nodes))

    def held_by(self, lease: Lease) -> Placement:
        """Return the shares that a lease keeps from others: its own, and its lost devices."""
        return (*lease.placement, *self.lost_by(lease)) if lease.lost else lease.placement

    def lost_by(self, lease: Lease) -> list[Share]:
        """Return where the devices that a lease has lost are now, as shares of nodes."""
        return self.lost.shown(lease.lost, self.fleet, self.identities.place_of)

    def imagined(self, fleet: Fleet) -> Fleet:
        """Return a copy of the fleet on which leases can be ended one by one, as a trial.

        The free amount of a lost device is negative, by the sum that leases hold of it.

        Args:
            fleet: The fleet of this state, or one with less free capacity.
        """
        imagined = fleet.imagined()
        lost = [share for name in self.lost.of for share in self.lost_by(self.leases[name])]
        for share in dict.fromkeys(lost):
            here = self.places.get((share.cluster_id, share.node_id), {}).values()
            held = sum(x.gpu_milli for x in here if share.gpus[0] in x.gpus)
            imagined.give(replace(share, gpu_milli=GPU_MILLI - held))
        for share in lost:
            imagined.take(share)
        return imagined

    def lease(self, request: RequestId) -> Lease | None:
        """Return a lease that is held, waits for another place, or is among the last that ended."""
        waiter = self.waiting.get(request)
        if waiter is not None:
            return waiter.lease
        return self.leases.get(request) or self.ended.get(request)

    def places_with_leases(self) -> set[Place]:
        """Return the nodes on which leases hold capacity."""
        return set(self.places)

    def deadline_of(self, request: RequestId) -> float | None:
        """Return the deadline of a lease, waiter or reservation; None if it has no deadline."""
        lease = self.leases.get(request)
        if lease is not None:
            until = lease.expires_at if lease.notice is None else lease.notice.until
            return None if lease.state == "ending" else min(lease.expires_at, until)
        waiter = self.waiting.get(request)
        return self.reserved.due(request) if waiter is None else waiter.due

    def _due(self, request: RequestId) -> None:
        self.deadlines.note(request, len(self.leases) + len(self.waiting))

    def _note_inventory(self, cluster_id: ClusterId) -> None:
        self._fleet_behind[cluster_id] = None
        self.gains += 1
        self.growth.note_cluster(cluster_id)

    def _count(self, before: Cluster | None, after: Cluster | None) -> None:
        """Add a change of the fleet's capacity to the accounts: shares are fractions of it."""
        now, then = capacity_of(after), capacity_of(before)
        gpus, cpu, memory = (new - old for new, old in zip(now, then, strict=True))
        self.accounts.add_capacity(gpus, cpu, memory)

    def _note_lost_devices(self, lease: Lease) -> None:
        """Store the lost devices of a lease; the free amounts of the devices' nodes change."""
        for cluster_id in self._showing((*self.lost.of.get(lease.id, ()), *lease.lost)):
            self._note_inventory(cluster_id)
        self.lost.note(lease)

    def _showing(self, lost: Iterable[DeviceId]) -> Iterator[ClusterId]:
        for device in lost:
            for cluster_id, _ in shown(device, self.identities.place_of):
                yield ClusterId(cluster_id)

    def _hold(self, lease: Lease, at: float | None) -> None:
        self.groups.add(lease)
        if lease.lost:
            self._note_lost_devices(lease)
        for share in lease.placement:
            self.places.setdefault((share.cluster_id, share.node_id), {})[lease.id] = share
        if lease.terms.preemptible:
            self.preemptible[lease.id] = None
        if lease.notice is not None:
            self.noticed[lease.id] = None
        self.accounts.add(lease, 1, at)
        for share in lease.placement:
            if share.cluster_id not in self._fleet_behind:
                self._fleet.take(share)
                row = self._fleet.row(share.cluster_id, share.node_id)
                assert row is None or min(self._fleet.gpu_free[row].tolist(), default=0) >= 0, (
                    f"a GPU of {share.cluster_id}/{share.node_id} is promised twice"
                )

    def _free(self, lease: Lease, at: float) -> None:
        self.preemptible.pop(lease.id, None)
        self.noticed.pop(lease.id, None)
        self.groups.remove(lease)
        places = [(share.cluster_id, share.node_id) for share in lease.placement]
        for place in places:
            del self.places[place][lease.id]
            if not self.places[place]:
                del self.places[place]
        self.accounts.add(lease, -1, at)
        for share in lease.placement:
            if share.cluster_id not in self._fleet_behind:
                self._fleet.give(share)
        if lease.lost:
            self._note_lost_devices(replace(lease, lost=()))
        if self.lost.of:  # The freed share may be a lost device of another lease.
            self.lost.withhold(self._fleet, self.identities.place_of)
        self._gives_way(lease)
        self.identities.forget_nodes(places, self.places_with_leases)

    def _gives_way(self, lease: Lease) -> None:
        """Record that a lease's share is free now, or may be evicted."""
        self.gains += 1
        self.growth.note(places_left_by(lease))
        for cluster_id in self._showing(lease.lost):
            self.growth.note_cluster(cluster_id)


def apply(state: State, fact: Fact) -> None:  # noqa: C901, PLR0912, PLR0915  # One case per fact.
    """Change the state as a fact says; no other function changes a `State`."""
    match fact:
        case Granted():  # Nearly all facts are of the first two kinds.
            _grant(state, fact.lease, fact.overtakes)
        case Ended(request, at, reason):
            _end(state, request, at, reason)
        case ClusterSet(cluster):
            state._count(state.clusters.get(cluster.id), cluster)  # noqa: SLF001  # apply() is the one mutator of State.
            state.clusters[cluster.id] = cluster
            state.identities.put(cluster.id, cluster.nodes, state.places_with_leases)
            state._note_inventory(cluster.id)  # noqa: SLF001  # As above.
        case ClusterRemoved(cluster):
            state._count(state.clusters.pop(cluster), None)  # noqa: SLF001  # As above.
            for place in [each for each in state.cordons if each[0] == cluster]:
                del state.cordons[place]
            state.identities.put(cluster, (), state.places_with_leases)
            state._note_inventory(cluster)  # noqa: SLF001  # As above.
        case Cordoned() | Uncordoned():
            _cordon(state, fact)
        case Reserved() | Unreserved():
            _reserve(state, fact)
        case QuotaSet() | HalfLifeSet() | UsageCarried():
            _share_out(state, fact)
        case DurationsCarried(tenant, policy, gpus, counts):
            state.durations.carry((tenant, policy, gpus), counts)
        case Queued(ask, at, deadline):
            assert ask.id not in state.leases
            _own_key(state, ask)
            _wait(state, Waiter(ask, at, deadline))
        case Dequeued(request):
            assert state.waiting[request].lease is None, "a lease ends, it is not refused"
            ask = _waits_no_longer(state, request).ask
            _disown_key(state, ask.tenant, ask)
        case Overtaken(request, times):
            state.overtaken[request] = times
        case WaitExtended(request, deadline):
            _extend_wait(state, request, deadline)
        case Renewed(request, expires_at):
            _renew(state, request, expires_at)
        case Started(request, _, endpoint):
            lease = state.leases[request]
            assert lease.state == "starting"
            state.leases[request] = replace(lease, state="active", endpoint=endpoint)
        case Finished(request, outcome):
            _finish(state, request, outcome)
        case Requeued(request, at, reason):
            _requeue(state, request, at, reason)
        case Paused() | Resumed():
            _pause(state, fact)
        case Preempted(request, _, by, until, reason):
            _notify(state, request, Notice(by, until, reason))
        case Spared(request):
            _notify(state, request, None)
        case Moved(request, _, placement, devices, lost):
            _move(state, request, placement=placement, devices=devices, lost=lost)
        case Ending(request, at, reason):
            _ending(state, request, at, reason)
        case Warmed(request, at, expires_at):
            _warm(state, request, expires_at)
        case Carried(lease):
            _carry(state, lease)
        case ClockMoved(at, seconds):
            _move_clock(state, at, seconds)
        case Counted(fencing):
            assert fencing >= state.fencing
            state.fencing = fencing
        case _:
            assert_never(fact)


def _cordon(state: State, fact: Cordoned | Uncordoned) -> None:
    place = (fact.cluster, fact.node)
    if isinstance(fact, Cordoned):
        assert fact.cluster in state.clusters
        state.cordons[place] = fact
    else:
        del state.cordons[place]
    state._note_inventory(fact.cluster)  # noqa: SLF001  # Called by apply().


def _reserve(state: State, fact: Reserved | Unreserved) -> None:
    if isinstance(fact, Reserved):
        before = state.reserved.by_id.get(fact.reservation.id)
        state.reserved.put(fact.reservation)
        if fact.reservation.begun and (before is None or not before.begun):
            state.growth.note(fact.reservation.nodes)  # The tenant may use the nodes now.
            state.gains += 1
        state._due(fact.reservation.id)  # noqa: SLF001  # Called by apply().
    else:
        state.growth.note(state.reserved.remove(fact.reservation).nodes)
        state.gains += 1


def _share_out(state: State, fact: QuotaSet | HalfLifeSet | UsageCarried) -> None:
    if isinstance(fact, HalfLifeSet):
        state.accounts.set_half_life(fact.seconds, fact.at)
        return
    if isinstance(fact, UsageCarried):
        state.accounts.carry((fact.tenant, fact.project), Past(fact.share, fact.step))
        return
    state.accounts.set_quota((fact.tenant, fact.project), fact.quota)
    state.gains += 1  # Earlier refusals are void.
    state.growth.note_everywhere()


def _wait(state: State, waiter: Waiter) -> None:
    request = waiter.ask.id
    assert request not in state.waiting
    state.waiting[request] = waiter
    state.waiting_loads.add(waiter.ask)
    state._due(request)  # noqa: SLF001  # Called by apply().


def _waits_no_longer(state: State, request: RequestId) -> Waiter:
    waiter = state.waiting.pop(request)
    state.waiting_loads.remove(waiter.ask)
    state.overtaken.pop(request, None)
    _leave_to_others(state)
    return waiter


def _leave_to_others(state: State) -> None:
    """Record that a request no longer waits: others may use the capacity that was being freed."""
    for name in state.resetting:
        state._gives_way(state.leases[name])  # noqa: SLF001  # Called by apply().


def _grant(state: State, lease: Lease, overtakes: RequestId | None) -> None:
    assert lease.id not in state.leases
    assert lease.fencing > state.fencing, "a fencing number is never given out twice"
    if lease.id in state.waiting:
        _waits_no_longer(state, lease.id)
    else:
        _own_key(state, lease)
    if overtakes is not None:
        assert overtakes in state.waiting
        state.overtaken[overtakes] = state.overtaken.get(overtakes, 0) + 1
    state.fencing = lease.fencing
    state.leases[lease.id] = lease
    state._hold(lease, lease.granted_at)  # noqa: SLF001  # Called by apply().
    state._due(lease.id)  # noqa: SLF001  # Called by apply().
    for reservation in state.reserved.used_by(lease) if state.reserved else ():
        _reserve(state, Reserved(replace(reservation, used=True)))


def _renew(state: State, request: RequestId, expires_at: float) -> None:
    waiter = state.waiting.get(request)
    if waiter is None:
        before = state.leases[request]
        state.leases[request] = replace(before, expires_at=expires_at)
        if expires_at < before.expires_at and state.reserved:
            state._gives_way(before)  # noqa: SLF001  # Called by apply(). It may block no reservation now.
    else:
        assert waiter.lease is not None
        lease = replace(waiter.lease, expires_at=expires_at)
        state.waiting[request] = replace(waiter, deadline=expires_at, lease=lease)
    state._due(request)  # noqa: SLF001  # Called by apply().


def _move_clock(state: State, at: float, seconds: float) -> None:
    state.clock_moved_at = at
    for request, lease in state.leases.items():
        state.leases[request] = lease.later(seconds)
    for request, waiter in state.waiting.items():
        state.waiting[request] = waiter.later(seconds)
    for place, cordon in state.cordons.items():
        until = cordon.until and cordon.until + seconds
        state.cordons[place] = replace(cordon, at=cordon.at + seconds, until=until)
    state.accounts.move_times(seconds)
    state.deadlines.rebuild((*state.leases, *state.waiting, *state.reserved.by_id))


def _extend_wait(state: State, request: RequestId, deadline: float) -> None:
    assert state.waiting[request].lease is None, "a lease is renewed"
    state.waiting[request] = replace(state.waiting[request], deadline=deadline)
    state._due(request)  # noqa: SLF001  # Called by apply().


def _finish(state: State, request: RequestId, outcome: Outcome) -> None:
    assert state.leases[request].state in {"starting", "active"}
    if state.leases[request].notice is not None:
        _notify(state, request, None)
    state.leases[request] = replace(state.leases[request], state="failing", outcome=outcome)


def _notify(state: State, request: RequestId, notice: Notice | None) -> None:
    lease = state.leases[request]
    assert lease.state in {"granted", "starting", "active"}
    state.leases[request] = replace(lease, notice=notice)
    if notice is None:
        del state.noticed[request]
    else:
        state.noticed[request] = None
    state._due(request)  # noqa: SLF001  # Called by apply().


def _move(state: State, request: RequestId, **held: object) -> None:
    lease = replace(state.leases[request], **held)
    state.leases[request] = lease
    for share in lease.placement:
        state.places[share.cluster_id, share.node_id][request] = share
        state._fleet_behind[share.cluster_id] = None  # noqa: SLF001  # Called by apply().
    state._note_lost_devices(lease)  # noqa: SLF001  # As above.


def _requeue(state: State, request: RequestId, at: float, reason: str) -> None:
    lease = state.leases.pop(request)
    assert lease.state == "failing"
    assert lease.ask is not None, "a lease that may start again keeps its request"
    assert lease.outcome is not None
    state._free(lease, at)  # noqa: SLF001  # Called by apply().
    avoid = tuple(dict.fromkeys((*lease.ask.avoid, *lease.outcome.nodes)))
    ask = replace(lease.ask, avoid=avoid)
    lease = replace(
        lease,
        state="queued",
        placement=(),
        inherited="",
        endpoint="",
        reason=reason,
        ask=ask,
        devices=(),
        lost=(),
    )
    _wait(state, Waiter(ask, lease.asked_at, lease.expires_at, lease))


def _pause(state: State, fact: Paused | Resumed) -> None:
    waiter = state.waiting[fact.lease]
    assert waiter.lease is not None, "only a lease pauses"
    if isinstance(fact, Paused):
        lease = replace(waiter.lease, retry_at=fact.retry_at, faults=fact.faults)
    else:
        lease = replace(waiter.lease, retry_at=0.0)
    assert waiter.pauses != (lease.retry_at > 0), "a pause begins, and then ends"
    state.waiting[fact.lease] = replace(waiter, lease=lease)
    state._due(fact.lease)  # noqa: SLF001  # Called by apply().
    _leave_to_others(state)


def _carry(state: State, lease: Lease) -> None:
    assert state.lease(lease.id) is None
    _own_key(state, lease)
    if lease.state == "ended":
        state.ended[lease.id] = lease
        state.ended_by_tenant.add(lease.tenant, lease.id)
        return
    if lease.state == "queued":
        assert lease.ask is not None
        _wait(state, Waiter(lease.ask, lease.asked_at, lease.expires_at, lease))
        return
    state.leases[lease.id] = lease
    if lease.state == "warm":
        state.warm[lease.id] = None
    if lease.state == "ending" and lease.reason == RELEASED and lease.likeness:
        state.resetting[lease.id] = None
    state._hold(lease, None)  # noqa: SLF001  # Called by apply().
    if lease.state != "ending":  # Such a lease has no deadline: it waits for its backend.
        state._due(lease.id)  # noqa: SLF001  # Called by apply().


def _ending(state: State, request: RequestId, at: float, reason: str) -> None:
    lease = state.leases[request]
    given_up = request in state.resetting  # The lease should have become warm, but ends.
    assert lease.state != "ending" or given_up
    state.durations.add(lease, at)
    state.leases[request] = replace(lease, state="ending", reason=reason, notice=None)
    state.noticed.pop(request, None)
    state.warm.pop(request, None)
    state.resetting.pop(request, None)
    if reason == RELEASED and lease.likeness:
        state.resetting[request] = None
    if request in state.resetting or state.reserved:
        state._gives_way(lease)  # noqa: SLF001  # Called by apply().


def _warm(state: State, request: RequestId, expires_at: float) -> None:
    lease = state.leases[request]
    assert lease.state == "ending"
    assert lease.provision is not None
    state.resetting.pop(request, None)
    state.leases[request] = replace(lease, state="warm", expires_at=expires_at, ask=None)
    state.warm[request] = None
    state._gives_way(lease)  # noqa: SLF001  # Called by apply().
    state._due(lease.id)  # noqa: SLF001  # Called by apply().


def _end(state: State, request: RequestId, at: float, reason: str) -> None:
    if request in state.waiting:
        lease = _waits_no_longer(state, request).lease
        assert lease is not None, "a request without a lease is refused, it does not end"
    else:
        lease = state.leases.pop(request)
        state.warm.pop(request, None)
        state.resetting.pop(request, None)
        state._free(lease, at)  # noqa: SLF001  # Called by apply().
        state.durations.add(lease, at)
    lease = replace(lease, state="ended", reason=reason, expires_at=at, ask=None, retry_at=0.0)
    lease = lease if lease.notice is None else replace(lease, notice=None)
    state.ended[request] = lease
    state.ended_by_tenant.add(lease.tenant, request)
    while len(state.ended) > ENDED_MAX:
        oldest = state.ended.pop(state.ended_by_tenant.forget())
        _disown_key(state, oldest.tenant, oldest)


def _own_key(state: State, owner: Ask | Lease) -> None:
    if owner.terms is not None and owner.terms.idempotency_key:
        state.keys[owner.tenant, owner.terms.idempotency_key] = owner.id


def _disown_key(state: State, tenant: Tenant, owner: Ask | Lease) -> None:
    key = owner.terms.idempotency_key if owner.terms is not None else ""
    if key and state.keys.get((tenant, key)) == owner.id:
        del state.keys[tenant, key]
