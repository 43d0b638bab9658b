"""`fleet`: compares a fleet of a million GPUs with a fleet of ten thousand GPUs.

Both fleets are uploaded to a real daemon over HTTP, as cluster documents with a hundred GPUs each.
"""

import concurrent.futures
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import httpx
import msgspec
import uvloop

from benchmarks.processes import memory_mib
from moorage.backends.local.marks import below
from moorage.bench.load import drive
from moorage.lab.errors import CommandError
from moorage.testing.daemon_process import Running, daemon
from moorage_policies import catalog as shipped

CLUSTERS_FEW: Final = 100
CLUSTERS_MANY: Final = 10_000
GPUS_PER_CLUSTER: Final = 100
GPUS_PER_NODE: Final = 8
HITS: Final = 10
"""Number of clusters that each filter and each search must find, in both fleets."""
REPEATED: Final = 30
"""Repetitions of each measurement; the median counts."""
UPLOADS: Final = 4
"""Maximum documents that are uploaded at one time."""

Figures = dict[str, Any]


def fleet() -> Figures:
    """Measure the large fleet and the small one, and return both with their ratios."""
    with tempfile.TemporaryDirectory(prefix="moorage-") as folder:
        few = _measure(Path(folder) / "few", CLUSTERS_FEW)
        many = _measure(Path(folder) / "many", CLUSTERS_MANY)
    figures: Figures = {
        "few": CLUSTERS_FEW,
        "many": CLUSTERS_MANY,
        "gpus_few": CLUSTERS_FEW * GPUS_PER_CLUSTER,
        "gpus_many": CLUSTERS_MANY * GPUS_PER_CLUSTER,
    }
    for name, value in few.items():
        figures |= {f"{name}_few": value, f"{name}_many": many[name]}
        figures[f"{name}_many_to_few"] = many[name] / value
    return figures


def _measure(data: Path, clusters: int) -> dict[str, float]:
    figures: dict[str, float] = {}
    with (
        daemon(data) as running,
        httpx.Client(base_url=running.http, timeout=60, trust_env=False) as http,
    ):
        http.post("/policy", json=shipped.document("first_fit")).raise_for_status()
        figures |= _ingest(http, clusters)
        figures |= _ask_all(running, http, clusters)
        figures["daemon_mib"] = memory_mib(running.pid)
        figures["cells_mib"] = sum(map(memory_mib, below([running.pid])))
    started = time.perf_counter()
    with daemon(data) as running:
        figures["start_seconds"] = time.perf_counter() - started
        (latency,) = _latencies(running, [_message({})])
        figures["first_ask_seconds"] = latency
    return figures


def _ingest(http: httpx.Client, clusters: int) -> dict[str, float]:
    """Upload the documents, and measure how quickly the event loop answers meanwhile."""
    bodies = [msgspec.json.encode(cluster(number)) for number in range(clusters)]
    waits: list[float] = []
    started = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(UPLOADS) as pool:
        sent = [pool.submit(http.post, "/clusters", content=body) for body in bodies]
        while not all(each.done() for each in sent[-UPLOADS:]):
            sent_at = time.perf_counter()
            http.get("/healthz").raise_for_status()
            waits.append(time.perf_counter() - sent_at)
            time.sleep(0.005)  # Pause between two measurements of the event loop's delay.
    for each in sent:
        each.result().raise_for_status()
    taken = time.perf_counter() - started
    with concurrent.futures.ThreadPoolExecutor(UPLOADS) as pool:
        for answer in pool.map(partial(_report_metrics, http), range(clusters)):
            answer.raise_for_status()
    return {
        "ingest_seconds_per_cluster": taken / clusters,
        "health_p99_seconds": sorted(waits)[int(0.99 * len(waits))],
    }


