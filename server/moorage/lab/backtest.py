"""`moorage policy backtest`: replay a trace or a ledger with several policies.

Each policy has a site of its own, empty at first. The allocator's core, jailed cells, verification
and the queue are those of the daemon (`rehearsal`); the time is that of the timeline. The report
contains no time of this machine, so the same input gives the same bytes, if the policies read no
clock, take random numbers only from their seed, and meet their deadlines.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final, assert_never

from msgspec.structs import replace

from moorage.catalog.values import PolicyRecord
from moorage.core.state.facts import Refusal
from moorage.core.turns.effects import Advice, Information, LeaseNews, Response
from moorage.daemon.answers import refusal_of
from moorage.lab import plots, timeline, trace
from moorage.lab.churn import Churn, Stays, by_size, size_of
from moorage.lab.errors import CommandError, unknown
from moorage.lab.progress import Progress
from moorage.lab.rehearsal import Decision, Rehearsal
from moorage.lab.trace import typical_of
from moorage.model import Ask, Demand, Placement
from moorage.policy import Fleet
from moorage.protocol.faults import ServiceError
from moorage.records.json_values import JsonMapping, JsonObject
from moorage.sandbox.host.contract import Mode
from moorage_policies import catalog as shipped

SAMPLES: Final = 200
"""Approximate number of moments at which allocation and fragmentation are measured."""
DIFFERING_SHOWN: Final = 50
"""Maximum differently decided requests that a report names; further ones are only counted."""
DIGITS: Final = 6


@dataclass(frozen=True, slots=True)
class BacktestJob:
    """The requests to replay, and the policies.

    Args:
        rules: PolicyRule documents, or `{"shipped": name}`.
        nodes, pods: A trace to replay, unless `ledger` is given.
        ledger: A daemon's data directory.
        arrive: GPU demand as a multiple of the capacity, unless `timed` or `churn` is set.
        seed: Seed of all random choices.
        limit: The largest number of requests to replay; None: all.
        timed: Whether a trace is replayed by its own times.
        churn: The load if requests of a trace arrive and end (`lab.churn`); 0: requests do not end.
        stays: The distribution of the requests' durations.
        wait_seconds: How long requests of a trace may wait.
        plots: Files to draw to, `.png` or `.svg`.
        mode: The isolation of policies, as in `moored serve --sandbox`.
    """

    rules: list[JsonObject]
    nodes: str = ""
    pods: str = ""
    ledger: str = ""
    arrive: float = 1.3
    seed: int = 42
    limit: int | None = None
    timed: bool = False
    churn: float = 0.0
    stays: Stays = "memoryless"
    wait_seconds: float = 0.0
    plots: list[str] = field(default_factory=list[str])
    mode: Mode = "jail"
    progress: bool = False


@dataclass(slots=True)
class SizeOutcome:
    """Results for requests of one size, such as `share` (a part of one GPU) or `8 GPUs`."""

    asked: int = 0
    granted: int = 0
    waited_seconds_mean: float = 0.0


@dataclass(slots=True)
class BacktestRun:
    """One policy's results.

    The results exclude requests before the fleet was in steady state (`Timeline.measured_from`).

    Attributes:
        name: The policy's URI.
        asked, granted: Numbers of requests.
        allocation_percent: Allocated percentage of the fleet's GPU capacity at the last request.
        allocation_percent_mean: Mean of the allocated percentage over the samples.
        fragmentation_percent: Percentage of the fleet's GPU capacity that is free, but that typical
            requests cannot use, at the last request.
        waited: Number of requests that were granted after a wait.
        waited_seconds_mean: Mean wait of all granted requests.
        refused_percent: Percentage of the requested GPU capacity whose requests got no lease.
        sizes: For each size of request, how many were asked and granted, and the mean wait of
            granted requests.
        refusals: Number of requests without a lease, by code.
        samples: Allocation and fragmentation while the requests came.
    """

    name: str
    asked: int = 0
    granted: int = 0
    allocation_percent: float = 0.0
    allocation_percent_mean: float = 0.0
    fragmentation_percent: float = 0.0
    waited: int = 0
    waited_seconds_mean: float = 0.0
    refused_percent: float = 0.0
    sizes: dict[str, SizeOutcome] = field(default_factory=dict[str, "SizeOutcome"])
    refusals: dict[str, int] = field(default_factory=dict[str, int])
    samples: list[plots.PlotSample] = field(default_factory=list[plots.PlotSample])


async def backtest(job: BacktestJob) -> JsonObject:
    """Replay the requests, draw plots, and return the outcome as JSON values.

    Raises:
        CommandError, TraceError, OSError: The trace, the ledger or a policy cannot be read.
        JailError: This machine has no jail.
    """
    paths = [Path(each) for each in job.plots]
    plots.check(paths)  # Before minutes of work.
    if not job.rules:
        raise CommandError("a backtest needs at least one policy")
    line = await _line(job)
    runs: list[BacktestRun] = []
    decided: list[dict[str, tuple[str, Placement]]] = []
    for policy in job.rules:
        run, outcomes = await _play(job, policy, line)
        twins = sum(other.name.partition(" #")[0] == run.name for other in runs)
        run.name += f" #{twins + 1}" if twins else ""
        runs.append(run)
        decided.append(outcomes)
    source = Path(job.pods).name if job.pods else f"the history of {job.ledger}"
    title = f"Backtest of {len(line.asks)} requests from {source}"
    plots.draw(paths, {run.name: run.samples for run in runs}, title)
    return {
        "source": line.source,
        "notes": list(line.notes),
        "rules": [_description(run) for run in runs],
        "differing": [
            _differing(runs[0].name, decided[0], run.name, outcomes)
            for run, outcomes in zip(runs[1:], decided[1:], strict=True)
        ],
    }


async def _line(job: BacktestJob) -> timeline.Timeline:
    if job.churn and (job.ledger or job.timed):
        raise CommandError("churn draws its own times: omit the ledger and `timed`")
    if job.ledger:
        return await timeline.of_ledger(Path(job.ledger), seed=job.seed, limit=job.limit)
    return timeline.of_trace(
        Path(job.nodes),
        Path(job.pods),
        arrive=job.arrive,
        seed=job.seed,
        limit=job.limit,
        timed=job.timed,
        wait_seconds=job.wait_seconds,
        churn=Churn(job.churn, job.stays) if job.churn else None,
    )


async def _play(
    job: BacktestJob, policy: JsonObject, line: timeline.Timeline
) -> tuple[BacktestRun, dict[str, tuple[str, Placement]]]:
    """Replay the whole timeline with one policy."""
    async with Rehearsal(job.mode) as rehearsal:
        for document in line.documents:
            await rehearsal.add_cluster(document)
        try:
            record = await rehearsal.upload(_document(policy, line))
        except ServiceError as error:
            raise CommandError(f"{_name(policy)}: {error.reason}") from error
        run = BacktestRun(record.ref.uri)
        changes = iter(line.inventory)
        change = next(changes, None)
        decisions: list[tuple[float, Decision]] = []
        typical = trace.typical_classes(line.pods)
        every = max(len(line.asks) // SAMPLES, 1)
        demanded = 0
        shown = Progress(job.progress, f"replaying {record.ref.uri}", len(line.asks))
        for number, (at, ask) in enumerate(line.asks):
            shown.step()
            while change is not None and change[0] <= at:
                await rehearsal.pass_to(change[0])
                await rehearsal.step(change[1])
                change = next(changes, None)
            await rehearsal.pass_to(at)
            decisions.append((at, await _decide(rehearsal, record, ask)))
            demanded += _gpu_milli(ask)
            if at >= line.measured_from and (number % every == 0 or number == len(line.asks) - 1):
                fleet = rehearsal.allocator.state.fleet
                run.samples.append(_sample(fleet, typical, at, demanded))
        shown.end()
        await _let_wait(rehearsal)
    _sum_up(run, [each for each in decisions if each[0] >= line.measured_from])
    return run, {str(decision.ask.id): _outcome(decision.answer) for _, decision in decisions}


async def _decide(rehearsal: Rehearsal, record: PolicyRecord, ask: Ask) -> Decision:
    """Decide a request as a server would: apply the policy's schemas, then call the core."""
    ask = replace(ask, policy=record.ref)
    try:
        if record.schemas is not None:
            ask = record.schemas.completed(ask)
    except ServiceError as error:
        return Decision(ask, refusal_of(error))
    return await rehearsal.ask(ask)


