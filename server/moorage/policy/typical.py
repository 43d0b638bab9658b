"""Typical requests of a fleet, and the frequency of each kind, given or learnt.

Policies that rate a node by expected requests call this module. `read_typical` reads the mix
from a parameter; a `MixLearner` counts the requests that the policy has seen, in the policy's
`context`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from moorage.model import GPU_MILLI, Demand
from moorage.policy.view import FleetView
from moorage.records.json_values import JsonMapping, JsonObject

KINDS_MAX: Final = 512
"""At most this many kinds of request in a mix: the most frequent ones."""
KIND_CHARACTERS_MAX: Final = 200
"""A request is counted if its description has at most this many characters."""

NODE_TYPES_MAX: Final = 64
"""At most this many types of node; nodes of further types are treated as of the first type."""


@dataclass(frozen=True)
class RequestKind:
    """A kind of request; a request for several GPUs needs whole GPUs.

    Attributes:
        cpu_milli: The requested CPU.
        gpus: Number of requested GPUs; 0: CPU alone.
        gpu_milli: Requested milli of each GPU.
        memory_mib: The requested memory.
        models: Accepted GPU models; empty: any model.
        weight: Frequency of the kind, in any unit.
    """

    cpu_milli: int
    gpus: int = 0
    gpu_milli: int = GPU_MILLI
    memory_mib: int = 0
    models: tuple[str, ...] = ()
    weight: float = 1.0

    @property
    def milli(self) -> int:
        """The GPU milli that a request of this kind takes."""
        return self.gpus * self.gpu_milli


def read_typical(raw: Sequence[JsonMapping]) -> list[RequestKind]:
    """Return a parameter `typical` as a mix.

    Args:
        raw: Objects with `cpu_milli`, `gpus` (or `num_gpu`), `gpu_milli`, `memory_mib`, `models`
            and `weight`; defaults: 0, whole GPUs, any model, and a weight of 1.
    """
    kinds = []
    for kind in raw:
        gpus = int(kind.get("gpus", kind.get("num_gpu", 0)))
        kinds.append(
            RequestKind(
                cpu_milli=int(kind.get("cpu_milli", 0)),
                gpus=gpus,
                gpu_milli=int(kind.get("gpu_milli") or GPU_MILLI) if gpus == 1 else GPU_MILLI,
                memory_mib=int(kind.get("memory_mib", 0)),
                models=tuple(kind.get("models", ())),
                weight=float(kind.get("weight", 1)),
            )
        )
    return mix(kinds)


def mix(kinds: Sequence[RequestKind]) -> list[RequestKind]:
    """Return the most frequent kinds first, their weights as shares of all requests."""
    total = sum(kind.weight for kind in kinds)
    ranked = sorted((k for k in kinds if k.weight > 0), key=lambda kind: -kind.weight)
    return [replace(kind, weight=kind.weight / total) for kind in ranked[:KINDS_MAX]]


def node_sorts(
    kinds: Sequence[RequestKind], fleet: FleetView
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.int64]]:
    """Return which kinds of request each type of node may serve, and the type of each node.

    A type depends on the GPU model and on whether the GPUs may be shared, not on amounts. A node
    with mixed GPUs has the type of its first GPU.

    Returns:
        bool `[types, kinds]`, and int64 `[nodes]`.
    """
    types: dict[tuple[bool, ...], int] = {}
    type_of = np.zeros(len(fleet), np.int64)
    for code, model in enumerate(fleet.models):
        for alone in (False, True):
            these = (fleet.gpu_model[:, 0] == code) & (fleet.gpu_exclusive[:, 0] == alone)
            if not these.any():
                continue
            serves = tuple(
                not kind.gpus
                or (
                    (not kind.models or model in kind.models)
                    and not (alone and kind.gpu_milli < GPU_MILLI)
                )
                for kind in kinds
            )
            if len(types) < NODE_TYPES_MAX:
                types.setdefault(serves, len(types))
            type_of[these] = types.get(serves, 0)
    return np.array(list(types) or [(True,) * len(kinds)], np.bool_), type_of


class MixLearner:
    """The mix of a fleet without a description: assumed at first, then learnt from requests.

    The policy's `context`, which outlives the policy's instance, has `seen`: a count and the sum of
    the demanded memory by kind. `seen` is updated once per `BATCH` requests, since the server has
    to transfer a changed context. A copy of `seen` becomes `used`, the mix in use, each time the
    count has doubled (from `COUNT_MAX` on: was halved), even if the mix hardly changed: large
    requests are rare, and a later update refused more of them in measurements. `used` is in the
    context, too, so that a new instance continues with the same mix.
    """

    BATCH: Final = 64
    COUNT_MAX: Final = 16_384
    """Above this number of counted requests, all counts are halved, so that old requests fade."""

    def __init__(self) -> None:
        self._fresh: dict[str, tuple[int, int]] = {}
        self._fresh_count = 0

    def observe(self, demand: Demand, context: JsonObject) -> bool:
        """Count a request; return whether `typical` now gives another mix."""
        name = f"{demand.cpu_milli} {demand.gpus} {demand.gpu_milli} {'|'.join(demand.models)}"
        if len(name) <= KIND_CHARACTERS_MAX:
            _add(self._fresh, name, demand.nodes, demand.nodes * demand.memory_mib)
        self._fresh_count += 1
        if self._fresh_count < self.BATCH:
            return False
        seen = dict(context.get("seen", {}))
        for name, (count, memory) in self._fresh.items():
            _add(seen, name, count, memory)
        self._fresh, self._fresh_count = {}, 0
        due = context.get("due", self.BATCH)
        if _total(seen) > self.COUNT_MAX:
            due = 0  # The count no longer doubles: update at each halving.
            # Never to zero: the mean memory divides by the count.
            seen = {name: ((n + 1) // 2, (memory + 1) // 2) for name, (n, memory) in seen.items()}
        frequent = sorted(seen, key=lambda name: (-seen[name][0], name))[:KINDS_MAX]
        context["seen"] = seen = {name: seen[name] for name in frequent}
        if _total(seen) < due:
            return False
        context["due"] = 2 * _total(seen)
        context["used"] = seen
        return True

    def typical(self, fleet: FleetView, context: JsonMapping) -> list[RequestKind]:
        """Return the mix in use: the requests counted at the last update, and the assumed mix."""
        kinds = guess(fleet)
        for name, (count, memory) in context.get("used", {}).items():
            cpu_milli, gpus, gpu_milli, models = name.split(" ", 3)
            kinds.append(
                RequestKind(
                    cpu_milli=int(cpu_milli),
                    gpus=int(gpus),
                    gpu_milli=int(gpu_milli) if gpus == "1" else GPU_MILLI,
                    memory_mib=memory // count,
                    models=tuple(models.split("|")) if models else (),
                    weight=float(count),
                )
            )
        return mix(kinds)


def guess(fleet: FleetView) -> list[RequestKind]:
    """Return the assumed mix before the first request; it has the weight of 30 requests.

    Most requests are for one GPU with half of its CPU, some for shares, some for CPU alone. One in
    a hundred is for all GPUs of a largest node, so that such nodes stay whole for such requests.
    """
    devices = (fleet.gpu_total > 0).sum(1)
    cpu_each = int(fleet.cpu_total.sum() // max(1, 2 * devices.sum()))
    kinds = [
        RequestKind(cpu_each, 1, weight=18.0),
        RequestKind(cpu_each // 2, 1, GPU_MILLI // 2, weight=6.0),
        RequestKind(cpu_each // 4, 1, GPU_MILLI // 4, weight=3.0),
        RequestKind(cpu_each, weight=3.0),
    ]
    largest = int(devices.max(initial=0))
    if largest > 1:
        cpu = int(np.median(fleet.cpu_total[devices == largest])) // 2
        kinds.append(RequestKind(cpu, largest, weight=0.3))
    return kinds


def _add(counts: dict[str, tuple[int, int]], name: str, count: int, memory: int) -> None:
    known = counts.get(name, (0, 0))
    counts[name] = (known[0] + count, known[1] + memory)


def _total(counts: Mapping[str, Sequence[int]]) -> int:
    return sum(each[0] for each in counts.values())
