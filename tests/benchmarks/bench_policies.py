"""How long a shipped policy takes to decide, and how well it packs: the published protocol.

    python tests/benchmarks/bench_policies.py [--trace default] [--seeds 42,43] [--data DIR]

Prints a line per policy and seed. Times are of `eval` alone, in this process, warm; their ratio to
`first_fit` in the same run is the figure to compare between machines.
"""

import argparse
from importlib import import_module
from pathlib import Path

from moorage.lab.packing import openb, pack
from moorage.lab.trace import arrivals, capacity_milli, read_nodes, read_pods
from moorage.lab.typical import typical_of
from moorage_policies import catalog

DATA = Path(__file__).parents[3] / "shared" / "data" / "openb"


def main() -> None:
    """Run every policy over the trace, once per seed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trace", default="default")
    parser.add_argument("--seeds", default="42")
    parser.add_argument("--data", type=Path, default=DATA)
    arguments = parser.parse_args()
    if not arguments.data.is_dir():
        raise SystemExit(f"no traces at {arguments.data}: name their folder with --data")
    nodes = read_nodes(arguments.data / "nodes.csv")
    pods = read_pods(arguments.data / f"pods_{arguments.trace}.csv")
    runs = [(name, name, typical_of(name, pods)) for name in catalog.shipped()]
    runs += [(f"{name}, learning", name, {}) for name, _, told in runs if told]
    print(f"{'rule':23} {'seed':>4} {'us/decision':>11} {'x first_fit':>11} {'allocated':>9}")
    for seed in map(int, arguments.seeds.split(",")):
        order = arrivals(pods, capacity_milli(nodes), 1.3, seed)
        baseline = 0.0
        for label, name, parameters in runs:
            policy = import_module(f"moorage_policies.{name}").AIOSv1PolicyRule("", {}, parameters)
            packing = pack(policy, openb(nodes, seed), order, parameters, seed)
            each = packing.microseconds_per_decision
            baseline = baseline or each
            ratio, percent = each / baseline, packing.allocated_percent
            print(f"{label:23} {seed:4} {each:11.1f} {ratio:11.2f} {percent:8.2f}%", flush=True)


if __name__ == "__main__":
    main()
