"""`moored bench placement`: the shipped rules against the figures published for them.

The six rules of "Beware of Fragmentation" (USENIX ATC'23) over the openb traces, by the paper's
protocol: requests in random order up to 1.3 times the capacity, none ends, ten seeds. Every request
goes through the production allocator (see `packing`). Takes about six seconds per run and seed.
"""

import csv
import statistics
from collections.abc import Callable, Sequence
from importlib import import_module
from math import sqrt
from pathlib import Path
from typing import Any, Final

import msgspec

from moorage.policy import Rule
from moorage.trials import packing, replay, trace
from moorage.trials.process import TrialError

PUBLISHED: Final = "published_allocation.csv"
"""Beside the node file: trace, policy, runs, mean and deviation at 130 %, mean at 100 %."""
PUBLISHED_AS: Final = {
    "random": "Random",
    "dot_product": "DotProd",
    "gpu_clustering": "GpuClustering",
    "gpu_packing": "GpuPacking",
    "best_fit": "BestFit",
    "fgd": "FGD",
}
SEED: Final = 42
SEEDS: Final = 10
ARRIVE: Final = 1.3
POINTS_ALLOWED: Final = 0.3
"""A mean may be this far from the published one, or two standard errors of their difference."""


class Comparison(msgspec.Struct, frozen=True):
    """One rule on one trace: GPUs in use, in percent of the cluster.

    Attributes:
        trace: The trace.
        rule: The rule, by the name it ships under.
        published: The published mean, when 130 % of the capacity have arrived.
        published_deviation: Its standard deviation, over `published_runs` runs.
        published_at_100: The published mean when 100 % have arrived.
        reached: Our mean at 130 %.
        deviation: Its standard deviation, over `runs` seeds.
        reached_at_100: Our mean at 100 %.
        allowed: How far the means may be apart.

    """

    trace: str
    rule: str
    published: float
    published_deviation: float
    published_at_100: float
    published_runs: int
    reached: float
    deviation: float
    reached_at_100: float
    runs: int
    allowed: float

    @property
    def difference(self) -> float:
        """Our mean less the published one, in points."""
        return self.reached - self.published

    @property
    def agrees(self) -> bool:
        """Whether the means are as near to each other as they must be."""
        return abs(self.difference) <= self.allowed


def compare(
    nodes: Path,
    pods: Sequence[Path],
    rules: Sequence[str] = tuple(PUBLISHED_AS),
    seeds: Sequence[int] = range(SEED, SEED + SEEDS),
    progress: Callable[[str], None] = lambda _: None,
) -> list[Comparison]:
    """Run rules over traces and compare each mean with the published one.

    Args:
        nodes: The node file; `PUBLISHED` lies beside it.
        pods: Request files, `pods_<trace>.csv`.
        rules: Names of shipped rules that have been published.
        seeds: Of the order of nodes and requests; one run each.
        progress: Called with what is being run.

    Raises:
        TraceError: A file cannot be read as a trace.
        TrialError: A trace has no published figures.

    """
    machines, known = trace.read_nodes(nodes), _published(nodes.with_name(PUBLISHED))
    comparisons: list[Comparison] = []
    for path in pods:
        name, requests = path.stem.removeprefix("pods_"), trace.read_pods(path)
        for rule in rules:
            published = known.get((name, PUBLISHED_AS[rule]))
            if published is None:
                raise TrialError(f"{PUBLISHED} has no {PUBLISHED_AS[rule]} on the trace {name!r}")
            runs: list[packing.Packing] = []
            for seed in seeds:
                progress(f"{name} {rule} {seed}")
                runs.append(run(rule, machines, requests, seed))
            comparisons.append(_comparison(name, rule, published, runs))
    return comparisons


def run(
    rule: str, nodes: Sequence[trace.TraceNode], pods: Sequence[trace.TracePod], seed: int
) -> packing.Packing:
    """Play one seed of the protocol with a fresh rule."""
    parameters = replay.typical_of(rule, pods)
    played: Rule = import_module(f"moorage_policies.{rule}").AIOSv1PolicyRule(rule, {}, parameters)
    order = trace.arrivals(pods, trace.capacity_milli(nodes), ARRIVE, seed)
    return packing.pack(played, packing.openb(nodes, seed), order, parameters, seed)


def placement(
    nodes: Path | None = None,
    pods: Path | None = None,
    seeds: int = SEEDS,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Return the whole table: six rules over all traces beside the node file, or over one.

    Raises:
        TrialError: No node file is given, or there are no traces beside it.

    """
    if nodes is None:
        raise TrialError(f"placement needs --nodes, a node file with {PUBLISHED} beside it")
    traces = [pods] if pods else sorted(nodes.parent.glob("pods_*.csv"))
    if not traces:
        raise TrialError(f"there is no pods_*.csv beside {nodes}")
    table = compare(nodes, traces, seeds=range(SEED, SEED + seeds), progress=progress)
    return {
        "seeds": seeds,
        "agree": sum(each.agrees for each in table),
        "of": len(table),
        "table": [
            {**msgspec.to_builtins(each), "difference": each.difference, "agrees": each.agrees}
            for each in table
        ],
    }


def _published(path: Path) -> dict[tuple[str, str], dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return {(row["trace"], row["policy"]): row for row in csv.DictReader(file)}


def _comparison(
    name: str, rule: str, published: dict[str, str], runs: Sequence[packing.Packing]
) -> Comparison:
    percents = [each.allocated_percent for each in runs]
    deviation = statistics.stdev(percents) if len(percents) > 1 else 0.0
    known_deviation = float(published["allocated_percent_at_130_stdev"])
    known_runs = int(published["runs"])
    # The deviation of a single run says nothing; the published one is the better guess.
    own = (deviation if len(runs) > 1 else known_deviation) ** 2 / len(runs)
    error = sqrt(known_deviation**2 / known_runs + own)
    return Comparison(
        trace=name,
        rule=rule,
        published=float(published["allocated_percent_at_130_mean"]),
        published_deviation=known_deviation,
        published_at_100=float(published["allocated_percent_at_100_mean"]),
        published_runs=known_runs,
        reached=statistics.fmean(percents),
        deviation=deviation,
        reached_at_100=statistics.fmean(each.allocated_percent_at_100 for each in runs),
        runs=len(runs),
        allowed=max(POINTS_ALLOWED, 2 * error),
    )
