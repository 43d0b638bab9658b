"""Request traces of the openb kind: reading them, and the published packing protocol.

Called by `moored replay` and `moored bench`, which drive a trace through a real daemon, and by
the tests of the shipped rules. Columns are those of the Alibaba cluster-trace-gpu-v2023 files;
the protocol is that of "Beware of Fragmentation" (USENIX ATC'23): requests in random order, none
ends, drawn again until their GPU demand is 1.3 times the capacity.
"""

import csv
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Final

from moorage.model import GPU_MILLI

TYPICAL_SHARE: Final = 0.95
"""The typical classes are the most frequent ones that make up this share of the requests."""
ROWS_MAX: Final = 1_000_000
"""Rows of one CSV file; a longer file is refused rather than read into memory."""


class TraceError(ValueError):
    """A trace file cannot be read as one.

    Args:
        path: The file.
        line: Its line, from 1; 0 where the whole file is meant.
        column: The column's name; empty where the whole line is meant.
        expected: What was expected there.

    """

    def __init__(self, path: Path, line: int, column: str, expected: str) -> None:
        place = f"{path}" + (f", line {line}" if line else "")
        place += f", column {column}" if column else ""
        super().__init__(f"{place}: expected {expected}")
        self.path = path
        self.line = line
        self.column = column
        self.expected = expected


@dataclass(frozen=True, slots=True)
class TraceNode:
    """One machine: CPU in milli, memory in MiB, `gpus` devices of one model."""

    name: str
    cpu_milli: int
    memory_mib: int
    gpus: int
    model: str


@dataclass(frozen=True, slots=True)
class TracePod:
    """One request: `gpus` devices, of each `gpu_milli` thousandths, of one of `models` (or any)."""

    name: str
    cpu_milli: int
    memory_mib: int
    gpus: int
    gpu_milli: int
    models: tuple[str, ...] = ()

    @property
    def demand_milli(self) -> int:
        """GPU milli over all its devices."""
        return self.gpus * self.gpu_milli

    def resources(self) -> dict[str, Any]:
        """Return it as the `resources` of a request."""
        wanted: dict[str, Any] = {"cpu_milli": self.cpu_milli, "memory_mib": self.memory_mib}
        if self.gpus:
            wanted |= {"gpus": self.gpus, "gpu_milli": self.gpu_milli}
            if self.models:
                wanted["models"] = list(self.models)
        return wanted


# Reading ---------------------------------------------------------------------------------------


def read_nodes(path: Path) -> list[TraceNode]:
    """Read a node file: columns `sn, cpu_milli, memory_mib, gpu, model`.

    Raises:
        TraceError: A column is missing, or a value is not what its column holds.
        OSError: The file cannot be opened.

    """
    nodes = []
    names = set[str]()
    for line in _lines(path, ("sn", "cpu_milli", "memory_mib", "gpu", "model")):
        name = line.text("sn")
        if name in names:
            raise TraceError(path, line.number, "sn", f"each node once, not {name!r} again")
        names.add(name)
        nodes.append(
            TraceNode(
                name=name,
                cpu_milli=line.whole("cpu_milli"),
                memory_mib=line.whole("memory_mib"),
                gpus=line.whole("gpu"),
                model=line.values["model"],
            )
        )
    return nodes


def read_pods(path: Path) -> list[TracePod]:
    """Read a request file: columns `name, cpu_milli, memory_mib, num_gpu, gpu_milli[, gpu_spec]`.

    `gpu_spec` names the accepted models, separated by `|`; other columns are ignored.

    Raises:
        TraceError: A column is missing, or a value is not what its column holds.
        OSError: The file cannot be opened.

    """
    pods = []
    for line in _lines(path, ("name", "cpu_milli", "memory_mib", "num_gpu", "gpu_milli")):
        gpus, gpu_milli = line.whole("num_gpu"), line.whole("gpu_milli", most=GPU_MILLI)
        if bool(gpus) != bool(gpu_milli):
            raise TraceError(
                path, line.number, "gpu_milli", "more than 0 exactly where num_gpu is more than 0"
            )
        spec = line.values.get("gpu_spec") or ""
        pods.append(
            TracePod(
                name=line.text("name"),
                cpu_milli=line.whole("cpu_milli"),
                memory_mib=line.whole("memory_mib"),
                gpus=gpus,
                gpu_milli=gpu_milli,
                models=tuple(model for model in spec.split("|") if model),
            )
        )
    return pods


@dataclass(frozen=True, slots=True)
class _Line:
    path: Path
    number: int
    values: Mapping[str, str]

    def text(self, column: str) -> str:
        if not self.values[column]:
            raise TraceError(self.path, self.number, column, "a name, not an empty field")
        return self.values[column]

    def whole(self, column: str, most: int | None = None) -> int:
        value = self.values[column]
        limit = f" up to {most}" if most is not None else ""
        # isdecimal alone would take the digits of other scripts.
        if not (value.isascii() and value.isdecimal()) or (most is not None and int(value) > most):
            raise TraceError(
                self.path, self.number, column, f"a whole number{limit}, not {value!r}"
            )
        return int(value)


