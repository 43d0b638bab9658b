"""The laws: an independent model of leases, devices and answers.

No law uses the core's own functions (`apply`, `verify`, `Fleet`): such a law would accept the
core's faults.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any, Final

from msgspec.structs import replace

from moorage.core.lifecycle.leases import likeness
from moorage.core.lifecycle.requests import FAULT_PAUSE_SECONDS, FAULTS_MAX
from moorage.core.lifecycle.warm_reuse import EVICTED, ROOM_SECONDS_MAX
from moorage.core.state.facts import (
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
    WaitExtended,
    Warmed,
)
from moorage.core.state.reserved import NodeReservation
from moorage.core.state.state import RELEASED
from moorage.model import Ask, Cluster, Demand, DeviceId, Lease, Node, Outcome, Quota, Share
from simulated import agreed
from simulated.demands import has_labels, holds, needs_of, serves

_NONE: Final = Counter[str]()
_NOTHING: Final[Mapping[tuple[str, str], Counter[str]]] = {}


class LawBroken(AssertionError):  # noqa: N818  # It names what happened.
    """The core broke a law."""


def law(holds: bool, name: str, *evidence: Any) -> None:
    """Raise `LawBroken` with the law's text and the evidence, unless the law holds."""
    if not holds:
        raise LawBroken(f"{name}: {', '.join(map(repr, evidence))}")


