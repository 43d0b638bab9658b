"""`waiting`: how long jobs of a real trace wait, by the order of the queue.

The jobs of a trace arrive and last as recorded, and request leases from the production allocator.
The fleet is small enough that jobs wait. Each order is played with backfill, as in the daemon's
queue, and strictly, so that no job starts before the job ahead of it. The orders are:

- first_come: the oldest job is first.
- largest: jobs with more GPUs have the higher priority.
- fair_share: jobs of the virtual cluster that holds the fewest GPUs are first.

The order `largest` is also played with preemption: a job that has run for an hour gives way to a
job with more GPUs. The preempted job loses its work, and requests its whole time again.

Trace: Jeon et al., "Analysis of Large-Scale Multi-Tenant GPU Clusters for DNN Training Workloads",
USENIX ATC 2019 (Microsoft Philly).
"""

import heapq
import time
from bisect import bisect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from rich.table import Table

from benchmarks.churn import HeldMilli
from benchmarks.expectations import METHODS, calibrate
from benchmarks.packing import Consulting
from benchmarks.waiting_jobs import (
    GPUS_EACH,
    SIZES,
    WAIT_SECONDS,
    Job,
    fleet_of,
    needs,
    nodes_for,
    policy_of,
    read_jobs,
)
from moorage.core.state.facts import Ended, Granted
from moorage.core.turns.effects import Address, LeaseNews
from moorage.core.turns.events import Asked, Event, Tick
from moorage.lab import plots
from moorage.lab.errors import CommandError
from moorage.model import Ask, LeaseTerms, PolicyRef, RequestId, SessionId, Tenant
from moorage_policies import catalog

LOAD: Final = 0.9
"""GPU seconds that the jobs request, as a part of the fleet's GPU seconds while jobs arrive."""
RULE: Final = "best_fit"
ORDERS: Final = ("first_come", "largest", "fair_share")
Way = Literal["backfill", "strictly", "preemption"]
"""How a queue is played: with backfill, without it, or with backfill and preemption."""
WAYS: Final[Mapping[str, tuple[Way, ...]]] = {
    "first_come": ("backfill", "strictly"),
    "largest": ("backfill", "strictly", "preemption"),
    "fair_share": ("backfill", "strictly"),
}
RUNTIME_SECONDS_MIN: Final = 3_600.0
"""Seconds for which a job runs before it may be preempted."""
DAY_SECONDS: Final = 86_400.0
WAITS: Final = ("wait_mean_seconds", "wait_p90_seconds")


@dataclass
class Played:
    """The outcomes of the jobs under one order.

    Attributes:
        waits: Seconds from submission to lease, by the job's number.
        utilisation_percent: GPU seconds held while jobs arrived, in percent of the fleet's.
        contended: GPU seconds that each virtual cluster held while all of them had waiting jobs.
        lost_gpu_hours: GPU hours of work that preempted jobs lost.
        seconds: Duration of the run, in seconds.
    """

    waits: dict[int, float] = field(default_factory=dict[int, float])
    utilisation_percent: float = 0.0
    contended: dict[str, float] = field(default_factory=dict[str, float])
    lost_gpu_hours: float = 0.0
    seconds: float = 0.0


