"""`churn`: how policies fill a fleet while requests come and leases end.

`lab.churn` draws the arrivals and durations. The production allocator decides, and runs the policy
in this process. Requests without room are refused or wait. All policies get the same requests. A
run of one policy, trace, load and seed takes 10 to 40 seconds, and several times that with a queue.
"""

import gc
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from benchmarks import churn_report
from benchmarks.churn_report import ChurnRun
from benchmarks.packing import FULL, Consulting, openb, request
from moorage.core.allocator import Allocator
from moorage.core.state.facts import Ended, Fact, Granted
from moorage.core.turns.effects import Address, LeaseNews
from moorage.core.turns.events import Asked, Event, Tick
from moorage.lab import plots, trace
from moorage.lab.churn import MEAN_STAY_SECONDS, STAYS, Arrival, Churn, Stays, arrivals, size_of
from moorage.lab.errors import CommandError
from moorage.lab.trace import typical_of
from moorage.model import LeaseTerms, SessionId
from moorage.policy import Rule
from moorage_policies import catalog

LOADS: Final = (0.85, 0.95, 1.05, 1.2)
RULES: Final = ("fgd", "best_fit", "expected_fill_unpriced", "expected_fill")
UNPRICED: Final = "_unpriced"
"""Suffix of a policy's name in the options: the policy runs without prices."""
LEARNING: Final = "_learning"
"""Suffix of a policy's name in the options: the policy does not get the typical requests."""
WAIT_SECONDS: Final = 1e8
"""Seconds that requests may wait for room: longer than any run."""
SEEDS: Final = 5


@dataclass(frozen=True, slots=True)
class ChurnJob:
    """The comparison of one call of `churn`.

    Args:
        rules: Names of shipped policies, which may end with `UNPRICED` or `LEARNING`.
        loads: Values of `Churn.load`, each of which is run with all policies.
        stays: Values of `Churn.stays`, each of which is run with all policies.
        queued: Whether requests without room wait; otherwise they are refused.
        length: Length of the measurement, in mean durations of leases; see `Churn`.
        seeds: Number of runs of each kind.
        later: Another request file, from which requests are drawn in the second half of the
            measured time.
        plots: Files to draw to, `.png` or `.svg`.
    """

    rules: Sequence[str] = RULES
    loads: Sequence[float] = LOADS
    stays: Sequence[Stays] = STAYS[:1]
    queued: bool = False
    length: float = Churn(1.0).length
    seeds: int = SEEDS
    later: Path | None = None
    plots: Sequence[Path] = ()


