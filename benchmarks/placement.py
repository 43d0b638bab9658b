"""`placement`: the shipped policies compared with their published figures.

The six policies of "Beware of Fragmentation" (USENIX ATC'23) place the requests of the openb
traces, as in the paper: ten seeds, the paper's orders of requests and nodes, and requests for 1.3
times the capacity. No lease ends. The production allocator decides (see `packing`). A run of one
policy, trace and seed takes about six seconds.

Without published figures, as for `expected_fill`, only the measured figures are shown.
"""

import csv
import statistics
from collections.abc import Callable, Sequence
from importlib import import_module
from math import sqrt
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from benchmarks import packing
from benchmarks.published_order import read_published_order
from moorage.lab import trace
from moorage.lab.errors import CommandError
from moorage.lab.trace import typical_of
from moorage.policy import Rule

PUBLISHED: Final = "published_allocation.csv"
"""File of published figures beside the node file. Its columns are the trace, the policy, and the
runs with their mean, standard deviation, and mean at 100 %."""
PUBLISHED_AS: Final = {
    "random": "Random",
    "dot_product": "DotProd",
    "gpu_clustering": "GpuClustering",
    "gpu_packing": "GpuPacking",
    "best_fit": "BestFit",
    "fgd": "FGD",
}
EXPECTED_FILL: Final[dict[str, dict[str, Any]]] = {
    "expected_fill": {},
    "expected_fill_unpriced": {"prices": False},
}
"""Parameters of the policies that have no published figures, by the name on the command line."""
SEED: Final = 42
SEEDS: Final = 10
ARRIVE: Final = 1.3
POINTS_ALLOWED: Final = 0.3
"""Allowed difference of a mean from the published mean, in points; at least two standard errors."""


class Comparison(msgspec.Struct, frozen=True):
    """One policy on one trace: GPUs in use, in percent of the cluster.

    Attributes:
        trace: The trace.
        rule: Name of the shipped policy.
        published: The published mean after requests for 130 % of the capacity. None, like all
            figures computed from it, if no mean was published.
        published_deviation: Standard deviation of the published mean, over `published_runs` runs.
        published_at_100: The published mean after requests for 100 % of the capacity.
        reached: The measured mean after requests for 130 % of the capacity.
        deviation: Standard deviation of the measured mean, over `runs` seeds.
        reached_at_100: The measured mean after requests for 100 % of the capacity.
        allowed: Allowed difference of the means.
    """

    trace: str
    rule: str
    published: float | None
    published_deviation: float | None
    published_at_100: float | None
    published_runs: int | None
    reached: float
    deviation: float
    reached_at_100: float
    runs: int
    allowed: float | None

    @property
    def difference(self) -> float | None:
        """The measured mean minus the published mean, in points."""
        return None if self.published is None else self.reached - self.published

    @property
    def agrees(self) -> bool | None:
        """Return whether the measured and the published mean are close enough."""
        if self.difference is None or self.allowed is None:
            return None
        return abs(self.difference) <= self.allowed


def compare(
    nodes: Path,
    pods: Sequence[Path],
    rules: Sequence[str] = tuple(PUBLISHED_AS),
    seeds: Sequence[int] = range(SEED, SEED + SEEDS),
    progress: Callable[[str], None] = lambda _: None,
) -> list[Comparison]:
    """Run policies over traces, and compare each mean with the published one, if it exists.

    Args:
        nodes: The node file; `PUBLISHED` may be in the same folder.
        pods: Request files, `pods_<trace>.csv`.
        rules: Names of policies in `PUBLISHED_AS` or in `EXPECTED_FILL`.
        seeds: Seeds of the order of nodes and requests, one run each.
        progress: Called with the name of each run.

    Raises:
        TraceError: A file cannot be read as a trace.
        CommandError: A policy does not exist.
    """
    unknown = [policy for policy in rules if policy not in (*PUBLISHED_AS, *EXPECTED_FILL)]
    if unknown:
        listed = ", ".join((*PUBLISHED_AS, *EXPECTED_FILL))
        raise CommandError(f"there is no policy {', '.join(unknown)}; there are {listed}")
    machines, known = trace.read_nodes(nodes), _read_published(nodes.with_name(PUBLISHED))
    comparisons: list[Comparison] = []
    for path in pods:
        name, requests = path.stem.removeprefix("pods_"), trace.read_pods(path)
        for policy in rules:
            runs: list[packing.Packing] = []
            for seed in seeds:
                progress(f"{name} {policy} {seed}")
                runs.append(run(policy, machines, requests, seed))
            reference = known.get((name, PUBLISHED_AS.get(policy, "")))
            comparisons.append(_comparison(name, policy, reference, runs))
    return comparisons


