"""Makes metrics documents from the samples of a Prometheus server.

The names of metrics are those of NVIDIA's DCGM exporter and Prometheus's node exporter; the
documents are those of docs/reference/allocation-server.md, "Metrics documents". Bytes become MiB,
where the documents say MB; DCGM's numbers stay unchanged. No I/O.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from moorage.catalog.documents.metrics import aggregate
from moorage.catalog.values import Document
from moorage.records.json_values import JsonMapping, JsonValue

SOURCE: Final = "prometheus"
"""The field `source` of the documents made here; documents without it are never changed."""

_DEVICE_FIELDS: Final = {
    "DCGM_FI_DEV_FB_USED": "usedMem",
    "DCGM_FI_DEV_FB_FREE": "freeMem",
    "DCGM_FI_DEV_GPU_UTIL": "cudaUtilization",
    "DCGM_FI_DEV_POWER_USAGE": "powerUtilization",
    "DCGM_FI_DEV_GPU_TEMP": "temperature",
}
_HOST_METRICS: Final = (
    "node_memory_MemTotal_bytes",
    "node_memory_MemAvailable_bytes",
    "node_memory_MemFree_bytes",
    "node_memory_SwapTotal_bytes",
    "node_memory_SwapFree_bytes",
    "node_load1",
    "node_load5",
    "node_load15",
    "node_procs_running",
)
_LOADS: Final = {
    "node_load1": "load1m",
    "node_load5": "load5m",
    "node_load15": "load15m",
    "node_procs_running": "runningProcesses",
}
_HOST_NAMES: Final = "node_uname_info"
_SAMPLED: Final = {
    "timestamp(DCGM_FI_DEV_FB_USED)": "gpu",
    "timestamp(node_memory_MemTotal_bytes)": "host",
}
# Answers have the time of the query; `timestamp` gives the time of the measurement.

QUERIES: Final = (_HOST_NAMES, *_DEVICE_FIELDS, *_HOST_METRICS, *_SAMPLED)
"""The PromQL queries, each for the whole fleet at once."""

_MIB: Final = 1 << 20
_PORT: Final = re.compile(r":\d+$")
_GPU: Final = re.compile(r"[0-9]{1,4}")
_FINDINGS: Final = {
    "no cluster": "have no cluster: set prometheus_cluster or prometheus_cluster_label",
    "unknown cluster": "have a cluster that is not in the registry, or not live",
    "unknown node": "have no node of their cluster: set prometheus_node_labels",
    "no device": "have no device: their label `gpu` is not a number",
}


@dataclass(frozen=True, slots=True)
class MetricSample:
    """One value of an instant vector.

    Args:
        labels: The labels of the value's series.
        value: The value, a finite number.
    """

    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class Labels:
    """The labels by which a series names its cluster and node.

    Args:
        cluster_label: The label with the id of the cluster.
        cluster: Id of the cluster for series without this label; empty: such series are left out.
        node_labels: Labels that may have the node's id, alone or as `host:port`. The first of these
            labels that names a node of the cluster decides. If none does, the host name from the
            node exporter decides.
    """

    cluster_label: str = "cluster"
    cluster: str = ""
    node_labels: tuple[str, ...] = ("node", "Hostname", "nodename", "instance")


@dataclass(slots=True)
class Composed:
    """The metrics documents and findings of one round of queries.

    Args:
        documents: The documents that differ from those in the catalog.
        fresh: Number of nodes with recent measurements.
        stale: Number of nodes with only old measurements.
        findings: Sentences for the log on ignored samples, by kind.
    """

    documents: list[Document] = field(default_factory=list)
    fresh: int = 0
    stale: int = 0
    findings: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class _Machine:
    """All samples of one node."""

    host: dict[str, float] = field(default_factory=dict)
    devices: dict[int, dict[str, dict[str, float]]] = field(default_factory=dict)
    sampled: dict[str, float] = field(default_factory=dict)

    def take(self, query: str, sample: MetricSample) -> bool:
        """Add a sample; return False if the sample names no valid device."""
        if half := _SAMPLED.get(query):
            # All series of a node are measured together: take the newest time.
            self.sampled[half] = max(sample.value, self.sampled.get(half, 0.0))
        elif name := _DEVICE_FIELDS.get(query):
            number = sample.labels.get("gpu", "")
            if not _GPU.fullmatch(number):
                return False
            # Pods that share a device repeat its series; each MIG instance has its own.
            instance = sample.labels.get("GPU_I_ID", "")
            values = self.devices.setdefault(int(number), {}).setdefault(instance, {})
            values[name] = max(sample.value, values.get(name, 0.0))
        else:
            self.host[query] = sample.value
        return True


def compose(
    answers: Mapping[str, Sequence[MetricSample]],
    nodes: Mapping[str, Collection[str]],
    known: Mapping[str, Document],
    labels: Labels,
    *,
    now: float,
    stale_seconds: float,
) -> Composed:
    """Return new metrics documents from the answers of a round and the last documents.

    A node without new samples keeps its last values, with `stale: true` once they are older than
    `stale_seconds`. Totals of a cluster are over its fresh nodes, or over all if none is fresh.

    Args:
        answers: Samples by query; empty if Prometheus did not answer.
        nodes: Ids of the nodes of each live cluster; empty if the cluster's document lists none.
        known: The catalog's documents of the last round, by cluster.
        labels: The labels that name a series' cluster and node.
        now: The time, by Prometheus's clock if it answered, in seconds since the epoch.
        stale_seconds: Age from which a sample counts as outdated.
    """
    composed = Composed()
    machines = _machines(answers, nodes, labels, composed.findings)
    for cluster_id in nodes:
        old = known.get(cluster_id, {})
        trees = _trees(machines.get(cluster_id, {}), old.get("nodes") or (), nodes[cluster_id], now)
        for tree in trees:
            tree["stale"] = now - tree["timestamp"] > stale_seconds
        if not trees:
            continue
        fresh = [tree for tree in trees if not tree["stale"]]
        composed.fresh += len(fresh)
        composed.stale += len(trees) - len(fresh)
        if _marks(trees) != _marks(old.get("nodes") or ()):
            composed.documents.append(
                {
                    "clusterId": cluster_id,
                    "source": SOURCE,
                    "timestamp": max(tree["timestamp"] for tree in trees),
                    "stale": not fresh,
                    "cluster": aggregate(fresh or trees),
                    "nodes": trees,
                }
            )
    return composed


def _marks(trees: Iterable[JsonMapping]) -> list[tuple[JsonValue, ...]]:
    """Return the measurement times of all nodes, to compare two rounds of samples."""
    return [(tree.get("id"), tree.get("timestamp"), tree.get("stale")) for tree in trees]


# Clusters and nodes of series --------------------------------------------------------------------


def _machines(
    answers: Mapping[str, Sequence[MetricSample]],
    nodes: Mapping[str, Collection[str]],
    labels: Labels,
    findings: dict[str, str],
) -> dict[str, dict[str, _Machine]]:
    """Return samples by cluster and node; add samples without a node to `findings`."""
    names = {
        sample.labels.get("instance", ""): sample.labels.get("nodename", "")
        for sample in answers.get(_HOST_NAMES, ())
    }
    machines: dict[str, dict[str, _Machine]] = {}
    left_out: dict[str, list[MetricSample]] = {}
    for query, samples in answers.items():
        if query == _HOST_NAMES:
            continue
        for sample in samples:
            cluster_id = sample.labels.get(labels.cluster_label) or labels.cluster
            if cluster_id not in nodes:
                kind = "unknown cluster" if cluster_id else "no cluster"
                left_out.setdefault(kind, []).append(sample)
                continue
            node_id = _node_id(sample.labels, nodes[cluster_id], labels.node_labels, names)
            if not node_id:
                left_out.setdefault("unknown node", []).append(sample)
                continue
            machine = machines.setdefault(cluster_id, {}).setdefault(node_id, _Machine())
            if not machine.take(query, sample):
                left_out.setdefault("no device", []).append(sample)
    for kind, lost in left_out.items():
        findings[kind] = f"{len(lost)} samples {_FINDINGS[kind]}; e.g. {dict(lost[0].labels)}"
    return machines


def _node_id(
    labels: Mapping[str, str],
    known: Collection[str],
    names: Sequence[str],
    host_names: Mapping[str, str],
) -> str:
    """Return the node of a series; empty if no known node matches."""
    for candidate in _candidates(labels, names, host_names):
        if candidate in known or not known:
            return candidate
    return ""


def _candidates(
    labels: Mapping[str, str], names: Sequence[str], host_names: Mapping[str, str]
) -> Iterator[str]:
    for name in names:
        if value := labels.get(name):
            yield value
            if bare := _PORT.sub("", value):
                yield bare
    if host := host_names.get(labels.get("instance", "")):
        yield host


# Node trees --------------------------------------------------------------------------------------


def _trees(
    machines: Mapping[str, _Machine], old: Sequence[JsonMapping], known: Collection[str], now: float
) -> list[Document]:
    """Return the metrics of a cluster's nodes, including nodes without new samples."""
    before = {str(tree.get("id")): tree for tree in old}
    trees = [
        _tree(node_id, machine, before.pop(node_id, {}), now)
        for node_id, machine in machines.items()
        if machine.devices or machine.host
    ]
    trees += [{**tree} for node_id, tree in before.items() if node_id in known or not known]
    return sorted(trees, key=lambda tree: str(tree["id"]))


