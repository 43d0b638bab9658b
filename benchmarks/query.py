"""`query`: the cost of a query over ten thousand clusters, as a multiple of the cost over 100.

Each query has equally many hits in both fleets. The best of several runs counts, after the first
run has built the columns of the index. The project's limit for this ratio is 20.
"""

import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from moorage.lab.errors import CommandError
from moorage.query import DocumentIndex, nearest, parse_condition
from moorage.query.conditions import Condition

HITS: Final = 10
CLUSTERS_FEW: Final = 100
CLUSTERS_MANY: Final = 10_000
NODES: Final = 12
"""Nodes of each cluster."""
RUNS: Final = 15


def _cluster(number: int) -> dict[str, Any]:
    """Return a cluster document with eight GPUs on each node, as the registry stores it."""
    draw = random.Random(number)
    rare = number < HITS
    gpus = [{"modelName": "A100", "memory": 81920 + rare} for _ in range(8)]
    return {
        "id": f"cluster-{number:05}",
        "regionId": draw.choice(["eu-west", "us-east", "ap-south"]),
        "status": "live",
        "tags": ["gpu", "rare" if rare else draw.choice(["spot", "prod"])],
        "reputation": number,
        "gpus": {"count": 8 * NODES, "memory": draw.randrange(1 << 20)},
        "nodes": {
            "count": NODES,
            "nodeData": [
                {
                    "id": f"n{number}-{node}",
                    "memory": draw.randrange(1 << 19) + rare * (1 << 20),
                    "gpus": {"count": 8, "gpus": gpus, "modelNames": ["A100"]},
                }
                for node in range(NODES)
            ],
        },
    }


def _simple(variable: str, operator: str, value: object) -> dict[str, Any]:
    return {"variable": variable, "operator": operator, "value": value}


QUERIES = {
    "number <": _simple("reputation", "<", str(HITS)),
    "text ==": _simple("id", "==", "cluster-00003"),
    "text IN": _simple("id", "IN", [f"cluster-{n:05}" for n in range(HITS)]),
    "text <": _simple("id", "<", "cluster-00010"),
    "array IN": _simple("tags", "IN", ["rare", "none"]),
    "LIKE": _simple("id", "LIKE", "cluster-*0000"),
    "$regex": {"id": {"$regex": "^cluster-0000[0-9]$"}},
    "$regex, nothing fixed": {"id": {"$regex": r"^\w+\W([0/]){4}\d$"}},
    "each GPU ==": _simple("nodes.nodeData.gpus.gpus.memory", "==", 81921),
    "each node >=": _simple("nodes.nodeData.memory", ">=", 1 << 20),
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
                "conditions": [_simple("reputation", ">=", HITS), _simple("status", "!=", "live")],
            }
        ],
    },
    "Mongo AND": {"tags": "rare", "status": {"$ne": "down"}, "gpus.count": {"$gte": 8, "$lt": 999}},
}


def query() -> dict[str, float]:
    """Measure every kind of query, and the search for the nearest clusters."""
    few, many = _index(CLUSTERS_FEW), _index(CLUSTERS_MANY)
    calls: dict[str, Callable[[DocumentIndex], Sequence[object]]] = {
        name: partial(_match, parse_condition(document)) for name, document in QUERIES.items()
    }
    calls["nearest 10"] = lambda index: nearest(index, "cluster-00003", k=HITS)
    figures: dict[str, float] = {}
    for name, call in calls.items():
        _, base, hits = _time(call, few)
        first, best, hits_of_all = _time(call, many)
        if hits != hits_of_all:
            raise CommandError(
                f"{name}: expected equal numbers of hits in both fleets, got {hits}, {hits_of_all}"
            )
        figures |= {f"{name}: many_to_few": best / base, f"{name}: first_seconds": first}
    return figures


def _match(condition: Condition, index: DocumentIndex) -> Sequence[object]:
    return index.matching(condition)


def _index(clusters: int) -> DocumentIndex:
    index = DocumentIndex()
    for number in range(clusters):
        document = _cluster(number)
        index.put(document["id"], document)
    return index


def _time(
    call: Callable[[DocumentIndex], Sequence[object]], index: DocumentIndex
) -> tuple[float, float, int]:
    """Return the seconds of the first run, the seconds of the best run, and the number of hits."""
    seconds = []
    for _ in range(RUNS):
        start = time.perf_counter()
        hits = call(index)
        seconds.append(time.perf_counter() - start)
    return seconds[0], min(seconds), len(hits)