def _lines(path: Path, columns: Sequence[str]) -> Iterator[_Line]:
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file, strict=True)
        try:
            present = reader.fieldnames or ()
            for column in columns:
                if column not in present:
                    raise TraceError(path, 1, column, "this column in the header")
            for values in reader:
                number = reader.line_num
                if number > ROWS_MAX + 1:
                    raise TraceError(path, number, "", f"at most {ROWS_MAX} rows")
                if None in values or None in values.values():
                    raise TraceError(path, number, "", f"{len(present)} fields, as in the header")
                yield _Line(path, number, values)
        except UnicodeDecodeError:
            raise TraceError(path, 0, "", "text in UTF-8") from None
        except csv.Error as error:
            # The inner reader counts the line that failed; the outer one only those it returned.
            line = reader.reader.line_num
            raise TraceError(path, line, "", f"valid CSV ({error})") from None


# The protocol ----------------------------------------------------------------------------------


def typical_classes(pods: Sequence[TracePod], share: float = TYPICAL_SHARE) -> list[dict[str, Any]]:
    """Return the classes that make up `share` of the requests, for `fgd`'s parameter `typical`.

    A class is (cpu_milli, gpu_milli, num_gpu, gpu_spec), CPU-only ones included; the most
    frequent come first, until they cover the share. `weight` is the class's number of requests.
    """
    counts = Counter((pod.cpu_milli, pod.gpus, pod.gpu_milli, pod.models) for pod in pods)
    classes: list[dict[str, Any]] = []
    covered = 0
    for (cpu_milli, gpus, gpu_milli, models), count in sorted(
        counts.items(), key=lambda item: (-item[1], item[0])
    ):
        if covered >= share * len(pods):
            break
        covered += count
        classes.append(
            {
                "cpu_milli": cpu_milli,
                "gpus": gpus,
                "gpu_milli": gpu_milli or GPU_MILLI,
                "models": list(models),
                "weight": count,
            }
        )
    return classes


def arrivals(
    pods: Sequence[TracePod], capacity_milli: int, arrive: float = 1.3, seed: int = 42
) -> list[TracePod]:
    """Return the requests in the order in which they arrive.

    Sorted by name, shuffled, then tuned to `arrive` times the capacity: further requests are
    drawn uniformly, with replacement, until the next one's GPU demand would exceed it; a trace
    that asks for more from the start loses requests at random instead.

    Args:
        pods: The trace.
        capacity_milli: GPU milli of all nodes together.
        arrive: GPU demand to reach, as a multiple of the capacity.
        seed: Of the order and of the draws.

    """
    rng = Random(f"arrivals {seed}")  # noqa: S311  # A reproducible order, not a secret.
    order = sorted(pods, key=lambda pod: pod.name)
    rng.shuffle(order)
    limit = arrive * capacity_milli
    total = sum(pod.demand_milli for pod in order)
    if total > limit:
        return _without_excess(order, total - limit, rng)
    if not total:
        return order  # No number of CPU-only requests would ever reach the limit.
    original = len(order)
    while True:
        pod = order[rng.randrange(original)]
        total += pod.demand_milli
        if total > limit:
            return order
        order.append(pod)


def _without_excess(order: list[TracePod], excess: float, rng: Random) -> list[TracePod]:
    dropped = set[int]()
    for index in rng.sample(range(len(order)), len(order)):
        if excess <= 0:
            break
        if order[index].gpus:
            dropped.add(index)
            excess -= order[index].demand_milli
    return [pod for index, pod in enumerate(order) if index not in dropped]


def permuted_names(nodes: Sequence[TraceNode], seed: int = 42) -> dict[str, str]:
    """Return a new name per node, with a random rank before it.

    Rules break ties by the order of node names; the rank makes that order random, and the same
    for everything that is compared under one seed.
    """
    names = sorted(node.name for node in nodes)
    Random(f"nodes {seed}").shuffle(names)  # noqa: S311  # As for the arrivals.
    return {name: f"{rank:06d}-{name}" for rank, name in enumerate(names)}


def capacity_milli(nodes: Sequence[TraceNode]) -> int:
    """Return the GPU milli of all nodes together."""
    return sum(node.gpus for node in nodes) * GPU_MILLI


def cluster_document(
    nodes: Sequence[TraceNode],
    cluster_id: str = "openb",
    names: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Return the body of `POST /clusters` that describes the nodes as one cluster.

    Args:
        nodes: Its machines.
        cluster_id: Its id.
        names: Node ids to use in place of the names, e.g. `permuted_names`.

    """
    rename: Callable[[str], str] = (names or {}).__getitem__ if names else str
    gpus = sum(node.gpus for node in nodes)
    cores = sum(node.cpu_milli for node in nodes) / 1000
    memory = sum(node.memory_mib for node in nodes)
    return {
        "id": cluster_id,
        "status": "live",
        "nodes": {
            "count": len(nodes),
            "nodeData": [_node_document(node, rename(node.name)) for node in nodes],
        },
        "gpus": {"count": gpus, "memory": 0},
        "vcpus": {"count": cores},
        "memory": memory,
        "swap": 0,
        "tags": ["trace"],
        "clusterMetadata": {"name": cluster_id, "description": "Nodes of a request trace"},
        "config": {"publicHostname": "localhost"},
    }


def _node_document(node: TraceNode, node_id: str) -> dict[str, Any]:
    return {
        "id": node_id,
        "gpus": {
            "count": node.gpus,
            "memory": 0,
            "gpus": [{"modelName": node.model, "memory": 0} for _ in range(node.gpus)],
            "modelNames": [node.model] if node.gpus else [],
        },
        "vcpus": {"count": node.cpu_milli / 1000},
        "memory": node.memory_mib,
        "swap": 0,
    }