def waiting(
    pods: Path | None = None,
    load: float = LOAD,
    rule: str = RULE,
    draw: Sequence[Path] = (),
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Return a row for each order, with backfill and without.

    Args:
        pods: The trace: `timestamp`, `duration` in seconds, `num_gpus`, `cluster`.
        load: GPU seconds that the jobs request, as a part of the fleet's.
        rule: The shipped policy that places the jobs.
        draw: Files for a picture, `.png` or `.svg`.
        progress: Called with the name of each run.

    Raises:
        CommandError: The trace is missing or cannot be read, or no job requests GPUs.
    """
    if pods is None:
        raise CommandError("waiting needs --pods, the jobs of a trace (timestamp,duration,…)")
    if rule not in catalog.shipped():
        raise CommandError(f"there is no policy {rule}; there are {', '.join(catalog.shipped())}")
    if load <= 0:
        raise CommandError(f"--load: expected a number above 0, got {load:g}")
    plots.check(draw)
    jobs = read_jobs(pods)
    nodes = nodes_for(jobs, load)
    rows = []
    for order, way in [(name, way) for name in ORDERS for way in WAYS[name]]:
        progress(f"{order}, {way}")
        played = play(jobs, nodes, rule, order, way)
        named = {"order": order, "backfill": way != "strictly", "preemption": way == "preemption"}
        rows.append(named | _row(jobs, played))
    _draw(draw, rows)
    progress("expected times")
    figures = {"jobs": len(jobs), "nodes": nodes, "load": load, "rule": rule, "table": rows}
    return figures | {"expected": calibrate(jobs, nodes, rule)}


def play(jobs: Sequence[Job], nodes: int, rule: str, order: str, way: Way = "backfill") -> Played:
    """Play arrivals, waits and ends of the jobs under one queue order.

    Args:
        jobs: The jobs in the order of their submission.
        nodes: Number of nodes of the fleet.
        rule: The shipped policy that places the jobs.
        order: One of `ORDERS`.
        way: How the queue is played.

    Raises:
        ValueError: A job was refused.
    """
    running, started = _Running(jobs, nodes, rule, order, way), time.perf_counter()
    for number, job in enumerate(jobs):
        running.until(job.at)
        running.come(number)
    held = running.held.percent(jobs[-1].at)
    running.until(float("inf"))
    seconds = time.perf_counter() - started
    return Played(running.waits, held, running.contended, running.lost / 3600, seconds)


class _Running:
    """Plays one run of the jobs."""

    def __init__(self, jobs: Sequence[Job], nodes: int, rule: str, order: str, way: Way) -> None:
        site = fleet_of(nodes)
        self._jobs, self._order = jobs, order
        self._allocator = site.allocator
        self._consulting = Consulting(policy_of(rule), site)
        self._line: _Line | None = _Line(self) if way == "strictly" else None
        self._preempts = way == "preemption"
        self._submissions = Counter[int]()
        self._again: list[int] = []
        self.lost = 0.0
        self.waits: dict[int, float] = {}
        self.contended = dict.fromkeys(sorted({job.cluster for job in jobs}), 0.0)
        self._has = dict.fromkeys(self.contended, 0)
        self._wants = dict.fromkeys(self.contended, 0)
        self._at = 0.0
        self.held = HeldMilli(int(site.allocator.state.fleet.gpu_total.sum()), 0.0)

    def until(self, moment: float) -> None:
        """End the leases that are due until a given time."""
        while (due := self._allocator.next_deadline()) is not None and due <= moment:
            self._step(Tick(), due)

    def come(self, number: int) -> None:
        self._pass(self._jobs[number].at)
        self._wants[self._jobs[number].cluster] += 1
        if self._line is None:
            self.put(number, self._jobs[number].at)
        else:
            self._line.add(number)
            self._line.advance(self._jobs[number].at)

    def put(self, number: int, now: float) -> None:
        """Request the lease of a job."""
        job, key = self._jobs[number], SessionId("trace")
        self._submissions[number] += 1
        self._step(Asked(Address(key, number), self._ask(number, job)), now)

    def holds(self, tenant: str) -> int:
        """Return the GPUs that a tenant holds now, in thousandths."""
        return self._allocator.state.accounts.amounts((Tenant(tenant), None))[0]

    def rank(self, number: int) -> tuple[int, int]:
        """Return the sort key of a waiting job among its tenant's jobs; the smallest is next."""
        return (-self._priority(self._jobs[number]), number)

    def tenant(self, number: int) -> str:
        """Return the tenant of a job."""
        return self._jobs[number].cluster if self._order == "fair_share" else "all"

    def _priority(self, job: Job) -> int:
        return bisect(SIZES, job.gpus) if self._order == "largest" else 0

    def _ask(self, number: int, job: Job) -> Ask:
        return Ask(
            id=RequestId(f"{number}.{self._submissions[number]}"),
            tenant=Tenant(self.tenant(number)),
            policy=PolicyRef("waiting:1.0-trial", "0" * 64),
            demand=needs(job.gpus),
            terms=LeaseTerms(
                ttl_seconds=job.seconds,
                wait_seconds=WAIT_SECONDS,
                priority=self._priority(job),
                preemptible=self._preempts,
                runtime_seconds_min=RUNTIME_SECONDS_MIN,
            ),
            inputs={},
            seed=number,
        )

    def fits(self, number: int) -> bool:
        return self._allocator.feasibility.fits(needs(self._jobs[number].gpus), None, ())

    def _note(self, request: RequestId, sign: int) -> None:
        job = self._jobs[_number(request)]
        self._has[job.cluster] += sign * job.gpus
        self._wants[job.cluster] -= sign > 0

    def _pass(self, now: float) -> None:
        """If all virtual clusters have waiting jobs, count their GPU time since the last call."""
        if all(self._wants.values()):
            for cluster, gpus in self._has.items():
                self.contended[cluster] += gpus * (now - self._at)
        self._at = now

    def _step(self, event: Event, now: float) -> None:
        self._pass(now)
        for fact in self._consulting.step(event, now):
            self.held.note(fact, now)
            if isinstance(fact, Granted):
                self._note(fact.lease.id, 1)
            elif isinstance(fact, Ended):
                self._note(fact.lease, -1)
                if fact.reason.startswith("preempted"):
                    self._lose(_number(fact.lease), now)
        answers = self._consulting.answers
        while answers:
            number, answer = answers.popitem()
            if not isinstance(answer, LeaseNews):
                raise ValueError(f"job {number}: {answer.code}: {answer.reason}")  # noqa: TRY004  # As in `churn`.
            self.waits[number] = now - self._jobs[number].at
        while self._again:
            self.put(self._again.pop(), now)
        if self._line is not None:
            self._line.advance(now)

    def _lose(self, number: int, now: float) -> None:
        """Queue a preempted job again."""
        job = self._jobs[number]
        self._wants[job.cluster] += 1
        self.lost += job.gpus * (now - job.at - self.waits[number])
        self._again.append(number)


def _number(request: RequestId) -> int:
    return int(request.partition(".")[0])


class _Line:
    """The queue of the way `strictly`: it withholds all jobs from the allocator until they fit."""

    def __init__(self, running: _Running) -> None:
        self._running = running
        self._of: dict[str, list[tuple[int, int]]] = {}
        self._advances = False

    def add(self, number: int) -> None:
        """Add a job to the queue of its tenant."""
        line = self._of.setdefault(self._running.tenant(number), [])
        heapq.heappush(line, self._running.rank(number))

    def advance(self, now: float) -> None:
        """Request leases for the first jobs until one does not fit."""
        if self._advances:
            return  # A job is being placed: the loop below continues.
        self._advances = True
        while ready := [each for each in self._of if self._of[each]]:
            tenant = min(ready, key=lambda each: (self._running.holds(each), self._of[each][0]))
            _, number = self._of[tenant][0]
            if not self._running.fits(number):
                break
            heapq.heappop(self._of[tenant])
            self._running.put(number, now)
        self._advances = False


def _row(jobs: Sequence[Job], played: Played) -> dict[str, Any]:
    waits = np.array([played.waits[number] for number in range(len(jobs))])
    sizes = np.array([SIZES[bisect(SIZES, job.gpus) - 1] for job in jobs])
    held = played.contended
    wait = {"all": waits} | {f"{size} GPU": waits[sizes == size] for size in SIZES}
    return {
        "wait_mean_seconds": {k: float(v.mean()) for k, v in wait.items() if len(v)},
        "wait_p90_seconds": {k: float(np.quantile(v, 0.9)) for k, v in wait.items() if len(v)},
        "utilisation_percent": played.utilisation_percent,
        "contended_gpu_hours": {k: v / 3600 for k, v in held.items()},
        "fairness": min(held.values()) / max(*held.values(), 1.0),
        "lost_gpu_hours": played.lost_gpu_hours,
        "seconds": played.seconds,
    }


def tables(figures: Mapping[str, Any]) -> tuple[Table, Table]:
    """Return the figures as tables: waits in days, and errors of the estimates."""
    rows = figures["table"]
    sizes = list(rows[0]["wait_mean_seconds"])
    made = Table(
        title=f"{figures['jobs']} jobs on {figures['nodes']} nodes of {GPUS_EACH} GPUs, load "
        f"{figures['load']:g}, {figures['rule']}; {sum(row['seconds'] for row in rows):.0f} s",
        caption="waits in days, mean / p90, by GPUs; fairness: while all virtual clusters wait,"
        " the least GPU time of one, divided by the most; lost: GPU days of preempted jobs",
    )
    for heading in ("order", "backfill", *sizes, "in use %", "fairness", "lost"):
        made.add_column(heading, overflow="fold")
    for row in rows:
        waits = [
            " / ".join(f"{row[key][size] / DAY_SECONDS:.1f}" for key in WAITS) for size in sizes
        ]
        backfill = "and preemption" if row["preemption"] else "yes" if row["backfill"] else "no"
        used, fair = f"{row['utilisation_percent']:.1f}", f"{row['fairness']:.2f}"
        lost = f"{row['lost_gpu_hours'] / 24:.0f}"
        made.add_row(row["order"], backfill, *waits, used, fair, lost)
    return made, _expectations(figures["expected"])


def _expectations(found: Mapping[str, Any]) -> Table:
    made = Table(
        title=f"Estimates at submission for {found['waiting']} jobs that had to wait; errors of"
        f" the {found['compared']} that all methods estimate, whose median wait is"
        f" {found['wait_median_seconds'] / 3600:.1f} h",
        caption="history: `expected_at`, which learns from ended leases; deadlines: the same"
        " without learning; recent: the median wait of the last jobs of similar size",
    )
    for heading in ("by", "estimated %", "median error, h", "p90 error, h"):
        made.add_column(heading)
    for each in METHODS:
        median, p90 = (found[f"error_{kind}_seconds"][each] / 3600 for kind in ("median", "p90"))
        made.add_row(each, f"{100 * found['estimated'][each]:.0f}", f"{median:.2f}", f"{p90:.2f}")
    return made


def _name(row: Mapping[str, Any]) -> str:
    if row["preemption"]:
        return f"{row['order']}, preemption"
    return f"{row['order']}{'' if row['backfill'] else ', strict'}"


def _draw(paths: Sequence[Path], rows: Sequence[Mapping[str, Any]]) -> None:
    """Draw the mean waits by size, and the use of the fleet below, with a bar for each order."""
    if not paths:
        return
    figure, (above, below) = plots.panels()
    names = [_name(row) for row in rows]
    sizes = list(rows[0]["wait_mean_seconds"])
    wide = 0.8 / len(rows)
    for number, (name, row) in enumerate(zip(names, rows, strict=True)):
        places = [place + (number + 0.5) * wide - 0.4 for place in range(len(sizes))]
        days = [row[WAITS[0]][size] / DAY_SECONDS for size in sizes]
        above.bar(places, days, wide, label=name)
    above.set_xticks(range(len(sizes)), sizes)
    above.set_yscale("log")
    above.set_ylabel("mean wait, days")
    above.legend(fontsize="small")
    below.bar(range(len(rows)), [row["utilisation_percent"] for row in rows])
    below.set_xticks(range(len(rows)), names, fontsize="small")
    below.set_ylabel("GPUs in use, %")
    plots.save(figure, paths)
