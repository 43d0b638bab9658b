"""`candidates`: filters over ten thousand clusters, against a hundred."""

import asyncio
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import httpx
import msgspec
import uvloop

from moorage.bench.load import drive
from moorage.catalog.opening import open_catalog
from moorage.catalog.values import Document
from moorage.lab.errors import CommandError
from moorage.storage.sqlite.records import SqliteRecords
from moorage.testing.daemon_process import Running, daemon
from moorage_policies import catalog as shipped

CLUSTERS_FEW: Final = 100
CLUSTERS_MANY: Final = 10_000
HITS: Final = 10
"""Clusters that every filter finds, however many there are."""
FILTERS: Final = 300
"""Filters of one kind that are timed, one after the other."""


def candidates() -> dict[str, Any]:
    """Measure filters with the same number of hits over many clusters, against a few.

    Over HTTP by the cluster documents, by their metrics too, and each right after a change of
    metrics; and the whole of an ask over a WebSocket.
    """
    with tempfile.TemporaryDirectory(prefix="moorage-") as folder:
        few = _filter_seconds(Path(folder) / "few", CLUSTERS_FEW)
        many = _filter_seconds(Path(folder) / "many", CLUSTERS_MANY)
    figures: dict[str, Any] = {"few": CLUSTERS_FEW, "many": CLUSTERS_MANY, "hits": HITS}
    for name, seconds in few.items():
        figures |= {f"{name}_few_seconds": seconds, f"{name}_many_seconds": many[name]}
        figures[f"{name}_many_to_few"] = many[name] / seconds
    return figures


def _filter_seconds(data: Path, clusters: int) -> dict[str, float]:
    """Return the median seconds of a filter over a number of clusters, by kind."""
    data.mkdir()
    asyncio.run(_write_clusters(data, clusters))
    documents: Document = {
        "logicalOperator": "AND",
        "conditions": [
            {"variable": "gpus.count", "operator": ">=", "value": 4},
            {"variable": "tags", "operator": "IN", "value": ["wanted"]},
            {"variable": "regionId", "operator": "LIKE", "value": "eu-*"},
        ],
    }
    metrics = {"variable": "cluster.gpu.totalFreeMem", "operator": ">", "value": 1000}
    plain = {"matchType": "cluster", "filter": {"clusterQuery": documents}}
    both = {
        "matchType": "cluster",
        "filter": {"clusterQuery": documents, "clusterMetricsQuery": metrics},
    }
    ask = {"adhoc": True, "policy_rule_uri": "first_fit:1.0-stable", "inputs": {}, "filter": both}
    ask["resources"] = {"gpus": 1}
    with (
        daemon(data) as running,
        httpx.Client(base_url=running.http, timeout=60, trust_env=False) as http,
    ):
        http.post("/policy", json=shipped.document("first_fit")).raise_for_status()
        return {
            "filter": _filters(http, plain),
            "filter_with_metrics": _filters(http, both),
            "filter_after_change": _filters(http, both, changing=True),
            "ask": _asks(running, msgspec.json.encode(ask).decode()),
        }


def _filters(http: httpx.Client, body: Document, *, changing: bool = False) -> float:
    taken: list[float] = []
    for number in range(FILTERS):
        if changing:
            http.post("/cluster", json=_metrics(number % CLUSTERS_FEW)).raise_for_status()
        started = time.perf_counter()
        answer = http.post("/api/filter-data", json=body)
        taken.append(time.perf_counter() - started)
        found = len(answer.raise_for_status().json()["data"])
        if found != HITS:
            raise CommandError(f"a filter found {found} clusters where there are {HITS}")
    return sorted(taken)[FILTERS // 2]


def _asks(running: Running, message: str) -> float:
    load = uvloop.run(drive(running.ws, [message] * FILTERS))
    if not all(b'"cluster_id":' in reply for reply in load.replies):
        raise CommandError(f"an ask with a filter was refused: {load.replies[0][:300]!r}")
    return load.quantile(0.5)


async def _write_clusters(data: Path, clusters: int) -> None:
    """Fill the catalog of a daemon that is not started yet."""
    catalog = await open_catalog(SqliteRecords(data / "catalog.db"))
    for start in range(0, clusters, CLUSTERS_FEW):
        numbers = range(start, min(start + CLUSTERS_FEW, clusters))
        await asyncio.gather(*(catalog.clusters.create(_cluster(each)) for each in numbers))
        await asyncio.gather(*(catalog.metrics.put(_metrics(each)) for each in numbers))
    await catalog.close()


def _cluster(number: int) -> Document:
    """Return one cluster of many; the first ones are those that are looked for."""
    node = {"gpus": {"count": 8, "memory": 655_360, "modelNames": ["A100"]}, "memory": 1_048_576}
    rows = [{"id": f"n{row}", "vcpus": {"count": 128}, **node} for row in range(4)]
    return {
        "id": f"cluster-{number:05d}",
        "regionId": f"eu-{number % 7}",
        "tags": ["gpu", "wanted" if number < HITS else f"team-{number % 50}"],
        "nodes": {"nodeData": rows},
        "reputation": number % 100,
    }


def _metrics(number: int) -> Document:
    node = {"gpu": {"totalFreeMem": 50_000 + number}, "vcpu": {"load5m": number % 90}}
    rows = [{"id": f"n{row}", **node} for row in range(4)]
    return {"clusterId": f"cluster-{number:05d}", "nodes": rows}