@dataclass
class Model:
    """The state of the world, derived from the facts independently of the core."""

    clusters: dict[str, Cluster] = field(default_factory=dict)
    leases: dict[str, Lease] = field(default_factory=dict)
    expires: dict[str, float] = field(default_factory=dict)
    ending: dict[str, str] = field(default_factory=dict)
    warm: set[str] = field(default_factory=set)
    active: set[str] = field(default_factory=set)
    ended: set[str] = field(default_factory=set)
    waiting: dict[str, Queued] = field(default_factory=dict)
    overtaken: Counter[str] = field(default_factory=Counter)
    requeued: dict[str, Lease] = field(default_factory=dict)
    paused: dict[str, float] = field(default_factory=dict)
    faults: Counter[str] = field(default_factory=Counter)
    pause_seconds: float = 0.0
    finished: dict[str, Outcome] = field(default_factory=dict)
    keys: dict[tuple[str, str], str] = field(default_factory=dict)
    devices: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    cpu: Counter[tuple[str, str]] = field(default_factory=Counter)
    memory: Counter[tuple[str, str]] = field(default_factory=Counter)
    cordons: dict[tuple[str, str], float] = field(default_factory=dict)
    quotas: dict[tuple[str, str | None], Quota] = field(default_factory=dict)
    notices: dict[str, Preempted] = field(default_factory=dict)
    reserved: dict[str, NodeReservation] = field(default_factory=dict)
    fencing: int = 0
    clock_moved_at: float = -inf
    disturbed: bool = False
    """Whether the daemon has just stalled or restarted, or the calendar was set."""
    held: dict[str, list[tuple[tuple[str, str], DeviceId, int]]] = field(default_factory=dict)
    """For each lease: the node, identity and milli of each device, which no renaming changes."""
    lost: dict[str, list[DeviceId]] = field(default_factory=dict)

    def used(self, tenant: str, project: str | None) -> dict[str, int]:
        """Return the amounts held by an account: the sum of its leases, warm ones included."""
        mine = (
            lease
            for lease in self.leases.values()
            if lease.tenant == tenant and project in {None, lease.terms.project}
        )
        return holds(share for lease in mine for share in lease.placement)

    def _quota(self, tenant: str, project: str | None) -> Quota:
        own = self.quotas.get((tenant, project))
        return own or (project is None and self.quotas.get(("*", None))) or Quota()

    def beyond(self, tenant: str, project: str, wanted: dict[str, int]) -> bool:
        """Return whether the quota of a tenant or its project has no room for `wanted`."""
        return self.short(tenant, None, wanted) or self.short(tenant, project, wanted)

    def owns(self, tenant: str, project: str | None, wanted: dict[str, int]) -> bool:
        """Return whether an account may hold `wanted` without borrowing."""
        nominal = self._quota(tenant, project).nominal
        limits = {name: getattr(nominal, name) for name in wanted}
        return all(limits[name] is None or more <= limits[name] for name, more in wanted.items())

    def short(self, tenant: str, project: str | None, wanted: dict[str, int]) -> bool:
        """Return whether the quota of one account has no room for `wanted`."""
        known = {
            (x.tenant, None if project is None else x.terms.project) for x in self.leases.values()
        }
        known |= self.quotas.keys()
        peers = [p for p in known if (p[1] is None) == (project is None) and p[0] != "*"]
        if project is not None:
            peers = [p for p in peers if p[0] == tenant]
        quota, mine = self._quota(tenant, project), self.used(tenant, project)
        for name, more in wanted.items():
            nominal = getattr(quota.nominal, name)
            borrows = max(mine[name] + more - nominal, 0) if nominal is not None else 0
            if not more or not borrows:
                continue
            lent = 0
            for peer in peers:
                its, used = self._quota(*peer), self.used(*peer)[name]
                own = getattr(its.nominal, name)
                if own is None:
                    continue
                lend = getattr(its.lend, name)
                lend = own if lend is None else lend
                if peer in self.quotas and peer != (tenant, project):
                    lent += min(lend, max(0, own - used))
                lent -= max(0, used - own) if peer != (tenant, project) else 0
            if borrows > min(getattr(quota.borrow, name) or 0, lent):
                return True
        return False

    def shut(self, cluster: str, node: str) -> bool:
        """Return whether an operator cordoned a node or its cluster."""
        return bool({(cluster, node), (cluster, "")} & self.cordons.keys())

    def leaves_by(self, lease: Lease) -> float:
        """Return the latest end of a lease, given drains and reservations of its nodes."""
        names = ((share.cluster_id, (share.node_id, "")) for share in lease.placement)
        places = {(cluster, node) for cluster, both in names for node in both}
        drained = (self.cordons[at] or inf for at in places & self.cordons.keys())
        return min(*drained, self.begins(lease, self.expires[lease.id]), inf)

    def begins(self, lease: Lease, after: float, *, at_once: bool = False) -> float:
        """Return when another tenant's reservation of the lease's nodes begins, from `after` on."""
        if not self.reserved:
            return inf
        found = (
            agreed.overrun(self, lease, share, after, at_once=at_once)
            for share in (*lease.placement, *self.shown(lease.id))
        )
        return min((at for at in found if at is not None), default=inf)

    def withheld(
        self,
        ask: Ask,
        now: float,
        closed: Iterable[tuple[str, str]] = (),
        need: Demand | None = None,
    ) -> set[tuple[str, str]]:
        """Return the nodes that a request must not use: reserved by others, or near its group."""
        if ask.terms is None:
            return set()
        return self._near(ask) | self.shut_to(
            ask, need or ask.demand, self.until(ask, now, closed), now
        )

    def shut_for_good(self, ask: Ask, now: float) -> set[tuple[str, str]]:
        """Return the nodes excluded even if leases end: near the group, or reserved as a whole."""
        return self._near(ask) | self._whole(self.until(ask, now, ()), ask)

    def beside(
        self, ask: Ask, now: float, gone: Collection[str]
    ) -> dict[tuple[str, str], Counter[str]]:
        """Return the reserved parts of nodes that a request must not use, if some leases ended."""
        if not self.partly:
            return {}
        until = self.until(ask, now, ())
        return {
            pair: agreed.taken_from(self, pair, ask.tenant, now, until, gone)
            for pair in self.partly
        }

    @property
    def partly(self) -> set[tuple[str, str]]:
        """Return the nodes of which a part is reserved."""
        return {node for each in self.reserved.values() if each.parts for node in each.nodes}

    def until(self, ask: Ask, now: float, closed: Iterable[tuple[str, str]]) -> float:
        """Return when a lease of this request would end; earlier if only a shorter one fits."""
        assert ask.terms is not None
        if ask.id in self.requeued:
            return self.expires[ask.id]
        whole, shortest = now + ask.terms.ttl_seconds, ask.terms.ttl_seconds_min
        if not shortest or not (shut := self.shut_to(ask, ask.demand, whole, now)):
            return whole
        shut |= {*closed, *self._near(ask)}
        fits = ask.demand is not None and self.fits(ask.demand, ask.candidates, shut)
        return whole if fits else now + shortest

    def shut_to(
        self, ask: Ask, need: Demand | None, until: float, now: float
    ) -> set[tuple[str, str]]:
        """Return the nodes where other tenants' reservations leave too little for a lease."""
        shut = self._whole(until, ask)
        empty = Model(clusters=self.clusters)
        for pair in self.partly - shut if need is not None else ():
            node = self.node(Share(*pair))  # type: ignore[arg-type]  # Plain values in tests.
            theirs = agreed.others(self, pair, ask.tenant, until)
            if node is None or not theirs or self.shut(*pair):
                continue
            assert need is not None
            less = agreed.taken_from(self, pair, ask.tenant, now, until)
            all_parts = agreed.reserved_by_others(self, pair, ask.tenant, now, until)
            never = not empty._takes(pair, replace(node, unavailable=""), need, all_parts)
            if never or self._takes(pair, node, need) > self._takes(pair, node, need, less):
                shut.add(pair)
        return shut

    def _whole(self, until: float, ask: Ask) -> set[tuple[str, str]]:
        """Return the nodes that others have reserved as a whole before a time."""
        theirs = (x for x in self.reserved.values() if x.tenant != ask.tenant and not x.parts)
        return {node for each in theirs if each.starts_at < until for node in each.nodes}

    def _near(self, ask: Ask) -> set[tuple[str, str]]:
        return {
            (cluster.id, node.id)
            for cluster in self.clusters.values()
            for node in cluster.nodes
            if self.near(ask, cluster.id, node)
        }

    def near(self, ask: Ask | Lease, cluster: str, node: Node) -> list[str]:
        """Return the leases of the same group that exclude a node for `ask`."""
        found = []
        one = ask.terms.anti_affinity if ask.terms is not None else None
        for name, lease in self.leases.items():
            other = lease.terms.anti_affinity
            if None in {one, other} or name in self.warm or name == ask.id:
                continue
            if (ask.tenant, one.group) != (lease.tenant, other.group):
                continue
            for share in lease.placement:
                there = self.node(share)
                near = (share.cluster_id, share.node_id) == (cluster, node.id)
                for level in {one.topology, other.topology} - {"node"} if there else ():
                    same = getattr(there, level) == getattr(node, level) != ""
                    near |= same and share.cluster_id == cluster
                found += [name] if near else []
        return found

    def _reserve(self, fact: Reserved) -> None:
        new = fact.reservation
        before = self.reserved.get(new.id)
        self.reserved[new.id] = new
        if before is not None:
            named = replace(before, parts=new.parts, devices=new.devices)
            if self.disturbed:
                named = replace(named, lapse_seconds=new.lapse_seconds)
            same = new == replace(named, used=new.used, begun=new.begun)
            law(
                same and new != before,
                "a later fact of a reservation changes only its devices or progress",
                fact,
                before,
            )
            return
        law(len(set(new.nodes)) == new.demand.nodes, "a reservation has all demanded nodes", fact)
        for pair in new.nodes:
            node = self.node(Share(*pair))  # type: ignore[arg-type]  # Plain values in tests.
            law(
                node is not None and not self.shut(*pair),
                "each node of a reservation is in the fleet and not cordoned",
                fact,
            )
        for other in self.reserved.values():
            apart = new.ends_at <= other.starts_at or other.ends_at <= new.starts_at
            both = new.parts and other.parts  # Parts of one node are checked below.
            shared = set(new.nodes) & set(other.nodes) if not both else ()
            law(
                other is new or apart or not shared,
                "no node reserved as a whole is reserved twice at one time",
                new,
                other,
            )
        over = self.ending.keys() | self.finished.keys() | self.warm
        for name in self.leases.keys() - over if not new.parts else ():
            in_time = self.expires[name] <= new.starts_at
            there = {(s.cluster_id, s.node_id) for s in self.leases[name].placement} & {*new.nodes}
            there |= {(s.cluster_id, s.node_id) for s in self.shown(name)} & {*new.nodes}
            mine = self.leases[name].tenant == new.tenant
            law(
                mine or in_time or not there,
                "no other tenant's lease overlaps a reservation of whole nodes",
                fact,
                self.leases[name],
            )
        for name in self.lost.keys() - over:
            shown = {(s.cluster_id, s.node_id, gpu) for s in self.shown(name) for gpu in s.gpus}
            reserved = {(s.cluster_id, s.node_id, gpu) for s in new.parts for gpu in s.gpus}
            in_time = self.expires[name] <= new.starts_at
            law(
                in_time or not shown & reserved,
                "a reservation has no device that an overlapping lease has lost",
                fact,
            )
        law(len(new.parts) in {0, len(new.nodes)}, "a reservation has no part or one per node", new)
        law(
            bool(new.parts) == bool(new.demand.gpus),
            "a reservation has parts exactly if it demands GPUs",
            new,
        )
        for part in new.parts:
            pair = (part.cluster_id, part.node_id)
            law(
                serves(self.node(part), part, new.demand),  # type: ignore[arg-type]  # A law above.
                "each part of a reservation satisfies its demand",
                new,
            )
            for at in agreed.moments(self, pair, None, new.starts_at, new.ends_at):
                free = agreed.free_for(self, pair, at, None)
                fits = free is not None and all(free[key] >= 0 for key in agreed.holds(part))
                law(fits, "no other lease or reservation overlaps a reservation of GPUs", new, free)

    def _unreserve(self, fact: Unreserved) -> None:
        law(fact.reservation in self.reserved, "only a known reservation ends", fact)
        over = self.reserved.pop(fact.reservation)
        if fact.reason.startswith("unused"):
            law(
                fact.at >= over.starts_at + over.lapse_seconds,
                "a reservation lapses only after its lapse time",
                fact,
                over,
            )
            used = over.used or any(
                lease.tenant == over.tenant and pair in over.nodes
                for name, lease in self.leases.items()
                if name not in self.warm
                for pair in ((share.cluster_id, share.node_id) for share in lease.placement)
            )
            law(not used, "no reservation lapses after its tenant has used it", fact, over)
        elif not fact.reason.startswith("ended by"):
            law(
                fact.at >= over.ends_at,
                "only an operator or a lapse ends a reservation early",
                fact,
                over,
            )

    @property
    def resetting(self) -> set[str]:
        """The released leases whose workloads are being reset to stay warm."""
        released = {name for name, reason in self.ending.items() if reason == RELEASED}
        return {name for name in released if self.leases[name].provision.keep_warm_seconds}  # type: ignore[union-attr]  # Only what has one is `Ending`.

    def own(self, ask: Ask) -> bool:
        """Return whether a workload for requests equal to this one is being reset."""
        likes = {self.leases[name].likeness for name in self.resetting}
        return ask.provision is not None and likeness(ask) in likes

    def learn(self, fact: Fact, asks: dict[str, Ask], now: float) -> None:
        match fact:
            case ClusterSet(cluster):
                self.clusters[cluster.id] = cluster
                self._lose()
            case ClusterRemoved(cluster_id):
                law(cluster_id in self.clusters, "only a cluster of the fleet is removed", fact)
                del self.clusters[cluster_id]
                self.cordons = {
                    at: until for at, until in self.cordons.items() if at[0] != cluster_id
                }
                self._lose()
            case Cordoned(cluster_id, node, until=until):
                law(cluster_id in self.clusters, "a cordon names a cluster of the fleet", fact)
                self.cordons[cluster_id, node] = until
            case Uncordoned(cluster_id, node):
                law(
                    (cluster_id, node) in self.cordons,
                    "only a cordoned node or cluster is uncordoned",
                    fact,
                )
                del self.cordons[cluster_id, node]
            case Reserved():
                self._reserve(fact)
            case Unreserved():
                self._unreserve(fact)
            case QuotaSet(tenant, project, None):
                law((tenant, project) in self.quotas, "only an existing quota is removed", fact)
                del self.quotas[tenant, project]
            case QuotaSet(tenant, project, quota):
                self.quotas[tenant, project] = quota
            case HalfLifeSet() | DurationsCarried():
                pass
            case Queued(ask, at, deadline):
                law(ask.id not in self.waiting, "no request enters the queue twice", fact)
                law(ask.id not in self.leases, "no request with a lease enters the queue", fact)
                law(
                    ask.terms is not None and not ask.dry_run,
                    "no request for advice and no dry run is queued",
                    fact,
                )
                patience = ask.terms.wait_seconds or ROOM_SECONDS_MAX
                law(deadline == at + patience, "a request waits for exactly its wait time", fact)
                coming = EVICTED in self.ending.values() or self.own(ask)
                gives_way = ask.terms.wait_seconds > 0 or coming
                law(gives_way, "a request without wait time waits only for a warm lease", fact)
                self.waiting[ask.id] = fact
            case Dequeued(request):
                law(request in self.waiting, "only a queued request leaves the queue", fact)
                law(request not in self.requeued, "no queued lease ends as a refused request", fact)
                del self.waiting[request]
                self.overtaken.pop(request, None)
            case Granted(lease, overtaken):
                self._check_grant(lease, asks, now)
                self.overtaken.pop(lease.id, None)
                if overtaken is not None:
                    self.overtaken[overtaken] += 1
            case Overtaken(request, times):
                self.overtaken[request] = times
            case WaitExtended(request, deadline):
                law(self.disturbed, "only a stall, restart or clock change extends a wait", fact)
                law(
                    request in self.waiting.keys() - self.requeued.keys(),
                    "a wait is extended only for a queued request, not for a lease",
                    fact,
                )
                law(deadline > self.waiting[request].deadline, "an extended wait ends later", fact)
                self.waiting[request] = replace(self.waiting[request], deadline=deadline)
            case ClockMoved(at, seconds):
                self._move_clock(at, seconds)
            case Renewed(lease_id, expires_at) if lease_id in self.requeued:
                self.expires[lease_id] = expires_at
                self.waiting[lease_id] = replace(self.waiting[lease_id], deadline=expires_at)
            case Renewed(lease_id, expires_at):
                law(lease_id in self.leases, "only a lease that holds capacity is renewed", fact)
                law(lease_id not in self.ending, "no ending lease is renewed", fact)
                own = self.disturbed or lease_id not in self.warm
                law(own, "no tenant renews a warm lease", fact)
                before = self.expires[lease_id]
                in_time = expires_at <= self.begins(self.leases[lease_id], before)
                law(in_time, "no renewed lease overlaps a reservation of another tenant", fact)
                self.expires[lease_id] = expires_at
            case Started(lease_id):
                law(lease_id in self.leases, "only a lease that holds capacity starts", fact)
                self.active.add(lease_id)
            case Preempted(lease_id):
                law(lease_id in self.leases, "only a lease that holds capacity gets notice", fact)
                over = self.ending.keys() | self.finished.keys() | self.warm
                law(lease_id not in over, "no ending, finished or warm lease gets notice", fact)
                before = self.notices.get(lease_id)
                if before is None:
                    self._may_get_notice(fact)
                else:
                    later = self.disturbed and before.until < fact.until
                    law(
                        later and before.by == fact.by,
                        "only a stall, restart or clock change prolongs a notice",
                        fact,
                    )
                self.notices[lease_id] = fact
            case Spared(lease_id):
                law(
                    self.notices.pop(lease_id, None) is not None,
                    "only a lease with notice is spared",
                    fact,
                )
            case Moved(lease_id, _, placement, _, lost):
                same = [replace(share, gpus=()) for share in placement]
                before = [replace(share, gpus=()) for share in self.leases[lease_id].placement]
                law(same == before, "a Moved fact changes only the device names of a lease", fact)
                law(
                    {*lost} == {*self.lost.get(lease_id, ())},
                    "a Moved fact lists exactly the lost devices of the lease",
                    fact,
                )
                self._count(self.leases[lease_id], -1, among_others=True)
                self.leases[lease_id] = replace(self.leases[lease_id], placement=placement)
                self._count(self.leases[lease_id], 1, among_others=True)
            case Ending(lease_id, at, reason):
                self._check_end(lease_id, reason, at)
                law(
                    self.leases[lease_id].provision is not None,
                    "only a lease with a workload is ending",
                    fact,
                )
                before = self.ending.get(lease_id)
                given_up = lease_id in self.resetting and reason != RELEASED
                law(
                    before is None or given_up,
                    "no ending lease begins to end again, unless its reset is given up",
                    fact,
                )
                self.ending[lease_id] = reason
                self.warm.discard(lease_id)
            case Finished(lease_id, outcome):
                self._check_end(lease_id, outcome.detail, outcome.at)
                law(lease_id in self.leases, "only a lease that holds capacity finishes", fact)
                law(
                    lease_id not in self.ending.keys() | self.finished.keys(),
                    "no ending or finished lease finishes",
                    fact,
                )
                law(
                    outcome.attempt == self.leases[lease_id].attempt,
                    "an outcome has the attempt number of its lease",
                    fact,
                )
                self.finished[lease_id] = outcome
            case Warmed(lease_id, at, expires_at):
                law(
                    self.ending.pop(lease_id, "") == RELEASED,
                    "only a released lease becomes warm",
                    fact,
                )
                provision = self.leases[lease_id].provision
                law(provision.keep_warm_seconds > 0, "only a lease that asks for it is warm", fact)  # type: ignore[union-attr]  # Only what has one is `Ending`.
                law(
                    expires_at == at + provision.keep_warm_seconds,  # type: ignore[union-attr]  # As above.
                    "a warm lease lasts for its keep-warm time",
                    fact,
                )
                self.warm.add(lease_id)
                self.expires[lease_id] = expires_at
            case Requeued():
                self._check_requeue(fact, asks)
            case Paused():
                self._check_pause(fact)
            case Resumed(lease_id, at):
                retry_at = self.paused.pop(lease_id, at + 1)
                law(at >= retry_at, "no lease resumes before its retry time", fact, retry_at)
            case Ended(lease_id) if lease_id in self.requeued:
                del self.requeued[lease_id], self.waiting[lease_id]
                self.overtaken.pop(lease_id, None)
                self.paused.pop(lease_id, None)
                self.ended.add(lease_id)
            case Ended(lease_id, at, reason):
                law(lease_id in self.leases, "only a lease that holds capacity or waits ends", fact)
                if lease_id not in self.ending and lease_id not in self.finished:
                    self._check_end(lease_id, reason, at)
                lease = self.leases.pop(lease_id)
                self._count(lease, -1)
                self._let_go(lease_id)
                self.ending.pop(lease_id, None)
                self.warm.discard(lease_id)
                self.finished.pop(lease_id, None)
                self.active.discard(lease_id)
                self.ended.add(lease_id)
            case Counted(fencing):
                self.fencing = max(self.fencing, fencing)
            case _:
                raise AssertionError(fact)

    def _move_clock(self, at: float, seconds: float) -> None:
        """Move all times with the calendar, so that each lease keeps the time it had left."""
        self.clock_moved_at = at
        for known in (self.leases, self.requeued):
            for name, lease in known.items():
                granted_at, asked_at = lease.granted_at + seconds, lease.asked_at + seconds
                known[name] = replace(lease, granted_at=granted_at, asked_at=asked_at)
        for name in self.leases.keys() | self.requeued.keys():
            self.expires[name] += seconds
        for name, until in self.paused.items():
            self.paused[name] = until + seconds
        for name, waiter in self.waiting.items():
            later = replace(waiter, at=waiter.at + seconds, deadline=waiter.deadline + seconds)
            self.waiting[name] = later
        for place, until in self.cordons.items():
            self.cordons[place] = until and until + seconds
        for name, notice in self.notices.items():
            self.notices[name] = replace(notice, until=notice.until + seconds)

    def _may_get_notice(self, fact: Preempted) -> None:
        lease, waiter = self.leases[fact.lease], self.waiting.get(fact.by)
        law(waiter is not None, "a lease gets notice only for a waiting request", fact)
        assert waiter is not None
        terms = lease.terms
        if terms.preemptible and terms.priority < waiter.ask.priority:
            in_time = fact.until >= fact.at + terms.notice_seconds
            law(in_time, "a preempted lease has at least its own notice time", fact, lease)
            lasted = fact.until >= lease.granted_at + terms.runtime_seconds_min
            law(lasted, "a preempted lease lasts for at least its minimum runtime", fact, lease)
        else:
            wants, its = self._quota(waiter.ask.tenant, None), self._quota(lease.tenant, None)
            law(
                fact.until >= fact.at + wants.notice_seconds,
                "a lease on borrowed quota has at least the notice time of the lender",
                fact,
            )
            own, used = its.nominal.gpu_milli, self.used(lease.tenant, None)["gpu_milli"]
            law(
                own is not None and used > own,
                "quota is taken back only from a tenant above its own quota",
                fact,
            )
            wanted = self.used(waiter.ask.tenant, None)["gpu_milli"] + needs_of(waiter.ask)
            mine = wants.nominal.gpu_milli
            law(
                mine is not None and wanted <= mine,
                "quota is taken back only for a tenant within its own quota",
                fact,
            )
        law(fact.until <= waiter.deadline, "a notice ends by the deadline of its waiter", fact)

    def _check_end(self, name: str, reason: str, now: float) -> None:
        notice = self.notices.pop(name, None)
        if reason.startswith("preempted"):
            law(
                notice is not None and now >= notice.until,
                "no lease is preempted before its notice ends",
                name,
            )
            assert notice is not None
            law(notice.by in self.waiting, "a lease is preempted only for a waiting request", name)

    def _check_requeue(self, fact: Requeued, asks: dict[str, Ask]) -> None:
        law(fact.lease in self.leases, "only a lease that holds capacity is requeued", fact)
        law(fact.lease not in self.ending, "no ending lease is requeued", fact)
        lease = self.leases.pop(fact.lease)
        provision = lease.provision
        law(
            provision is not None and provision.on_failure == "requeue",
            "only a lease that asks for it is requeued",
            lease,
        )
        law(lease.attempt < provision.attempts_max, "a requeued lease has attempts left", lease)  # type: ignore[union-attr]  # The law above.
        outcome = self.finished.pop(fact.lease, None)
        law(
            outcome is not None and outcome.phase == "failed",
            "only a lease whose workload failed is requeued",
            fact,
            outcome,
        )
        self._count(lease, -1)
        self._let_go(fact.lease)
        self.active.discard(fact.lease)
        self.requeued[fact.lease] = lease
        ask, due = asks[fact.lease], self.expires[fact.lease]
        if lease.choice is not None:  # It waits for the alternative that it had.
            ask = replace(ask, demand=ask.alternatives[lease.choice])
        self.waiting[fact.lease] = Queued(ask, lease.asked_at, due)

    def _check_pause(self, fact: Paused) -> None:
        law(fact.lease in self.requeued, "only a requeued lease pauses", fact)
        law(fact.lease not in self.paused, "no paused lease pauses again", fact)
        if fact.faults:
            self.faults[fact.lease] += 1
            law(fact.faults == self.faults[fact.lease], "a pause counts the faults before it", fact)
            law(fact.faults <= FAULTS_MAX, "a lease pauses for at most FAULTS_MAX faults", fact)
            pause = FAULT_PAUSE_SECONDS * 2.0 ** (fact.faults - 1)
        else:
            pause = self.pause_seconds * 2.0 ** (self.requeued[fact.lease].attempt - 1)
        pause = min(60.0, pause)
        law(fact.retry_at == fact.at + pause, "pauses double each time, up to 60 s", fact, pause)
        self.paused[fact.lease] = fact.retry_at

    def _lose(self) -> None:
        """Find the devices that leases hold and that have disappeared from their nodes."""
        self.lost = {}
        for name, held in self.held.items():
            gone = [device for pair, device, _ in held if device not in self._there(pair)]
            if gone:
                self.lost[name] = gone

    def shown(self, name: str) -> list[Share]:
        """Return the present places of devices that a lease has lost."""
        pairs = [(c.id, n.id) for c in self.clusters.values() for n in c.nodes]
        found = [(*pair, self._lost_devices(name, pair)) for pair in pairs if name in self.lost]
        return [Share(*each) for each in found if each[2]]  # type: ignore[arg-type]  # Plain values in tests.

    def _lost_devices(self, name: str, pair: tuple[str, str]) -> tuple[str, ...]:
        """Return the devices of a node that a lease has lost, with their parts and parents."""
        lost = self.lost.get(name, ())
        return tuple(
            gpu
            for device, gpu in self._there(pair).items()
            if any(device == x or _is_part(device, x) or _is_part(x, device) for x in lost)
        )

    def _there(self, pair: tuple[str, str]) -> dict[DeviceId, str]:
        node = self.node(Share(*pair))  # type: ignore[arg-type]  # Plain values in tests.
        if node is None:
            return {}
        return dict(zip(node.devices, (gpu.id for gpu in node.gpus), strict=False))

    def _let_go(self, name: str) -> None:
        self.held.pop(name, None)
        self.lost.pop(name, None)

    def _take_devices(self, lease: Lease) -> None:
        """Record the devices of a new lease; no other lease may hold them, under any name."""
        mine = self.held[lease.id] = []
        for share in lease.placement:
            pair = (share.cluster_id, share.node_id)
            names = {name: device for device, name in self._there(pair).items()}
            mine += [(pair, names[gpu], share.gpu_milli) for gpu in share.gpus if gpu in names]
        for _, device, _ in mine:
            others = [(each, milli) for held in self.held.values() for _, each, milli in held]
            much = sum(milli for each, milli in others if each == device)
            law(much <= 1000, "no device is over-allocated, whatever its name", lease, device)
            parts = [each for each, _ in others if _is_part(each, device) or _is_part(device, each)]
            law(not parts, "no device is held both whole and in parts", lease, parts)

    def check_names(self) -> None:
        """Check that each lease lists the present names of its devices."""
        law(max(self.devices.values(), default=0) <= 1000, "no device is over-allocated", self)
        for name, held in self.held.items():
            shares = {(x.cluster_id, x.node_id): x.gpus for x in self.leases[name].placement}
            for pair, device, _ in held:
                now = self._there(pair).get(device)
                named = now is None or now in shares[pair]
                law(
                    named,
                    "a lease lists the present name of each device that it holds",
                    self.leases[name],
                    device,
                    now,
                )

    def _count(self, lease: Lease, sign: int, *, among_others: bool = False) -> None:
        for share in lease.placement:
            pair = (share.cluster_id, share.node_id)
            self.cpu[pair] += sign * share.cpu_milli
            self.memory[pair] += sign * share.memory_mib
            for gpu in share.gpus:
                self.devices[*pair, gpu] += sign * share.gpu_milli
                once = among_others or self.devices[*pair, gpu] <= 1000
                law(once, "no device is over-allocated within a turn", lease, gpu)

    def _check_grant(self, lease: Lease, asks: dict[str, Ask], now: float) -> None:
        law(
            lease.fencing > self.fencing,
            "each grant has a higher fencing number than all earlier ones",
            lease.fencing,
            self.fencing,
        )
        law(lease.id not in self.paused, "no paused lease is granted", lease)
        self.faults.pop(lease.id, None)
        law(
            lease.id not in self.leases and lease.id not in self.ended,
            "no granted or ended lease is granted again",
            lease.id,
        )
        self.fencing = lease.fencing
        ask = asks[lease.id]
        law(
            ask.terms is not None and not ask.dry_run,
            "no request for advice and no dry run is granted",
            ask,
        )
        same = (lease.tenant, lease.token_digest, lease.policy, lease.terms, lease.provision)
        requested = (ask.tenant, ask.token_digest, ask.policy, ask.terms, ask.provision)
        law(
            same == requested,
            "a lease has the tenant, token, policy, terms and workload of its request",
            same,
            requested,
        )
        law(lease.granted_at == now, "a lease's grant time is the present time", lease, now)
        law(
            lease.state == ("starting" if lease.provision else "granted"),
            "a new lease is starting if it has a workload, else granted",
            lease.state,
        )
        key = (ask.tenant, ask.terms.idempotency_key)
        before = self.requeued.pop(lease.id, None)
        if before is not None:
            law(
                lease.attempt == before.attempt + 1,
                "a lease granted again has the next attempt number",
                lease,
                before,
            )
            same = (lease.expires_at, lease.asked_at) == (self.expires[lease.id], before.asked_at)
            law(same, "a lease granted again keeps its end and request time", lease, before)
        else:
            law(lease.attempt == 1, "the first grant of a lease has attempt number 1", lease)
            until = now + lease.terms.ttl_seconds
            if lease.terms.ttl_seconds_min:
                until = min(until, self.begins(lease, now))
                agreed = lease.expires_at >= now + lease.terms.ttl_seconds_min
                law(agreed, "a lease lasts for at least its ttl_seconds_min", lease)
            law(
                lease.expires_at == until,
                "a lease lasts for its ttl_seconds unless a reservation may shorten it",
                lease,
            )
        if key[1] and before is None:
            law(key not in self.keys, "no idempotency key gets two leases", key, lease.id)
            self.keys[key] = lease.id
        beyond = self.beyond(lease.tenant, lease.terms.project, holds(lease.placement))
        law(not beyond, "no grant exceeds a quota plus what that quota may borrow", lease)
        self.waiting.pop(lease.id, None)
        self.leases[lease.id] = lease
        self.expires[lease.id] = lease.expires_at
        self._sound(ask, lease)
        in_time = lease.expires_at <= self.begins(lease, now, at_once=True)
        law(in_time, "no new lease overlaps a reservation of another tenant", lease)
        for name, each in self.reserved.items():
            there = {(share.cluster_id, share.node_id) for share in lease.placement}
            if each.tenant == lease.tenant and each.starts_at <= now and there & set(each.nodes):
                self.reserved[name] = replace(each, used=True)
        self._count(lease, 1)
        self._take_devices(lease)
        for share in lease.placement:
            pair = (share.cluster_id, share.node_id)
            node = self.node(share)
            assert node is not None
            law(self.cpu[pair] <= node.cpu_milli, "no node's CPU is over-allocated", lease)
            law(self.memory[pair] <= node.memory_mib, "no node's memory is over-allocated", lease)

    def node(self, share: Share) -> Node | None:
        cluster = self.clusters.get(share.cluster_id)
        nodes = cluster.nodes if cluster else ()
        return next((node for node in nodes if node.id == share.node_id), None)

    def _sound(self, ask: Ask, lease: Lease) -> None:
        shares, demand = lease.placement, ask.demand
        law(
            (lease.choice is None) == (not ask.alternatives),
            "a lease has a choice exactly if its request has alternatives",
            lease,
        )
        if lease.choice is not None:
            demand = ask.alternatives[lease.choice]
        law(bool(shares), "a lease has at least one share", lease)
        law(
            len({(s.cluster_id, s.node_id) for s in shares}) == len(shares),
            "no lease has two shares on one node",
            lease,
        )
        for share in shares:
            allowed = ask.candidates is None or share.cluster_id in ask.candidates
            law(allowed, "each cluster of a lease is a candidate of its request", ask, share)
            node = self.node(share)
            law(node is not None, "each node of a lease is in the fleet", share)
            assert node is not None
            law(
                not self.shut(share.cluster_id, share.node_id),
                "no lease is granted on a cordoned node",
                share,
            )
            law(not node.unavailable, "no lease is granted on an unavailable node", share)
            near = self.near(lease, share.cluster_id, node)
            law(not near, "no lease is near another lease of its anti-affinity group", lease, near)
            gpus = [gpu for gpu in node.gpus if gpu.id in share.gpus]
            law(len(gpus) == len(share.gpus), "a share lists existing devices, each once", share)
            law(1 <= share.gpu_milli <= 1000, "each share's gpu_milli is from 1 to 1000", share)
            for gpu in gpus if share.gpu_milli < 1000 else ():
                law(not gpu.exclusive, "no exclusive device is shared", share, gpu)
            if demand is not None:
                law(serves(node, share, demand), "each share satisfies the demand", demand, share)
                pair = (share.cluster_id, share.node_id)
                law(
                    has_labels(pair, node, demand),
                    "each node of a lease meets the label requirements of the demand",
                    demand,
                    node,
                )
        if demand is not None:
            law(len(shares) == demand.nodes, "a lease has as many nodes as demanded", demand, lease)
            if demand.topology in {"rack", "zone"} and len(shares) > 1:
                places = {(s.cluster_id, getattr(self.node(s), demand.topology)) for s in shares}
                together = len(places) == 1 and all(name for _, name in places)
                law(together, f"all nodes of a gang are in one {demand.topology}", places)

    def fits_without(
        self,
        names: Iterable[str],
        demand: Demand,
        candidates: Any,
        shut: Iterable[tuple[str, str]],
        ask: Ask | None = None,
        now: float = 0.0,
    ) -> bool:
        """Return whether a demand of `ask` would fit now if these leases held nothing."""
        names = set(names)
        leases = [self.leases[name] for name in names]
        lost, self.lost = self.lost, {x: gone for x, gone in self.lost.items() if x not in names}
        for lease in leases:
            self._count(lease, -1)
        less = self.beside(ask, now, names) if ask is not None else {}
        fits = self.fits(demand, candidates, shut, less)
        for lease in leases:
            self._count(lease, 1)
        self.lost = lost
        return fits

    def fits(
        self,
        demand: Demand,
        candidates: Any,
        shut: Iterable[tuple[str, str]] = (),
        less: Mapping[tuple[str, str], Counter[str]] = _NOTHING,
    ) -> bool:
        """Return whether a demand fits now, by a check of each node and group one by one.

        `less` has, by node, the amounts that no lease holds and that are still not available.
        """
        closed, places, found = set(shut), Counter[tuple[str, str]](), 0
        together = demand.nodes > 1 and demand.topology in {"rack", "zone"}
        for cluster in self.clusters.values():
            if candidates is not None and cluster.id not in candidates:
                continue
            for node in cluster.nodes:
                pair = (cluster.id, node.id)
                if pair in closed or self.shut(*pair):
                    continue
                if not self._takes(pair, node, demand, less.get(pair, _NONE)):
                    continue
                found += 1
                if together and (name := getattr(node, demand.topology)):
                    places[cluster.id, name] += 1
        if together:
            return max(places.values(), default=0) >= demand.nodes
        return found >= demand.nodes

    def could_be(self, lease: Lease, demand: Demand, candidates: Any) -> bool:
        """Return whether a demand would fit on a node of a lease if the node were empty."""
        for share in lease.placement:
            node, pair = self.node(share), (share.cluster_id, share.node_id)
            if candidates is not None and share.cluster_id not in candidates:
                continue
            empty = Model(clusters=self.clusters, cordons=self.cordons)
            if node is not None and empty._takes(pair, node, demand):  # The model's own check.
                return True
        return False

    def _takes(
        self, pair: tuple[str, str], node: Node, demand: Demand, less: Counter[str] = _NONE
    ) -> bool:
        if not has_labels(pair, node, demand):
            return False
        if node.unavailable or self.cpu[pair] + less["cpu"] + demand.cpu_milli > node.cpu_milli:
            return False
        if self.memory[pair] + less["memory"] + demand.memory_mib > node.memory_mib:
            return False
        usable = [
            gpu
            for gpu in node.gpus
            if (not demand.models or gpu.model in demand.models)
            and gpu.memory_mib >= demand.gpu_memory_mib
            and not (gpu.exclusive and demand.gpu_milli < 1000)
            and self.devices[*pair, gpu.id] + less[f"gpu {gpu.id}"] + demand.gpu_milli <= 1000
        ]
        if self.lost:
            gone = {gpu for name in self.lost for gpu in self._lost_devices(name, pair)}
            usable = [gpu for gpu in usable if gpu.id not in gone]
        if demand.gpus > 1 and demand.topology in {"nvlink", "numa"}:
            nvlink = demand.topology == "nvlink"
            groups = Counter(
                gpu.link_group if nvlink else gpu.numa
                for gpu in usable
                if (gpu.link_group if nvlink else gpu.numa >= 0)
            )
            return max(groups.values(), default=0) >= demand.gpus
        return len(usable) >= demand.gpus

    def next_deadline(self) -> float | None:
        """Return the earliest end of a lease, a pause, a notice or a reservation."""
        due = [self.expires[name] for name in self.leases if name not in self.ending]
        due += self.paused.values()
        due += [notice.until for notice in self.notices.values()]
        for each in self.reserved.values():
            if not each.begun:
                due.append(each.starts_at)
                continue
            lapses = each.lapse_seconds and not each.used
            lapse = each.starts_at + each.lapse_seconds if lapses else inf
            due.append(min(each.ends_at, lapse))
        return min([*due, *(waiter.deadline for waiter in self.waiting.values())], default=None)


def _is_part(one: DeviceId, other: DeviceId) -> bool:
    return one.parent == other.uuid
