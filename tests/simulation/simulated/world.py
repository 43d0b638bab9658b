"""The world around one allocator: clients, cells, backends, an operator, a disk, and faults.

The world follows the daemon's order of commits: `Consult` and `Forget` leave at once; every
other effect waits until the facts of its turn and of all earlier turns are durable; the core
continues to step while a group is written. A crash loses unwritten facts, undelivered effects,
every socket, every cell and all reports in transit; backends keep running.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Literal

from msgspec.structs import replace

from moorage.core.allocator import Allocator
from moorage.core.queue.order import OVERTAKEN_MAX, WaitingQueue
from moorage.core.state.checkpoint import condense
from moorage.core.state.facts import Fact, Refusal
from moorage.core.state.refusals import PASSING
from moorage.core.turns.effects import (
    EARLY,
    Address,
    Consult,
    Effect,
    Forget,
    KeepWarm,
    LeaseNews,
    Look,
    Recall,
    Respond,
    Start,
    Stop,
)
from moorage.core.turns.events import (
    Asked,
    CancelAsked,
    ClockSet,
    ClusterGone,
    ClusterSeen,
    ConsultFailed,
    CordonAsked,
    Event,
    FlushAsked,
    HalfLifeConfigured,
    Inquired,
    Proposed,
    QuotaAsked,
    ReleaseAsked,
    RenewAsked,
    ReserveAsked,
    Restarted,
    SessionLost,
    Stalled,
    Tick,
    UnreserveAsked,
    WorkloadEnded,
    WorkloadFailed,
    WorkloadKept,
    WorkloadStarted,
    WorkloadStopped,
)
from moorage.core.turns.turn import Turn
from moorage.model import (
    Amounts,
    Ask,
    Cluster,
    ClusterId,
    Code,
    Demand,
    Lease,
    LeaseTerms,
    NodeId,
    PolicyRef,
    Quota,
    RequestId,
    SessionId,
    Tenant,
)
from simulated import fleets
from simulated.laws import LawBroken, Model, law
from simulated.policies import DISHONEST, HONEST, SILENCE, Character
from simulated.witness import Witness

EVENTS = 300
"""Default number of events in a world."""
GRACE_SECONDS = 10.0
LABELLED = 1_000_000
"""From this seed on, nodes have labels, and demands require some; earlier worlds have none."""
ELASTIC = 2_000_000
"""From this seed on, requests have alternatives, and nodes have no labels."""
AGREED = 3_000_000
"""From this seed on, requests accept shorter leases, and each world has reservations."""
APART = 4_000_000
"""From this seed on, gangs require zones, and leases have anti-affinity."""
OVERTAKING = 5_000_000
"""From this seed on, waiters are overtaken a few times at most; there are no alternatives."""
REBUILT = 6_000_000
"""From this seed on, devices have UUIDs, and are lost, added, swapped and divided under leases."""
STALLED = 7_000_000
"""From this seed on, the daemon stalls now and then, and the calendar is set."""
Phase = Literal["succeeded", "failed"]


@dataclass(frozen=True)
class Crashed:
    """A mark in the trace: the process died, with this number of durable facts."""

    durable: int


class World:
    """One world, in which a crash replaces the allocator by a new one."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = Random(seed)
        self.now = 1_000.0
        self.honest = rng.random() < 0.4
        self.orderly = rng.random() < 0.3
        self.sandbox = Random(f"sandbox {seed}")
        self.operator = Random(f"operator {seed}")
        """Random numbers of the operator, whom only some worlds have."""
        self.operated = self.operator.random() < 0.3
        self.ruler = Random(f"quotas {seed}")
        self.ruled = self.ruler.random() < 0.3
        self.reserving = Random(f"reserving {seed}")
        self.reserves = self.reserving.random() < 0.3
        self.preempting = Random(f"preemption {seed}")
        self.preempts = self.preempting.random() < 0.3
        self.labelling = Random(f"labels {seed}")
        self.labelled = LABELLED <= seed < ELASTIC
        self.choosing = Random(f"alternatives {seed}")
        self.elastic = ELASTIC <= seed < AGREED or APART <= seed < OVERTAKING
        self.agreeing = Random(f"agreed {seed}")
        self.agrees = AGREED <= seed < APART
        self.reserves |= self.agrees or seed >= STALLED
        self.parting = Random(f"apart {seed}")
        self.parts = APART <= seed < OVERTAKING
        self.overtaken_max = 3 if OVERTAKING <= seed < REBUILT else OVERTAKEN_MAX
        self.rebuilding = Random(f"rebuilding {seed}")
        self.rebuilds = REBUILT <= seed < STALLED
        self.clocks = Random(f"clocks {seed}")
        self.stalls = seed >= STALLED
        self.uuids = itertools.count()
        self.fault_rate = self.sandbox.choice([0.0, 0.0, 0.3, 1.0])  # For queued leases.
        self.pause_seconds = Random(f"pause {seed}").choice([0.0, 0.0, 1.0])
        self.crash_rate = rng.choice([0.0, 0.005, 0.02])
        characters: tuple[Character, ...] = HONEST if self.honest else DISHONEST
        refs = [PolicyRef(f"rule-{n}", f"digest-{n}") for n in range(3)]
        self.rules = {ref: rng.choice(characters) for ref in refs}
        self.policies = refs
        names = fleets.CLUSTERS[: rng.randint(1, 3)]
        self.inventory = [self._label(fleets.cluster(rng, name)) for name in names]
        self.demands = self._demands(rng.randint(1, 4))
        if self.labelled:
            where = (self.labelling.choice(fleets.WHERE) for _ in self.demands)
            self.demands = [replace(d, where=w) for d, w in zip(self.demands, where, strict=True)]
        self.bare = rng.choice([0.05, 0.4])
        self.hear_weight = rng.choice([8, 12, 25, 40])  # The speed of cells and backends.
        self.provisioned = rng.choice([0.3, 0.3, 0.95])  # Share with a workload.
        self.tenants = [Tenant(f"tenant-{n}") for n in range(rng.choice([1, 2, 3]))]
        self.sessions = {SessionId(f"s{n}"): rng.choice(self.tenants) for n in range(4)}
        self.numbers = 0
        self.reservations = 0
        self.requests = 0
        self.keyed: list[Ask] = []
        self.usual: dict[Tenant, Ask] = {}
        self.held: dict[RequestId, tuple[Lease, str]] = {}
        self.engines: dict[str, tuple[RequestId, int]] = {}
        self.over: dict[str, Phase] = {}  # Workloads that ended by themselves, until a stop.
        self.ledger: list[Fact] = []
        self.checkpoint: tuple[int, list[Fact]] | None = None
        self.trace: list[tuple[float, Event | Crashed]] = []
        self.witness = Witness(self)
        self.lives = 0
        self._begin_life()

    def _label(self, cluster: Cluster) -> Cluster:
        if self.rebuilds:
            return fleets.with_uuids(cluster, self.uuids)
        if self.parts:
            return fleets.change_zones(self.parting, cluster)
        return fleets.change_labels(self.labelling, cluster) if self.labelled else cluster

    def _demands(self, count: int) -> list[Demand]:
        """Draw demands that mostly fit the empty fleet, or all answers would be `never_fits`."""
        empty = Model(clusters={cluster.id: cluster for cluster in self.inventory})
        drawn = [fleets.demand(self.rng) for _ in range(60)]
        if self.parts:
            drawn = [fleets.in_zones(self.parting, each) for each in drawn]
        able = [demand for demand in drawn if empty.fits(demand, None)]
        few = [demand for demand in able if demand.gpus]
        special = [d for d in able if d.topology or d.nodes > 1] if self.rng.random() < 0.5 else []
        special.sort(
            key=lambda demand: demand.topology not in {"rack", "zone"}
        )  # Demands for one rack or zone are rare: they come first.
        return [
            *few[:count],
            *able[:1],
            *special[:2],
            *(drawn[:1] if self.rng.random() < 0.3 else []),
        ] or drawn

    def _begin_life(self) -> None:
        """Begin the life of a daemon; every second daemon was the standby of the one before."""
        stood_by = self.standby if self.lives % 2 else None
        self.allocator = stood_by or Allocator(self.pause_seconds, self.overtaken_max)
        self.witness.follow(self.allocator.requests.queue)
        self.lives += 1
        self.standby, self.followed = Allocator(self.pause_seconds, self.overtaken_max), 0
        self.turns: list[Turn] = []
        self.writing: list[Turn] = []
        self.inbox: list[Event] = []
        self.consulting: dict[RequestId, Consult] = {}
        self.ordered: set[str] = set()  # Backends report workloads that this life ordered.

    # The commit loop -----------------------------------------------------------------------------

    def step(self, event: Event) -> Turn:
        self.trace.append((self.now, event))
        self.witness.before(event)
        turn = self.allocator.step(event, self.now)
        self.witness.after(event, turn)
        for effect in turn.effects:
            if type(effect) in EARLY:
                self.deliver(effect)
        if turn.facts or self.turns or self.writing:
            self.turns.append(turn)
        else:
            self.let_go([turn])
        if self.rng.random() < 0.4:
            self.commit()
        return turn

    def commit(self) -> None:
        """Make the facts being written durable, then begin to write the waiting facts."""
        self.ledger += [fact for turn in self.writing for fact in turn.facts]
        self._follow()
        written, self.writing, self.turns = self.writing, self.turns, []
        if written and not self.writing and self.rng.random() < 0.1:
            self.checkpoint = (len(self.ledger), list(condense(self.allocator.state)))
        self.let_go(written)

    def _follow(self) -> None:
        """Apply the durable facts at the standby, and sometimes query it."""
        self.standby.follow(self.ledger[self.followed :])
        self.followed = len(self.ledger)
        if self.followed % 16 == 0:
            asked = Inquired(Address(SessionId("reader"), 1), "queue", self.tenants[0], limit=10)
            self.standby.read(asked, self.now)
            fresh = WaitingQueue(self.standby.state, self.overtaken_max)
            fresh.restore()
            ours, theirs = map(_lines, (self.standby.requests.queue, fresh))
            law(
                ours == theirs,
                "a standby's queue equals one that is restored from its state",
                ours,
                theirs,
            )

    def let_go(self, turns: list[Turn]) -> None:
        for turn in turns:
            for effect in turn.effects:
                if type(effect) not in EARLY:
                    self.deliver(effect)

    def deliver(self, effect: Effect) -> None:
        rng = self.rng
        match effect:
            case Consult(ask, number):
                self.consulting[ask.id] = effect
                character = self.rules[ask.policy]
                value = character(rng, self.allocator.state.fleet, effect)
                again = ask.id in self.witness.model.requeued
                if again and self.sandbox.random() < self.fault_rate:
                    code = self.sandbox.choice(sorted(PASSING))
                    value = Refusal(code, "The policy did not get to answer.")
                if isinstance(value, Refusal):
                    self.post(ConsultFailed(ask.id, number, value))
                elif value is not SILENCE:
                    self.post(Proposed(ask.id, number, value))
            case Forget(request):
                self.consulting.pop(request, None)
            case Respond(to, answer):
                self.witness.heard(to, answer, self.ledger)
                if isinstance(answer, LeaseNews) and answer.owner:
                    self.held[answer.lease.id] = (answer.lease, answer.lease.token_digest)
            case Recall(to):
                self.witness.heard(to, None, self.ledger)
            case Look(lease):
                if lease.workload not in self.over and rng.random() < 0.7:
                    self.post(WorkloadStarted(lease.id, lease.fencing, "10.0.0.1:80"))
            case Start(lease):
                self.witness.ordered(lease, self.ledger, self.engines.get(lease.workload))
                self.engines[lease.workload] = (lease.id, lease.fencing)
                self.ordered.add(lease.workload)
                if lease.inherited and lease.state == "starting":
                    self.over.pop(lease.workload, None)  # It starts again.
                if lease.workload in self.over:
                    self.post(self._over(lease.workload))
                elif rng.random() < 0.7:
                    self.post(WorkloadStarted(lease.id, lease.fencing, "10.0.0.1:80"))
                elif rng.random() < 0.9:
                    del self.engines[lease.workload]
                    tail = ("pulling", "no such image")
                    self.post(WorkloadFailed(lease.id, lease.fencing, "no image", 1, tail))
            case Stop(lease):
                self.witness.put_away(lease)
                self.over.pop(lease.workload, None)
                if rng.random() < 0.7:  # Otherwise `engine` delivers it later.
                    self.engines.pop(lease.workload, None)
                    self.post(WorkloadStopped(lease.id, lease.fencing))
            case KeepWarm(lease):
                self.ordered.add(lease.workload)
                dead = self.over.pop(lease.workload, None)
                if dead is None and rng.random() < 0.8:
                    self.post(WorkloadKept(lease.id, lease.fencing))
                elif dead or rng.random() < 0.8:
                    self.engines.pop(lease.workload, None)
                    self.post(WorkloadStopped(lease.id, lease.fencing, "its reset failed"))

    def post(self, event: Event) -> None:
        self.inbox.append(event)
        often = 0.3 if isinstance(event, WorkloadFailed | WorkloadStopped) else 0.05
        if self.rng.random() < often and not self.orderly:
            self.inbox.append(event)  # A duplicate.

    def crash(self) -> None:
        """Crash. The facts being written may be durable, and some of their effects delivered."""
        if self.writing and self.rng.random() < 0.5:
            self.ledger += [fact for turn in self.writing for fact in turn.facts]
            self.let_go(self.writing[: self.rng.randint(0, len(self.writing))])
        self.trace.append((self.now, Crashed(len(self.ledger))))
        retries = self.witness.crashed(self.ledger)
        self._follow()
        took_over = self.lives % 2
        self._begin_life()
        durable = self.durable()
        self.allocator.replay(() if took_over else durable)
        self.witness.restored(self.ledger)
        self.sessions = {SessionId(f"{s}+"): t for s, t in self.sessions.items()}
        self.now += self.rng.choice([0.1, 2.0, 20.0])
        self.step(Restarted(GRACE_SECONDS))
        for ask in retries:
            if self.rng.random() < 0.8:
                self.say(lambda to, ask=ask: self._repeat(to, ask), ask.tenant)

    def durable(self) -> list[Fact]:
        if self.checkpoint is None or self.rng.random() < 0.3:
            return self.ledger
        seq, body = self.checkpoint
        return body + self.ledger[seq:]

    # Clients -------------------------------------------------------------------------------

    def say(self, message: Callable[[Address], Event | None], tenant: str | None = None) -> None:
        ours = [s for s, t in self.sessions.items() if tenant in {None, t}]
        if not ours:
            return
        self.numbers += 1
        to = Address(self.rng.choice(ours), self.numbers)
        event = message(to)
        if event is not None:
            self.witness.said(to, event)
            self.step(event)

    def _ask(self, to: Address) -> Event:
        self.requests += 1
        tenant = self.sessions[to.session]
        name = f"r{self.requests}"
        taken = [*self.allocator.state.leases, *self.allocator.state.waiting, *self.consulting]
        if taken and self.rng.random() < 0.03:
            name = self.rng.choice(taken)
        ask = fleets.ask(
            self.rng, name, tenant, self.demands, self.policies, self.bare, self.provisioned
        )
        if self.elastic and ask.demand is not None and self.choosing.random() < 0.5:
            ask = self._with_alternatives(ask, ask.demand)
        if self.ruled and ask.terms is not None:
            project = self.ruler.choice(["", "one", "two"])
            ask = replace(ask, terms=replace(ask.terms, project=project))
        if ask.terms is not None:
            ask = replace(ask, terms=self._preemptible(ask.terms))
        if self.agrees and ask.terms is not None and self.agreeing.random() < 0.6:
            shortest = ask.terms.ttl_seconds * self.agreeing.choice([0.01, 0.3, 1.0])
            ask = replace(ask, terms=replace(ask.terms, ttl_seconds_min=shortest))
        if self.parts and ask.terms is not None and self.parting.random() < 0.5:
            apart = fleets.anti_affinity(self.parting)
            ask = replace(ask, terms=replace(ask.terms, anti_affinity=apart))
        usual = self.usual.get(tenant)
        if usual is not None and ask.terms is not None and self.rng.random() < self.provisioned / 2:
            ask = replace(
                usual, id=ask.id, token_digest=ask.token_digest, terms=ask.terms, dry_run=False
            )
        elif ask.provision is not None:
            self.usual[tenant] = ask
        mine = [old for old in self.keyed if old.tenant == tenant]
        if mine and self.rng.random() < 0.08:
            return self._repeat(to, self.rng.choice(mine[-10:]))
        if ask.terms is not None and ask.terms.idempotency_key and not ask.dry_run:
            self.keyed.append(ask)
        return Asked(to, ask)

    def _with_alternatives(self, ask: Ask, demand: Demand) -> Ask:
        """Add alternatives to a request: half the GPUs, and sometimes another demand."""
        less = [replace(demand, gpus=demand.gpus // 2)] if demand.gpus > 1 else []
        others = [self.choosing.choice(self.demands) for _ in range(self.choosing.randint(0, 2))]
        some = tuple(dict.fromkeys((demand, *less, *others)))
        return replace(ask, alternatives=some) if len(some) > 1 else ask

    def _repeat(self, to: Address, ask: Ask) -> Event:
        self.requests += 1
        name = RequestId(f"r{self.requests}")
        return Asked(to, replace(ask, id=name, token_digest=f"token of {name}"))

    def _lease(self) -> tuple[RequestId, str]:
        if not self.held or self.rng.random() < 0.03:
            return RequestId("r0"), "nonsense"
        request = self.rng.choice(list(self.held)[-6:])
        token = self.held[request][1]
        return request, token if self.rng.random() < 0.9 else "stolen"

    def _release(self, to: Address) -> Event:
        leases = self.allocator.state.leases.values()
        used = [each for each in leases if each.state == "active" and each.likeness]
        if used and self.rng.random() < 0.7:
            lease = self.rng.choice(used)
            return ReleaseAsked(to, lease.id, lease.token_digest)
        return ReleaseAsked(to, *self._lease())

    def _renew(self, to: Address) -> Event:
        return RenewAsked(to, *self._lease(), self.rng.choice([None, None, 1.0, 40.0]))

    def _cancel(self, to: Address) -> Event:
        names = list(self.allocator.state.waiting) or [RequestId("r0")]
        return CancelAsked(to, self.rng.choice(names), self.sessions[to.session])

    def _flush(self, to: Address) -> Event:
        cluster = self.rng.choice([None, *self.allocator.state.clusters])
        return FlushAsked(to, self.sessions[to.session], cluster)

    def _cordon(self, to: Address) -> Event:
        clusters = [*self.allocator.state.clusters.values()] or self.inventory
        cluster = self.operator.choice(clusters)
        place = cluster.id, self.operator.choice(["", *(each.id for each in cluster.nodes), "gone"])
        mode = self.operator.choice(["cordon", "drain", "uncordon"])
        if mode == "uncordon":
            place = self.operator.choice([place, *self.allocator.state.cordons])
        seconds = self.operator.choice([None, 5.0, 60.0])
        tenant = self.sessions[to.session]
        return CordonAsked(to, tenant, ClusterId(place[0]), NodeId(place[1]), mode, "", seconds)

    def _reserve(self, to: Address) -> Event:
        draw, known = self.reserving, [*self.allocator.state.reserved.by_id]
        tenant = self.sessions[to.session]
        if known and draw.random() < 0.2:
            return UnreserveAsked(to, tenant, draw.choice(known))
        self.reservations += 1
        starts_at = self.now + draw.choice([-1.0, 0.0, 5.0, 30.0])
        return ReserveAsked(
            to,
            RequestId(f"reservation-{self.reservations}"),
            tenant,
            draw.choice(self.demands),
            starts_at,
            starts_at + draw.choice([0.5, 10.0, 60.0]),
            draw.choice([0.0, 0.0, 2.0]),
            draw.choice([None, None, (ClusterId(fleets.CLUSTERS[0]),)]),
        )

    def _preemptible(self, terms: LeaseTerms) -> LeaseTerms:
        if not self.preempts:
            return replace(terms, preemptible=False)
        draw = self.preempting
        return replace(
            terms,
            preemptible=draw.random() < 0.6,
            runtime_seconds_min=draw.choice([0.0, 0.0, 5.0]),
            notice_seconds=draw.choice([0.0, 0.0, 2.0]),
        )

    def _rule(self, to: Address) -> Event:
        draw = self.ruler.choice

        def amounts(*gpus: int | None) -> Amounts:
            return Amounts(
                draw(gpus), draw([None, None, None, 4_000]), draw([None, None, None, 8_192])
            )

        tenant = draw([*self.tenants, "*"])
        account = Tenant(tenant), None if tenant == "*" else draw([None, None, "one", "two"])
        quota = Quota(
            draw([0.5, 1.0, 2.0]),
            amounts(None, 0, 1_000, 2_000, 4_000),
            amounts(None, 1_000, 2_000),
            amounts(None, 0, 1_000),
            draw([0.0, 0.0, 3.0]),
        )
        known = self.allocator.state.accounts.quotas
        if known and self.ruler.random() < 0.3:
            return QuotaAsked(to, self.sessions[to.session], *draw(list(known)), None)
        return QuotaAsked(to, self.sessions[to.session], *account, quota)

    def _inquire(self, to: Address) -> Event:
        question = self.rng.choice(["status", "why", "queue", "leases", "fleet"])
        return Inquired(
            to,
            question,
            self.sessions[to.session],
            subject=f"r{self.rng.randint(0, self.requests)}",
            filters=self.rng.choice([{}, {}, {"cluster": "quay"}, {"state": "ended"}]),
            after=self.rng.choice(["", "", "2", "harbour"]),
            limit=self.rng.choice([1, 100]),
        )

    # Operators, backends and faults --------------------------------------------------------

    def lose_session(self) -> None:
        session = self.rng.choice(list(self.sessions))
        self.sessions[SessionId(f"{session}'")] = self.sessions.pop(session)
        self.witness.lost(session)
        self.step(SessionLost(session))

    def work_on_the_fleet(self) -> None:
        clusters = self.allocator.state.clusters
        name = self.rng.choice(fleets.CLUSTERS)
        if name not in clusters:
            self.step(ClusterSeen(self._label(fleets.cluster(self.rng, name))))
        elif self.rng.random() < 0.3:
            self.step(ClusterGone(clusters[name].id))
        elif self.rebuilds:
            rebuilt = fleets.rebuilt(self.rebuilding, clusters[name], self.uuids)
            self.step(ClusterSeen(rebuilt))
        else:
            self.step(ClusterSeen(self._label(fleets.change_hardware(self.rng, clusters[name]))))

    def hear(self) -> None:
        """Pass one of the pending events to the allocator."""
        if self.inbox:
            place = 0 if self.orderly else self.rng.randrange(len(self.inbox))
            event = self.inbox.pop(place)
            if isinstance(event, Proposed | ConsultFailed):
                consult = self.consulting.get(event.request)
                if consult is not None and consult.consultation == event.consultation:
                    del self.consulting[event.request]
            self.step(event)

    def engine(self) -> None:
        """Report that a workload ended by itself, or that its backend stopped it late."""
        if running := sorted(self.engines.keys() & self.ordered):
            name = self.rng.choice(running)
            chance = self.rng.random()
            if chance < 0.5:
                self.over[name] = "failed" if chance < 0.4 else "succeeded"
                self.post(self._over(name))
            else:
                self.post(WorkloadStopped(*self.engines.pop(name)))

    def _over(self, name: str) -> WorkloadEnded:
        return WorkloadEnded(*self.engines[name], self.over[name], "it ended by itself", 7)

    def wait(self) -> None:
        due = self.allocator.next_deadline()
        if due is not None and due > self.now and self.rng.random() < 0.3:
            self.now = due
        else:
            self.now += self.rng.choice([0.01, 0.1, 0.5, 2.0])
        if due is not None and due <= self.now and self.rng.random() < 0.8:
            self.step(Tick())

    def disturb(self) -> None:
        """Pause the daemon for a while, or set the calendar."""
        seconds = self.clocks.choice([1.0, 8.0, 40.0])
        if self.clocks.random() < 0.5:
            event: Event = Stalled(seconds, GRACE_SECONDS)
        else:
            seconds *= self.clocks.choice([1.0, -1.0])
            event = ClockSet(seconds)
        self.now += seconds
        self.step(event)
        self.step(Tick())

    def live(self, events: int) -> None:
        """Play `events` random events."""
        for cluster in self.inventory:
            self.step(ClusterSeen(cluster))
        if self.ruled:
            self.step(HalfLifeConfigured(self.ruler.choice([0.0, 10.0, 100.0])))
        choices: list[tuple[Callable[[], None], float]] = [
            (self.hear, self.hear_weight),
            (lambda: self.say(self._ask), 24),
            (lambda: self.say(self._release), 5 if self.provisioned < 0.5 else 15),
            (lambda: self.say(self._renew), 4),
            (lambda: self.say(self._cancel), 2),
            (lambda: self.say(self._inquire), 3),
            (lambda: self.say(self._flush), 0.3),
            (self.wait, 10),
            (self.engine, 2),
            (self.lose_session, 1),
            (self.work_on_the_fleet, 1.5),
        ]
        deeds, weights = [deed for deed, _ in choices], [weight for _, weight in choices]
        while len(self.trace) < events:
            if self.rng.random() < self.crash_rate:
                self.crash()
            self.rng.choices(deeds, weights)[0]()
            if self.operated and self.operator.random() < 0.03:
                self.say(self._cordon)
            if self.reserves and self.reserving.random() < 0.04:
                self.say(self._reserve)
            if self.ruled and self.ruler.random() < 0.03:
                self.say(self._rule)
            if self.rebuilds and self.rebuilding.random() < 0.05:
                self.work_on_the_fleet()
            if self.stalls and self.clocks.random() < 0.05:
                self.disturb()
            if not self.inbox and not self.consulting:
                self.witness.quiet()
        self.settle()

    def settle(self) -> None:
        """Play until nothing is pending: first answers, then deadlines, then backends."""
        for _ in range(10_000):
            if self.inbox:
                self.hear()
            elif self.consulting:
                request, consult = next(iter(self.consulting.items()))
                gone = Refusal(Code.POLICY_TIMEOUT, "The policy took longer than it may.")
                del self.consulting[request]
                self.step(ConsultFailed(request, consult.consultation, gone))
            elif self.turns or self.writing:
                self.commit()
            elif (due := self.allocator.next_deadline()) is not None:
                self.witness.quiet()
                self.now = max(self.now, due)
                self.step(Tick())
            elif self.allocator.state.leases:
                for lease in list(self.allocator.state.leases.values()):
                    self.engines.pop(lease.workload, None)
                    self.post(WorkloadStopped(lease.id, lease.fencing))
            else:
                self.witness.end()
                return
        raise LawBroken("a world must come to rest")


def run(seed: int, events: int, kind: type[World] = World) -> World:
    """Play one seed; an error says how to play it again."""
    world = kind(seed)
    try:
        world.live(events)
    except Exception as error:
        error.add_note(
            f"Seed {seed}, event {len(world.trace)} of {events}. Again: "
            f"python tests/simulation/play.py {seed} --events {events} --transcript story.txt"
        )
        raise
    return world


@cache
def play(seed: int) -> World:
    """Return the played world of a seed, which tests share and only read."""
    return run(seed, EVENTS)


def _lines(queue: WaitingQueue) -> object:
    lines = {each.key: (each.since, {*each.waiters}) for each in queue._lines.values()}
    return lines, queue._by_seniority