async def _let_wait(rehearsal: Rehearsal) -> None:
    """Advance the time until no request waits."""
    waiting = rehearsal.allocator.state.waiting
    while waiting:
        await rehearsal.pass_to(max(waiter.deadline for waiter in waiting.values()))


def _document(policy: JsonObject, line: timeline.Timeline) -> JsonObject:
    name = policy.get("shipped")
    if name is None:
        return policy
    if name not in shipped.shipped():
        raise CommandError(
            f"{unknown(name, shipped.shipped())} To name a policy on a server, give its URI, or an "
            f"alias such as {name}:stable"
        )
    return shipped.document(name, typical_of(name, line.pods))


def _name(policy: JsonMapping) -> str:
    return str(
        policy.get("shipped") or policy.get("policy_rule_uri") or policy.get("name") or "a policy"
    )


def _size(ask: Ask) -> str:
    demand = ask.demand
    return size_of(demand.gpus, demand.gpu_milli) if demand is not None else size_of(0, 0)


def _gpu_milli(ask: Ask) -> int:
    demand = ask.demand
    return 0 if demand is None else demand.nodes * demand.gpus * demand.gpu_milli


def _sample(
    fleet: Fleet, typical: Sequence[JsonMapping], at: float, demanded: int
) -> plots.PlotSample:
    total, free = int(fleet.gpu_total.sum()), int(fleet.gpu_free.sum())
    share = 100 / total if total else 0.0
    return plots.PlotSample(
        at_seconds=at,
        demanded_percent=round(share * demanded, DIGITS),
        allocation_percent=round(share * (total - free), DIGITS),
        fragmentation_percent=round(share * fragmentation_milli(fleet, typical), DIGITS),
    )


