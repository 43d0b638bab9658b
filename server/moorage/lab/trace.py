"""Reads request traces in the format of openb, and replays the published packing experiment.

`moored replay` and `moored bench` call this module and drive a trace through a real daemon; the
tests of the shipped policies call it, too. Columns are those of the Alibaba cluster-trace-gpu-v2023
files; its table of nodes is read by `moorage_client.inventory`, which imports such tables as
fleets. The protocol is that of "Beware of Fragmentation" (USENIX ATC'23): requests come in random
order, none ends, and more are drawn until their GPU demand is 1.3 times the capacity.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Final

from moorage.model import GPU_MILLI
from moorage.records.json_values import JsonObject
from moorage_client.inventory.openb import TableError as TraceError
from moorage_client.inventory.openb import TraceNode, lines, read_nodes
from moorage_client.inventory.openb import trace_document as cluster_document

__all__ = [
    "TraceError",
    "TraceNode",
    "TracePod",
    "arrivals",
    "capacity_milli",
    "cluster_document",
    "lines",
    "permute_names",
    "read_nodes",
    "read_pods",
    "typical_classes",
]

TYPICAL_SHARE: Final = 0.95
"""Share of the requests that the typical classes, the most frequent ones, make up."""

_Class = tuple[int, int, int, tuple[str, ...]]


TYPICAL_SHARES: Final = {"fgd": TYPICAL_SHARE, "expected_fill": 1.0}
"""Share of all requests that the typical classes make up, by policy with a parameter `typical`."""


@dataclass(frozen=True, slots=True)
class TracePod:
    """A request of a trace: `gpus` devices of `gpu_milli` each, of one of `models` (or any)."""

    name: str
    cpu_milli: int
    memory_mib: int
    gpus: int
    gpu_milli: int
    models: tuple[str, ...] = ()

    @property
    def demand_milli(self) -> int:
        """The demand for all devices together, in thousandths of a GPU."""
        return self.gpus * self.gpu_milli

    def resources(self) -> JsonObject:
        """Return the request's demand as `resources`."""
        wanted: JsonObject = {"cpu_milli": self.cpu_milli, "memory_mib": self.memory_mib}
        if self.gpus:
            wanted |= {"gpus": self.gpus, "gpu_milli": self.gpu_milli}
            if self.models:
                wanted["models"] = list(self.models)
        return wanted


# Reading ---------------------------------------------------------------------------------------


def read_pods(path: Path) -> list[TracePod]:
    """Read a request file: columns `name, cpu_milli, memory_mib, num_gpu, gpu_milli[, gpu_spec]`.

    `gpu_spec` names the accepted models, separated by `|`; other columns are ignored.

    Raises:
        TraceError: A column is missing, or a value is invalid for its column.
        OSError: The file cannot be opened.
    """
    pods = []
    with path.open(encoding="utf-8-sig", newline="") as file:
        for line in lines(path, file, ("name", "cpu_milli", "memory_mib", "num_gpu", "gpu_milli")):
            gpus, gpu_milli = line.whole("num_gpu"), line.whole("gpu_milli", most=GPU_MILLI)
            if bool(gpus) != bool(gpu_milli):
                expected = "more than 0 exactly where num_gpu is more than 0"
                raise TraceError(path, line.number, "gpu_milli", expected)
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


# The protocol ----------------------------------------------------------------------------------


def typical_classes(pods: Sequence[TracePod], share: float = TYPICAL_SHARE) -> list[JsonObject]:
    """Return the classes that make up `share` of the requests, for the parameter `typical`.

    A class is (cpu_milli, gpu_milli, num_gpu, gpu_spec), CPU-only ones included; the most frequent
    come first, until they cover the share. `weight` is the class's number of requests, and
    `memory_mib` their mean memory.
    """
    counts: Counter[_Class] = Counter()
    memory: Counter[_Class] = Counter()
    for pod in pods:
        each = (pod.cpu_milli, pod.gpus, pod.gpu_milli, pod.models)
        counts[each] += 1
        memory[each] += pod.memory_mib
    classes: list[JsonObject] = []
    covered = 0
    for each, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        if covered >= share * len(pods):
            break
        covered += count
        cpu_milli, gpus, gpu_milli, models = each
        classes.append(
            {
                "cpu_milli": cpu_milli,
                "gpus": gpus,
                "gpu_milli": gpu_milli or GPU_MILLI,
                "memory_mib": memory[each] // count,
                "models": list(models),
                "weight": count,
            }
        )
    return classes


def arrivals(
    pods: Sequence[TracePod], capacity_milli: int, arrive: float = 1.3, seed: int = 42
) -> list[TracePod]:
    """Return the requests in the order in which they arrive.

    The requests are sorted by name and shuffled. Then further requests are drawn uniformly, with
    replacement, until the GPU demand would exceed `arrive` times the capacity with the next
    request. A trace that demands more from the start loses random requests for GPUs instead.

    Args:
        pods: The trace.
        capacity_milli: GPUs of all nodes together, in thousandths.
        arrive: GPU demand to reach, as a multiple of the capacity.
        seed: Seed of the order and of the draws.
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


def permute_names(nodes: Sequence[TraceNode], seed: int = 42) -> dict[str, str]:
    """Return new names of nodes, with a random number as prefix.

    Policies break ties by the order of node names. The prefix makes this order random, but the same
    in all runs with one seed.
    """
    names = sorted(node.name for node in nodes)
    Random(f"nodes {seed}").shuffle(names)  # noqa: S311  # As for the arrivals.
    return {name: f"{rank:06d}-{name}" for rank, name in enumerate(names)}


def capacity_milli(nodes: Sequence[TraceNode]) -> int:
    """Return the number of GPUs of all nodes, in thousandths."""
    return sum(node.gpus for node in nodes) * GPU_MILLI


def typical_of(policy: str, pods: Sequence[TracePod]) -> JsonObject:
    """Return the parameters of a policy that describe the typical requests of a trace."""
    share = TYPICAL_SHARES.get(policy)
    return {} if share is None else {"typical": typical_classes(pods, share)}