def _tree(node_id: str, machine: _Machine, old: JsonMapping, now: float) -> Document:
    """Return the metrics of one node; if an exporter sent nothing, keep its old values."""
    halves: dict[str, Document] = {}
    if machine.devices:
        halves["gpu"] = _device_groups(machine.devices)
    if machine.host:
        halves["host"] = _host_groups(machine.host)
    times = [machine.sampled.get(half, now) for half in halves]
    known = {"gpu": ("gpu", "gpus"), "host": ("memory", "vcpu")}
    tree: Document = {"id": node_id}
    for half, groups in known.items():
        was = {name: old[name] for name in groups if name in old}
        if half not in halves and was:
            times.append(old["timestamp"])
        tree |= halves.get(half, was)
    return {**tree, "timestamp": min(times, default=now)}


def _device_groups(devices: Mapping[int, Mapping[str, Mapping[str, float]]]) -> Document:
    rows = [_device(number, instances) for number, instances in sorted(devices.items())]

    def numbers(name: str) -> list[float]:
        return [row[name] for row in rows if name in row]

    def mean(name: str) -> float:
        found = numbers(name)
        return round(sum(found) / len(found), 2) if found else 0

    return {
        "gpus": rows,
        "gpu": {
            "count": len(rows),
            "totalUsedMem": sum(numbers("usedMem")),
            "totalFreeMem": sum(numbers("freeMem")),
            "totalMem": sum(numbers("totalMem")),
            "avgMemUtilization": mean("memUtilization"),
            "avgCudaUtilization": mean("cudaUtilization"),
            "avgPowerUtilization": mean("powerUtilization"),
            "avgTemperature": mean("temperature"),
        },
    }


