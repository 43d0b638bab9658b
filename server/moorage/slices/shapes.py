"""What a slice is made of: a TPU slice as its cloud made it, or any hosts with GPUs.

A slot of a pool starts as a placement group. For a TPU slice it is the head alone, which tells
the name of the slice and thereby its hosts; for GPUs it is all hosts at once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from moorage.slices.cluster import NODE_ID_LABEL, RayNode, largest_resources

__all__ = ["GpuSlices", "Shape", "TpuSlices", "slices_possible"]

_SPREAD = "STRICT_SPREAD"


@dataclass(frozen=True)
class TpuSlices:
    """Slices of one type of TPU, as Ray declares them.

    The first host of a slice has the resource `TPU-<type>-head`, each host one of the name of
    its slice, and `TPU` chips.

    Args:
        tpu_type: Such as `v4-8`.
        host_resources: What each host takes beyond its chips, such as `{"CPU": 8}`.
        chips_per_host: Chips that a slice takes of each host; None: all that it has.

    """

    tpu_type: str
    host_resources: Mapping[str, float] = field(default_factory=dict)
    chips_per_host: int | None = None

    @property
    def name(self) -> str:
        """How a pool of them is called."""
        return self.tpu_type

    @property
    def head(self) -> str:
        """The resource that the first host of each slice has."""
        return f"TPU-{self.tpu_type}-head"

    def bundles(self) -> list[dict[str, float]]:
        """Return what a slot reserves first."""
        return [{self.head: 1}]

    def topology(self) -> dict[str, str]:
        """Return how the bundles of a slot spread."""
        return {NODE_ID_LABEL: _SPREAD}

    def possible(self, nodes: Sequence[RayNode]) -> int:
        """Return how many slices these nodes make if all of them are free."""
        return int(sum(node.resources.get(self.head, 0) for node in nodes))


@dataclass(frozen=True, kw_only=True)
class GpuSlices:
    """Slices of hosts with GPUs.

    Args:
        gpus_per_host: GPUs of each host that a slice takes.
        hosts: Hosts of a slice, each another node.
        label: All hosts of a slice have one value of this node label, such as a rack; hosts
            without it are left out. Empty: any hosts.
        resource: A resource that each host has, of which a slice takes 1; empty: none.
        gpu_model: Ray's name of the accelerator, such as `H100`; empty: any.
        host_resources: What each host takes beyond its GPUs, such as `{"CPU": 8}`.

    """

    gpus_per_host: float
    hosts: int = 1
    label: str = ""
    resource: str = ""
    gpu_model: str = ""
    host_resources: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.hosts < 1 or self.gpus_per_host <= 0:
            raise ValueError(
                f"GpuSlices takes at least 1 host and some GPUs, not hosts={self.hosts},"
                f" gpus_per_host={self.gpus_per_host}"
            )

    @property
    def name(self) -> str:
        """How a pool of them is called."""
        return self.gpu_model or "GPU"

    def bundles(self) -> list[dict[str, float]]:
        """Return what a slot reserves: all of its hosts."""
        bundle: dict[str, float] = {"GPU": self.gpus_per_host, **self.host_resources}
        if self.resource:
            bundle[self.resource] = 1
        if self.gpu_model:
            bundle[f"accelerator_type:{self.gpu_model}"] = 0.001
        return [bundle] * self.hosts

    def topology(self) -> dict[str, str]:
        """Return how the bundles of a slot spread."""
        spread = {NODE_ID_LABEL: _SPREAD}
        return {**spread, self.label: "STRICT_PACK"} if self.label else spread

    def possible(self, nodes: Sequence[RayNode]) -> int:
        """Return how many slices these nodes make if all of them are free."""
        domains: dict[str, list[int]] = {}
        bundle = self.bundles()[0]
        for node in nodes:
            fits = min(int(node.resources.get(name, 0) // need) for name, need in bundle.items())
            if fits and (not self.label or self.label in node.labels):
                domains.setdefault(node.labels.get(self.label, ""), []).append(fits)
        return sum(_spread(fits, self.hosts) for fits in domains.values())


Shape = TpuSlices | GpuSlices


def _spread(fits: Sequence[int], hosts: int) -> int:
    """Return how many slices of so many different hosts fit where each host fits some."""
    count = sum(fits) // hosts
    while count and sum(min(each, count) for each in fits) < count * hosts:
        count -= 1
    return count


def slices_possible(shape: Shape, nodes: Sequence[RayNode]) -> int | None:
    """Return the most slices that the cluster can ever hold; None: unknown.

    Nodes that an autoscaler may add count by their resources alone, so this is never too few.
    """
    largest = largest_resources(nodes)
    if largest is None:
        return None
    here = {name: sum(node.resources.get(name, 0) for node in nodes) for name in largest}
    if all(amount <= here[name] for name, amount in largest.items()):
        return shape.possible(nodes)
    total: dict[str, float] = {}
    for bundle in shape.bundles():
        for name, need in bundle.items():
            total[name] = total.get(name, 0) + need
    return int(min(largest.get(name, 0) // need for name, need in total.items() if need))
