"""`packing`: how long each shipped policy takes to decide, and how well it packs.

Times are of `eval` alone, in this process, warm; their ratio to `first_fit` in the same run is the
figure to compare between machines.
"""

from importlib import import_module
from pathlib import Path
from statistics import fmean
from typing import Final

from benchmarks.packing import openb, pack
from moorage.bench.grants import read_trace
from moorage.lab.trace import arrivals, capacity_milli
from moorage.lab.typical import typical_of
from moorage_policies import catalog

FIRST_SEED: Final = 42


def packing_costs(
    nodes: Path | None = None, pods: Path | None = None, seeds: int = 5
) -> dict[str, float]:
    """Run every shipped policy over a trace, once per seed.

    Args:
        nodes: Node file of a trace; a made-up fleet of openb's shape where none is given.
        pods: Its request file, likewise.
        seeds: How many, from 42 on.
    """
    machines, wanted = read_trace(nodes, pods)
    runs = [(name, name, typical_of(name, wanted)) for name in catalog.shipped()]
    runs += [(f"{name}_learning", name, {}) for name, _, typical in runs if typical]
    capacity = capacity_milli(machines)
    figures: dict[str, float] = {}
    baseline = 0.0
    for label, name, parameters in runs:
        outcomes = []
        for seed in range(FIRST_SEED, FIRST_SEED + seeds):
            policy = import_module(f"moorage_policies.{name}").AIOSv1PolicyRule("", {}, parameters)
            order = arrivals(wanted, capacity, 1.3, seed)
            outcomes.append(pack(policy, openb(machines, seed), order, parameters, seed))
        each = fmean(outcome.microseconds_per_decision for outcome in outcomes)
        baseline = baseline or each
        figures[f"{label}_to_first_fit"] = each / baseline
        figures[f"{label}_allocated_percent"] = fmean(one.allocated_percent for one in outcomes)
    return figures