def _device(number: int, instances: Mapping[str, Mapping[str, float]]) -> Document:
    """Return the metrics of one GPU; its memory is the sum over its MIG instances."""
    row: Document = {"gpu_id": number}
    for name in _DEVICE_FIELDS.values():
        values = [each[name] for each in instances.values() if name in each]
        if values:
            row[name] = _plain(sum(values) if name in {"usedMem", "freeMem"} else max(values))
    if "usedMem" in row and "freeMem" in row:
        row["totalMem"] = row["usedMem"] + row["freeMem"]
        row["memUtilization"] = _percent(row["usedMem"], row["totalMem"])
    return row


def _host_groups(host: Mapping[str, float]) -> Document:
    groups: Document = {}
    total = host.get("node_memory_MemTotal_bytes")
    free = host.get("node_memory_MemAvailable_bytes", host.get("node_memory_MemFree_bytes"))
    if total is not None and free is not None:
        groups["memory"] = {
            "freeMem": int(free // _MIB),
            "usedMem": int((total - free) // _MIB),
            "averageUtil": _percent(total - free, total),
        }
    swap, free_swap = (host.get(f"node_memory_Swap{name}_bytes") for name in ("Total", "Free"))
    if swap is not None and free_swap is not None:
        used = {"freeSwap": int(free_swap // _MIB), "usedSwap": int((swap - free_swap) // _MIB)}
        groups["memory"] = groups.get("memory", {}) | used
    loads = {name: _plain(host[metric]) for metric, name in _LOADS.items() if metric in host}
    return groups | ({"vcpu": loads} if loads else {})


def _plain(value: float) -> float:
    return int(value) if value.is_integer() else value


def _percent(part: float, whole: float) -> float:
    return round(100 * part / whole, 2) if whole else 0