def _ask_all(running: Running, http: httpx.Client, clusters: int) -> dict[str, float]:
    wanted = {"variable": "tags", "operator": "IN", "value": ["wanted"]}
    measured = {"variable": "cluster.gpu.totalFreeMem", "operator": ">", "value": 1000}
    filtered = {"matchType": "cluster", "filter": {"clusterQuery": wanted}}
    both = {"clusterQuery": wanted, "clusterMetricsQuery": measured}
    with_metrics = {"matchType": "cluster", "filter": both}
    like = {"like": {"gpus": {"count": GPUS_PER_CLUSTER}}, "return": HITS}
    ranked = {"matchType": "cluster", "rankingPolicyRule": {"parameters": like}}
    names = [_name(number) for number in range(HITS)]
    figures: dict[str, float] = {}
    for name, path, body in (
        ("filter", "/api/filter-data", filtered),
        ("filter_with_metrics", "/api/filter-data", with_metrics),
        ("filter_after_change", "/api/filter-data", with_metrics),
        ("search", "/api/similarity-search", ranked),
    ):

        def find(path: str = path, body: Figures = body) -> None:
            found = http.post(path, json=body).raise_for_status().json()["data"]
            if len(found) != HITS:
                raise CommandError(f"{path} found {len(found)} clusters; expected {HITS}")

        def prepare(name: str = name) -> None:
            if name == "filter_after_change":
                _report_metrics(http, HITS).raise_for_status()

        figures[f"{name}_seconds"] = _median(find, prepare)
    for name, more in (
        ("ask", {}),
        ("ask_of_named", {"clusters": names}),
        ("ask_with_filter", {"filter": with_metrics}),
    ):
        figures[f"{name}_seconds"] = sorted(_latencies(running, [_message(more)] * REPEATED))[
            REPEATED // 2
        ]
    figures |= _changes(running, http, clusters)
    return figures


def _changes(running: Running, http: httpx.Client, clusters: int) -> dict[str, float]:
    """Measure the seconds from a change of a cluster document to a grant on the changed nodes."""
    middle = clusters // 2
    document = cluster(middle)
    rows = document["nodes"]["nodeData"]
    figures: dict[str, float] = {}
    for name in ("change", "resize"):
        taken: list[float] = []
        for number in range(REPEATED):
            memory = 1_000_000 + number
            changed = [{**row, "memory": memory} for row in rows]
            if name == "resize":
                changed = changed[: len(rows) - number % 2]
            nodes = {"nodes": {"nodeData": changed}}
            started = time.perf_counter()
            http.put(f"/clusters/{_name(middle)}", json={**document, **nodes}).raise_for_status()
            (latency,) = _latencies(running, [_message({"clusters": [_name(middle)]}, memory)])
            taken.append(time.perf_counter() - started)
            if latency > taken[-1]:
                raise CommandError("a request took longer than the change and the request together")
        figures[f"{name}_seconds"] = sorted(taken)[REPEATED // 2]
    return figures


def _median(work: Callable[[], None], prepare: Callable[[], None]) -> float:
    taken: list[float] = []
    for _ in range(REPEATED):
        prepare()
        started = time.perf_counter()
        work()
        taken.append(time.perf_counter() - started)
    return sorted(taken)[REPEATED // 2]


def _latencies(running: Running, messages: Sequence[str]) -> list[float]:
    load = uvloop.run(drive(running.ws, messages))
    for reply in load.replies:
        if b'"cluster_id":' not in reply:
            raise CommandError(f"a request was refused: {reply[:300]!r}")
    return load.latencies


def _message(more: Figures, memory_mib: int = 1) -> str:
    resources = {"gpus": 1, "memory_mib": memory_mib}
    ask = {"adhoc": True, "policy_rule_uri": "first_fit:1.0-stable", "inputs": {}}
    return msgspec.json.encode({**ask, "resources": resources, **more}).decode()


def _name(number: int) -> str:
    return f"cluster-{number:05d}"


def cluster(number: int) -> Figures:
    """Return one of many cluster documents, with a hundred GPUs."""
    device = {"modelName": f"A{number % 5}00", "memory": 81_920}
    rows = [
        {
            "id": f"node-{row:02d}",
            "vcpus": {"count": 128},
            "memory": 1_048_576,
            "gpus": {"count": held, "gpus": [device] * held},
        }
        for row, held in enumerate(_devices_by_node())
    ]
    return {
        "id": _name(number),
        "regionId": f"eu-{number % 7}",
        "status": "live",
        "tags": ["gpu", "wanted" if number < HITS else f"team-{number % 50}"],
        "nodes": {"count": len(rows), "nodeData": rows},
        "reputation": number % 100,
    }


def _report_metrics(http: httpx.Client, number: int) -> httpx.Response:
    nodes = [{"id": f"node-{row:02d}", "gpu": {"totalFreeMem": 50_000}} for row in range(4)]
    return http.post("/cluster", json={"clusterId": _name(number), "nodes": nodes})


def _devices_by_node() -> list[int]:
    whole, rest = divmod(GPUS_PER_CLUSTER, GPUS_PER_NODE)
    return [GPUS_PER_NODE] * whole + ([rest] if rest else [])
