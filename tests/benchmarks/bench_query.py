"""What a query costs over 10,000 clusters, as a multiple of what it costs over 100.

    python tests/benchmarks/bench_query.py [--clusters 10000] [--nodes 12]

Every query has the same hits in both, its columns are there, and its parsing is part of it. The
figure to compare between machines is the ratio; `first` is the first time, with the columns to
make. The limit of the project is 20.
"""

import argparse
import random
import sys
import time

from moorage.query import DocumentIndex, nearest, parse_condition

HITS = 10
BASE = 100
RUNS = 15


def cluster(number: int, nodes: int) -> dict:
    """Return a cluster document as the registry has it, with eight GPUs on each node."""
    draw = random.Random(number)
    rare = number < HITS
    gpus = [{"modelName": "A100", "memory": 81920 + rare} for _ in range(8)]
    return {
        "id": f"cluster-{number:05}",
        "regionId": draw.choice(["eu-west", "us-east", "ap-south"]),
        "status": "live",
        "tags": ["gpu", "rare" if rare else draw.choice(["spot", "prod"])],
        "reputation": number,
        "gpus": {"count": 8 * nodes, "memory": draw.randrange(1 << 20)},
        "nodes": {
            "count": nodes,
            "nodeData": [
                {
                    "id": f"n{number}-{node}",
                    "memory": draw.randrange(1 << 19) + rare * (1 << 20),
                    "gpus": {"count": 8, "gpus": gpus, "modelNames": ["A100"]},
                }
                for node in range(nodes)
            ],
        },
    }


def simple(variable: str, operator: str, value: object) -> dict:
    return {"variable": variable, "operator": operator, "value": value}


QUERIES = {
    "number <": simple("reputation", "<", str(HITS)),
    "text ==": simple("id", "==", "cluster-00003"),
    "text IN": simple("id", "IN", [f"cluster-{n:05}" for n in range(HITS)]),
    "text <": simple("id", "<", "cluster-00010"),
    "array IN": simple("tags", "IN", ["rare", "none"]),
    "LIKE": simple("id", "LIKE", "cluster-*0000"),
    "$regex": {"id": {"$regex": "^cluster-0000[0-9]$"}},
    "$regex, nothing fixed": {"id": {"$regex": r"^\w+\W([0/]){4}\d$"}},
    "each GPU ==": simple("nodes.nodeData.gpus.gpus.memory", "==", 81921),
    "each node >=": simple("nodes.nodeData.memory", ">=", 1 << 20),
    "sum >": {
        "aggOperator": "min",
        "target": "nodes.nodeData.memory",
        "operator": ">=",
        "value": 1 << 20,
    },
    "NOT OR": {
        "logicalOperator": "NOT",
        "conditions": [
            {
                "logicalOperator": "OR",
                "conditions": [simple("reputation", ">=", HITS), simple("status", "!=", "live")],
            }
        ],
    },
    "Mongo AND": {"tags": "rare", "status": {"$ne": "down"}, "gpus.count": {"$gte": 8, "$lt": 999}},
}


def filled(clusters: int, nodes: int) -> DocumentIndex:
    index = DocumentIndex()
    for number in range(clusters):
        document = cluster(number, nodes)
        index.put(document["id"], document)
    return index


def timed(call) -> tuple[float, float, int]:
    """Return the seconds of the first run and of the best, and the hits."""
    seconds = []
    for _ in range(RUNS):
        start = time.perf_counter()
        hits = call()
        seconds.append(time.perf_counter() - start)
    return seconds[0], min(seconds), len(hits)


def main() -> None:
    """Print a line per query."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clusters", type=int, default=10_000)
    parser.add_argument("--nodes", type=int, default=12)
    arguments = parser.parse_args()
    small = filled(BASE, arguments.nodes)
    large = filled(arguments.clusters, arguments.nodes)
    print(f"{arguments.clusters} clusters, {arguments.clusters * arguments.nodes * 8} GPUs")
    print(f"{'query':22} {'hits':>5} {f'us/{BASE}':>9} {'us/all':>9} {'ratio':>6} {'first ms':>9}")
    worst = 0.0
    calls = {
        name: lambda index, query=query: index.matching(parse_condition(query))
        for name, query in QUERIES.items()
    }
    calls["nearest 10"] = lambda index: nearest(index, "cluster-00003", k=HITS)
    for name, call in calls.items():
        _, base, hits = timed(lambda call=call: call(small))
        first, best, hits_of_all = timed(lambda call=call: call(large))
        if hits != hits_of_all:
            sys.exit(f"{name}: {hits} hits, then {hits_of_all}: not the same work")
        worst = max(worst, best / base)
        print(
            f"{name:22} {hits:5} {base * 1e6:9.0f} {best * 1e6:9.0f} {best / base:6.1f}"
            f" {first * 1e3:9.1f}",
            flush=True,
        )
    print(f"worst ratio: {worst:.1f}")


if __name__ == "__main__":
    main()