def run(
    rule: str, nodes: Sequence[trace.TraceNode], pods: Sequence[trace.TracePod], seed: int
) -> packing.Packing:
    """Place the requests of one seed with a new instance of a policy."""
    name = "expected_fill" if rule in EXPECTED_FILL else rule
    parameters = {**typical_of(name, pods), **EXPECTED_FILL.get(rule, {})}
    played: Rule = import_module(f"moorage_policies.{name}").AIOSv1PolicyRule(rule, {}, parameters)
    capacity = trace.capacity_milli(nodes)
    if rule in PUBLISHED_AS:
        order, names = read_published_order(pods, nodes, capacity, ARRIVE, seed)
        site = packing.Site(trace.cluster_document(nodes, names=names))
    else:
        order = trace.arrivals(pods, capacity, ARRIVE, seed)
        site = packing.openb(nodes, seed)
    return packing.pack(played, site, order, parameters, seed)


def placement(
    nodes: Path | None = None,
    pods: Path | None = None,
    seeds: int = SEEDS,
    rules: Sequence[str] = (),
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Return the table of policies over all traces beside the node file, or over one trace.

    Args:
        nodes: The node file.
        pods: A request file, in place of all request files beside the node file.
        seeds: Number of orders of nodes and requests.
        rules: Names of policies, as for `compare`; empty: the six published policies.
        progress: Called with the name of each run.

    Raises:
        CommandError: No node file is given, or its folder has no traces.
    """
    if nodes is None:
        raise CommandError("placement needs --nodes, the node file of a trace")
    traces = [pods] if pods else sorted(nodes.parent.glob("pods_*.csv"))
    if not traces:
        raise CommandError(f"there is no pods_*.csv beside {nodes}")
    table = compare(
        nodes, traces, rules or tuple(PUBLISHED_AS), range(SEED, SEED + seeds), progress
    )
    return {
        "seeds": seeds,
        "agree": sum(bool(each.agrees) for each in table),
        "of": sum(each.published is not None for each in table),
        "table": [
            {**msgspec.to_builtins(each), "difference": each.difference, "agrees": each.agrees}
            for each in table
        ],
    }


class _Reference(NamedTuple):
    """The published figures of one policy on one trace."""

    runs: int
    mean: float
    deviation: float
    mean_at_100: float


def _read_published(path: Path) -> dict[tuple[str, str], _Reference]:
    if not path.exists():
        return {}
    with path.open(encoding="utf-8", newline="") as file:
        return {
            (row["trace"], row["policy"]): _Reference(
                int(row["runs"]),
                float(row["allocated_percent_at_130_mean"]),
                float(row["allocated_percent_at_130_stdev"]),
                float(row["allocated_percent_at_100_mean"]),
            )
            for row in csv.DictReader(file)
        }


def _allowed_deviation(reference: _Reference, runs: int, deviation: float) -> float:
    # The deviation of a single run says nothing; the published deviation is the better guess.
    own = (deviation if runs > 1 else reference.deviation) ** 2 / runs
    return max(POINTS_ALLOWED, 2 * sqrt(reference.deviation**2 / reference.runs + own))


def _comparison(
    name: str, rule: str, reference: _Reference | None, runs: Sequence[packing.Packing]
) -> Comparison:
    percents = [each.allocated_percent for each in runs]
    deviation = statistics.stdev(percents) if len(percents) > 1 else 0.0
    return Comparison(
        trace=name,
        rule=rule,
        published=reference and reference.mean,
        published_deviation=reference and reference.deviation,
        published_at_100=reference and reference.mean_at_100,
        published_runs=reference and reference.runs,
        reached=statistics.fmean(percents),
        deviation=deviation,
        reached_at_100=statistics.fmean(each.allocated_percent_at_100 for each in runs),
        runs=len(runs),
        allowed=reference and _allowed_deviation(reference, len(runs), deviation),
    )