def fragmentation_milli(fleet: Fleet, typical: Sequence[JsonMapping]) -> float:
    """Return the free thousandths of GPUs that typical requests cannot use, on average.

    The measure of "Beware of Fragmentation" (USENIX ATC'23). If a request does not fit on a node,
    all free GPU milli there are fragmented; otherwise the free milli of GPUs that the request
    cannot use.

    Args:
        fleet: The fleet to measure.
        typical: Classes of requests: `cpu_milli`, `gpus`, `gpu_milli`, `models`, `weight`.
    """
    free, weights, lost = int(fleet.gpu_free.sum()), 0, 0
    for kind in typical:
        demand = Demand(
            gpus=kind["gpus"],
            gpu_milli=kind["gpu_milli"],
            models=tuple(kind["models"]),
            cpu_milli=kind["cpu_milli"],
        )
        usable = 0
        if demand.gpus:
            rows = fleet.feasible(demand)
            usable = int((fleet.gpu_free * fleet.fitting_gpus(demand))[rows].sum())
        weights += kind["weight"]
        lost += kind["weight"] * (free - usable)
    return lost / weights if weights else 0.0


def _sum_up(run: BacktestRun, decisions: Sequence[tuple[float, Decision]]) -> None:
    refusals: Counter[str] = Counter()
    waits: list[float] = []
    milli = granted_milli = 0
    for at, decision in decisions:
        run.asked += 1
        milli += _gpu_milli(decision.ask)
        size = run.sizes.setdefault(_size(decision.ask), SizeOutcome())
        size.asked += 1
        match decision.answer:
            case LeaseNews(lease):
                waits.append(lease.granted_at - at)
                granted_milli += _gpu_milli(decision.ask)
                size.granted += 1
                size.waited_seconds_mean += waits[-1]
            case Refusal(code=code):
                refusals[code.value] += 1
            case Advice() | Information() | None:
                refusals["no_lease"] += 1
            case _:
                assert_never(decision.answer)
    run.granted = len(waits)
    run.waited = sum(wait > 0 for wait in waits)
    run.waited_seconds_mean = round(sum(waits) / len(waits), DIGITS) if waits else 0.0
    run.refusals = dict(sorted(refusals.items()))
    run.refused_percent = round(100 * (1 - granted_milli / milli), DIGITS) if milli else 0.0
    run.sizes = {size: run.sizes[size] for size in sorted(run.sizes, key=by_size)}
    for size in run.sizes.values():
        size.waited_seconds_mean = round(size.waited_seconds_mean / max(1, size.granted), DIGITS)
    if run.samples:
        run.allocation_percent = run.samples[-1].allocation_percent
        run.fragmentation_percent = run.samples[-1].fragmentation_percent
        mean = sum(sample.allocation_percent for sample in run.samples) / len(run.samples)
        run.allocation_percent_mean = round(mean, DIGITS)


def _outcome(answer: Response | None) -> tuple[str, Placement]:
    match answer:
        case LeaseNews(lease):
            return "granted", lease.placement
        case Refusal(code=code):
            return code.value, ()
        case Advice() | Information() | None:
            return "no_lease", ()
        case _:
            assert_never(answer)


def _differing(
    base: str,
    first: Mapping[str, tuple[str, Placement]],
    name: str,
    second: Mapping[str, tuple[str, Placement]],
) -> JsonObject:
    """Return the requests that two policies decided differently."""
    names = [request for request in first if first[request] != second[request]]
    granted = [request for request in names if "granted" in (first[request][0], second[request][0])]
    return {
        "rules": [base, name],
        "asks": len(names),
        "placed_elsewhere": sum(first[r][0] == second[r][0] == "granted" for r in names),
        "granted_by_first_only": sum(second[r][0] != "granted" == first[r][0] for r in granted),
        "granted_by_second_only": sum(first[r][0] != "granted" == second[r][0] for r in granted),
        "first_of_them": [
            {"ask": request, base: _place(first[request]), name: _place(second[request])}
            for request in names[:DIFFERING_SHOWN]
        ],
    }


def _place(outcome: tuple[str, Placement]) -> str:
    code, placement = outcome
    where = (f"{share.cluster_id}/{share.node_id} {','.join(share.gpus)}" for share in placement)
    return "; ".join(where) or code


def _description(run: BacktestRun) -> JsonObject:
    return {
        "rule": run.name,
        "asked": run.asked,
        "granted": run.granted,
        "allocation_percent": run.allocation_percent,
        "allocation_percent_mean": run.allocation_percent_mean,
        "fragmentation_percent": run.fragmentation_percent,
        "waited": run.waited,
        "waited_seconds_mean": run.waited_seconds_mean,
        "refused_percent": run.refused_percent,
        "sizes": {size: asdict(each) for size, each in run.sizes.items()},
        "refusals": run.refusals,
        "samples": [
            [s.at_seconds, s.demanded_percent, s.allocation_percent, s.fragmentation_percent]
            for s in run.samples
        ],
    }
