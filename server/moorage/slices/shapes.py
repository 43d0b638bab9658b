"""Shapes of slices: a TPU slice of a cloud, or a number of hosts with GPUs.

A pool reserves a placement group for each new slice. For GPUs, the group has all hosts of the
slice. For TPUs, it has only the head, which is the first host: the head's node has the name of the
slice as a resource, and so do the nodes of the other hosts.
"""

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from moorage.slices.cluster import NODE_ID_LABEL, SLICE_LABEL, RayNode, largest_resources
from moorage.slices.records import DegradedSlice

CHIPS_ASSUMED: Final = 4
"""Assumed number of chips of a TPU host whose number is unknown."""
_SPREAD: Final = "STRICT_SPREAD"
_TYPE_LABEL: Final = "ray.io/tpu-pod-type"
_TYPE: Final = re.compile(r"(v\d+\w*)-(\d+)")
# The number in these types counts chips; in all other types, the number counts cores, two on each
# chip.
_COUNTED_IN_CHIPS: Final = ("v5e", "v5litepod", "v6e")


@dataclass(frozen=True)
class TpuSlices:
    """Slices of one type of TPU, as Ray declares them.

    The first host of a slice has the resource `TPU-<type>-head`. Each host has a resource with the
    name of its slice, and the resource `TPU`, the number of its chips.

    Args:
        tpu_type: The type, such as `v4-8`.
        host_resources: Other resources that a slice takes of each host, such as `{"CPU": 8}`.
        chips_per_host: Chips that a slice takes of each host; None: all chips of the host.
    """

    tpu_type: str
    host_resources: Mapping[str, float] = field(default_factory=dict)
    chips_per_host: int | None = None

    @property
    def name(self) -> str:
        """The name of a pool of these slices."""
        return self.tpu_type

    @property
    def head(self) -> str:
        """The resource that only the first host of each slice has, and that a pool requests."""
        return f"TPU-{self.tpu_type}-head"

    def bundles(self) -> list[dict[str, float]]:
        """Return the bundles of a new slice's placement group: the resource of the head."""
        return [{self.head: 1}]

    def topology(self) -> dict[str, str]:
        """Return the topology that these bundles need."""
        return {NODE_ID_LABEL: _SPREAD}

    def possible(self, nodes: Sequence[RayNode]) -> int:
        """Return the number of slices that fit on these nodes if all of them are free."""
        return int(sum(node.resources.get(self.head, 0) for node in nodes))

    def hosts_expected(self, chips: float) -> int:
        """Return the number of hosts of a complete slice, by their chips; 0 for an unknown type."""
        found = _TYPE.fullmatch(self.tpu_type.lower())
        if found is None:
            return 0
        cores_per_chip = 1 if found[1] in _COUNTED_IN_CHIPS else 2
        return math.ceil(int(found[2]) / cores_per_chip / (chips or CHIPS_ASSUMED))


@dataclass(frozen=True, kw_only=True)
class GpuSlices:
    """Slices of hosts with GPUs.

    Args:
        gpus_per_host: GPUs of each host that a slice takes.
        hosts: Hosts of a slice, each on a different node.
        label: A node label, such as a rack, that has the same value on all hosts of a slice; hosts
            without this label are omitted. Empty: any hosts.
        resource: A resource of which a slice takes 1 on each host; empty: none.
        gpu_model: Ray's name of the accelerator, such as `H100`; empty: any.
        host_resources: Other resources that a slice takes of each host, such as `{"CPU": 8}`.
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
        """The name of a pool of these slices."""
        return self.gpu_model or "GPU"

    def bundles(self) -> list[dict[str, float]]:
        """Return the bundles of a new slice's placement group: one for each of its hosts."""
        bundle: dict[str, float] = {"GPU": self.gpus_per_host, **self.host_resources}
        if self.resource:
            bundle[self.resource] = 1
        if self.gpu_model:
            bundle[f"accelerator_type:{self.gpu_model}"] = 0.001
        return [bundle] * self.hosts

    def topology(self) -> dict[str, str]:
        """Return the topology that these bundles need."""
        spread = {NODE_ID_LABEL: _SPREAD}
        return {**spread, self.label: "STRICT_PACK"} if self.label else spread

    def possible(self, nodes: Sequence[RayNode]) -> int:
        """Return the number of slices that fit on these nodes if all of them are free."""
        domains: dict[str, list[int]] = {}
        bundle = self.bundles()[0]
        for node in nodes:
            fits = min(int(node.resources.get(name, 0) // need) for name, need in bundle.items())
            if fits and (not self.label or self.label in node.labels):
                domains.setdefault(node.labels.get(self.label, ""), []).append(fits)
        return sum(_spread(fits, self.hosts) for fits in domains.values())


Shape = TpuSlices | GpuSlices


def _spread(fits: Sequence[int], hosts: int) -> int:
    """Return the number of slices of `hosts` different hosts, given how many fit on each host."""
    count = sum(fits) // hosts
    while count and sum(min(each, count) for each in fits) < count * hosts:
        count -= 1
    return count


def find_degraded(shape: Shape, nodes: Sequence[RayNode]) -> list[DegradedSlice]:
    """Return the TPU slices of a type that lack hosts, by the labels of their nodes.

    GPU slices are never degraded: any hosts can form a new one.
    """
    if isinstance(shape, GpuSlices):
        return []
    slices: dict[str, list[RayNode]] = {}
    for node in nodes:
        if SLICE_LABEL in node.labels:
            slices.setdefault(node.labels[SLICE_LABEL], []).append(node)
    found = []
    for name, hosts in sorted(slices.items()):
        expected = shape.hosts_expected(max(host.resources.get("TPU", 0) for host in hosts))
        of_type = any(
            host.labels.get(_TYPE_LABEL) == shape.tpu_type or shape.head in host.resources
            for host in hosts
        )
        if of_type and len(hosts) < expected:
            found.append(DegradedSlice(name, expected, tuple(host.ip for host in hosts)))
    return found


def slices_possible(
    shape: Shape, nodes: Sequence[RayNode], without: Collection[str] = ()
) -> int | None:
    """Return the largest number of slices that the cluster can hold; None if unknown.

    For nodes that an autoscaler may add, only their resources are known. So the number may be too
    large, but never too small.

    Args:
        shape: The shape of a slice.
        nodes: All nodes that are alive.
        without: Names of slices that do not count.
    """
    largest = largest_resources(nodes)
    if largest is None:
        return None
    here = {name: sum(node.resources.get(name, 0) for node in nodes) for name in largest}
    if all(amount <= here[name] for name, amount in largest.items()):
        return shape.possible(
            [each for each in nodes if each.labels.get(SLICE_LABEL) not in without]
        )
    total: dict[str, float] = {}
    for bundle in shape.bundles():
        for name, need in bundle.items():
            total[name] = total.get(name, 0) + need
    return int(min(largest.get(name, 0) // need for name, need in total.items() if need))