def churn(
    nodes: Path | None = None,
    pods: Path | None = None,
    job: ChurnJob = ChurnJob(),
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Return means over seeds: a row per trace, stays, load and policy, and rows over all traces.

    Args:
        nodes: The node file of a trace.
        pods: A request file, in place of all request files beside the node file.
        job: The policies and loads to compare.
        progress: Called with a name of each run.

    Raises:
        TraceError: A file cannot be read as a trace.
        CommandError: No node file is given, its folder has no trace, or a policy does not exist.
    """
    if nodes is None:
        raise CommandError("churn needs --nodes, the node file of a trace")
    plots.check(job.plots)  # Check this before minutes of work.
    traces = [pods] if pods else sorted(nodes.parent.glob("pods_*.csv"))
    if not traces:
        raise CommandError(f"there is no pods_*.csv beside {nodes}")
    for policy in job.rules:
        _policy(policy)
    machines = trace.read_nodes(nodes)
    later = trace.read_pods(job.later) if job.later else ()
    read = {path.stem.removeprefix("pods_"): trace.read_pods(path) for path in traces}
    runs: list[ChurnRun] = []
    for seed in range(1, 1 + job.seeds):
        for name, wanted in read.items():
            for stays in job.stays:
                for load in job.loads:
                    how = Churn(load, stays, job.length)
                    for policy in job.rules:
                        progress(f"{name} {stays} {load:g} {policy} {seed}")
                        runs.append(
                            run(
                                name, policy, machines, wanted, how, seed,
                                queued=job.queued, later=later,
                            )
                        )  # fmt: skip
    rows = churn_report.rows(runs)
    churn_report.draw(job.plots, rows, queued=job.queued)
    return {"seeds": job.seeds, "queued": job.queued, "table": rows}


def _policy(policy: str) -> tuple[str, bool, dict[str, Any]]:
    """Return a policy's name, whether it gets the typical requests, and its parameters."""
    name = policy.removesuffix(LEARNING)
    described = name == policy
    more: dict[str, Any] = {"prices": False} if name.endswith(UNPRICED) else {}
    name = name.removesuffix(UNPRICED)
    known = name in catalog.shipped()
    if not known or not more.keys() <= catalog.document(name)["policy_parameters"].keys():
        raise CommandError(
            f"there is no policy {policy}; there are {', '.join(catalog.shipped())}, "
            f"expected_fill{UNPRICED}, and each of these with {LEARNING} at the end"
        )
    return name, described, more


def run(
    name: str,
    rule: str,
    nodes: Sequence[trace.TraceNode],
    pods: Sequence[trace.TracePod],
    how: Churn,
    seed: int,
    *,
    queued: bool = False,
    later: Sequence[trace.TracePod] = (),
) -> ChurnRun:
    """Play the arrivals and departures of one seed with a new policy instance.

    Args:
        name: Name of the trace.
        rule: Name of the policy, as in `ChurnJob`.
        nodes: The fleet.
        pods: The trace from which requests are drawn.
        how: How requests come and go.
        seed: Seed of all random numbers.
        queued: Whether requests without room wait, as in `ChurnJob`.
        later: The trace for the second half of the measured time, as `arrivals` takes it.

    Raises:
        ValueError: A request was refused for another reason than a lack of room.
    """
    shipped, described, more = _policy(rule)
    parameters = {**(typical_of(shipped, pods) if described else {}), **more}
    module = import_module(f"moorage_policies.{shipped}")
    played: Rule = module.AIOSv1PolicyRule(rule, {}, parameters)
    site, capacity = openb(nodes, seed), trace.capacity_milli(nodes)
    coming = arrivals(pods, capacity, how, seed, later)
    consulting = Consulting(played, site, parameters)
    running = _Running(consulting, site.allocator, how, WAIT_SECONDS if queued else 0.0)
    gc.collect()
    gc.freeze()  # There are many requests, and they stay in memory.
    try:
        for number, arrival in enumerate(coming):
            running.come(number, arrival, seed)
        counts = running.counts()
    finally:
        gc.unfreeze()
    return ChurnRun(
        trace=name,
        rule=rule,
        load=how.load,
        stays=how.stays,
        seed=seed,
        allocated_percent=running.held.percent(how.end),
        sizes=dict(counts),
        microseconds=1e6 * consulting.seconds / max(1, consulting.decisions),
    )


class _Running:
    """Plays the arrivals and departures of one run."""

    def __init__(
        self, consulting: Consulting, allocator: Allocator, how: Churn, wait_seconds: float
    ) -> None:
        self._consulting, self._allocator, self._how = consulting, allocator, how
        self._wait_seconds = wait_seconds
        self._open: dict[int, Arrival] = {}
        self._counts: dict[str, churn_report.SizeCount] = defaultdict(churn_report.SizeCount)
        self.held = HeldMilli(int(allocator.state.fleet.gpu_total.sum()), how.measured_from)

    def come(self, number: int, arrival: Arrival, seed: int) -> None:
        """Play all deadlines before an arrival, then send its request."""
        while (due := self._allocator.next_deadline()) is not None and due <= arrival.at:
            self._step(Tick(), due)
        self._open[number] = arrival
        terms = LeaseTerms(ttl_seconds=arrival.stay, wait_seconds=self._wait_seconds)
        ask = request(number, arrival.pod, seed, terms)
        self._step(Asked(Address(SessionId("trace"), number), ask), arrival.at)

    def _step(self, event: Event, now: float) -> None:
        for fact in self._consulting.step(event, now):
            self.held.note(fact, now)
        answers = self._consulting.answers
        while answers:
            number, answer = answers.popitem()
            arrival = self._open.pop(number)
            if isinstance(answer, LeaseNews):
                self._count(arrival, now, refused=False)
            elif answer.code in FULL:
                self._count(arrival, now, refused=True)
            else:
                raise ValueError(f"{arrival.pod.name}: {answer.code}: {answer.reason}")

    def _count(self, arrival: Arrival, now: float, *, refused: bool) -> None:
        if arrival.at < self._how.measured_from:
            return
        count = self._counts[size_of(arrival.pod.gpus, arrival.pod.gpu_milli)]
        count.requested += 1
        count.requested_milli += arrival.pod.demand_milli
        count.refused += refused
        count.refused_milli += refused * arrival.pod.demand_milli
        count.waited_stays += (now - arrival.at) / MEAN_STAY_SECONDS

    def counts(self) -> Mapping[str, churn_report.SizeCount]:
        """Return the outcomes of measured requests; open waits count until the end of the run."""
        while self._open:
            _, arrival = self._open.popitem()
            self._count(arrival, self._how.end, refused=False)
        return self._counts


@dataclass
class HeldMilli:
    """Computes the mean number of GPUs in use over time, from thousandths of GPUs.

    Args:
        since: When counting begins, in seconds.
    """

    capacity_milli: int
    since: float
    _milli: dict[str, int] = field(default_factory=dict[str, int])
    _now: int = 0
    _at: float = 0.0
    _sum: float = 0.0

    def note(self, fact: Fact, now: float) -> None:
        """Add the GPUs of a granted lease, or subtract those of an ended one."""
        if isinstance(fact, Granted):
            lease = fact.lease
            self._milli[lease.id] = sum(len(s.gpus) * s.gpu_milli for s in lease.placement)
            self._add(now, self._milli[lease.id])
        elif isinstance(fact, Ended):
            self._add(now, -self._milli.pop(fact.lease))

    def _add(self, now: float, milli: int) -> None:
        self._sum += self._now * max(0.0, now - max(self._at, self.since))
        self._at = now
        self._now += milli

    def percent(self, end: float) -> float:
        """Return the mean until `end`, in percent of the capacity."""
        self._add(end, 0)
        return 100 * self._sum / max(1.0, self.capacity_milli * (end - self.since))
