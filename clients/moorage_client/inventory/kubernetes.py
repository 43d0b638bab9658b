"""What `kubectl get nodes -o json` prints, as a cluster document.

Sizes are what pods can have (`status.allocatable`, else `status.capacity`). Devices are what a
device plugin advertises: resources whose name ends in `/gpu`, and NVIDIA's MIG instances
(`nvidia.com/mig-1g.10gb`). Their model and memory are in labels that GPU feature discovery, AMD's
labeller, GKE or Karpenter put on the node. Nodes that are cordoned or not ready are left out.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from moorage_client.inventory.documents import (
    MIB,
    Document,
    Inventory,
    InventoryError,
    cluster_document,
    device,
    machine_key,
    node_document,
)

KINDS: Final = frozenset({"List", "NodeList", "Node"})
"""Values of `kind` that this reader knows."""

MODEL_LABELS: Final = (
    "nvidia.com/gpu.product",
    "amd.com/gpu.product-name",
    "cloud.google.com/gke-accelerator",
    "karpenter.k8s.aws/instance-gpu-name",
)
MEMORY_LABELS: Final = ("nvidia.com/gpu.memory", "karpenter.k8s.aws/instance-gpu-memory")
"""Of each device, in MiB."""
RACK_LABELS: Final = (
    "rack",
    "topology.kubernetes.io/rack",
    "topology.rook.io/rack",
    "cloud.provider.com/topology-rack",
)
"""Kubernetes has no standard name for racks; these are in use."""
REGION_LABEL: Final = "topology.kubernetes.io/region"
REPLICAS_LABEL: Final = "nvidia.com/gpu.replicas"
"""How often the device plugin advertises each device, where it lets pods take turns."""

_LABELS_LEFT_OUT: Final = ("feature.node.kubernetes.io/", "beta.kubernetes.io/")
# Dozens of CPU flags on every node, and outdated twins: no policy places workloads by them.

_MIG: Final = re.compile(r"nvidia\.com/(mig-(\d+c\.)?\d+g\.(\d+)gb\S*)")
_QUANTITY: Final = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(?:([eE][+-]?\d{1,2})|([numkKMGTPE]?i?))")
_FACTORS: Final[Mapping[str, float]] = {
    "n": 1e-9,
    "u": 1e-6,
    "m": 1e-3,
    "": 1,
    **{unit: 1000**power for power, unit in enumerate("kMGTPE", start=1)},
    **{f"{unit}i": 1024**power for power, unit in enumerate("KMGTPE", start=1)},
}


def kubernetes_inventory(source: str, document: Mapping[str, Any], cluster_id: str) -> Inventory:
    """Return the nodes of a Kubernetes cluster as one cluster document.

    Args:
        source: How errors call it.
        document: A `NodeList`, the `List` that kubectl makes of one, or a single `Node`.
        cluster_id: Id of the cluster, since Kubernetes has none; empty: still to be chosen.

    Raises:
        InventoryError: It is a list of something else, or has no node to import, or a field is not
            what the API documents.

    """
    single = document.get("kind") == "Node"
    items = [document] if single else document.get("items")
    if not isinstance(items, list):
        raise InventoryError(source, "items", "a list of nodes, as `kubectl get nodes -o json` has")
    nodes, left_out = [], dict[str, list[str]]()
    regions = set[str]()
    for number, item in enumerate(items):
        reading = _Reading(source, "" if single else f"items[{number}].", item)
        if reading.text("kind") not in {"Node", ""}:  # Items of a typed list have none.
            raise reading.error("kind", "a Node: give the output of `kubectl get nodes -o json`")
        why_not = _why_not(reading)
        if why_not:
            left_out.setdefault(why_not, []).append(reading.name())
            continue
        regions.add(reading.labels().get(REGION_LABEL, ""))
        nodes.append(_node(reading))
    copies = _forget_copies(nodes)
    found = cluster_document(
        cluster_id,
        nodes,
        tag="kubernetes",
        description="Nodes of a Kubernetes cluster",
        region=regions.pop() if len(regions) == 1 else "",
    )
    notes = [
        f"{source}: left out, since {why}: {', '.join(names[:10])}"
        + (f" and {len(names) - 10} more" if len(names) > 10 else "")  # noqa: PLR2004  # Said above.
        for why, names in left_out.items()
    ]
    if copies:
        notes.append(f"{source}: {copies} nodes share their machine id, which then tells nothing")
    if not nodes:  # With --replace, it would empty a cluster.
        raise InventoryError(source, "", "; ".join(["at least one node to import", *notes]))
    return Inventory((found,), tuple(notes))


@dataclass(frozen=True, slots=True)
class _Reading:
    """A node, and how errors call its fields."""

    source: str
    prefix: str
    item: Any

    def error(self, path: str, expected: str) -> InventoryError:
        return InventoryError(self.source, self.prefix + path, expected)

    def at(self, path: str) -> Any:
        value = self.item
        for key in path.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        return value

    def group(self, path: str) -> Mapping[str, Any]:
        value = self.at(path)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self.error(path, "an object")
        return value

    def text(self, path: str) -> str:
        value = self.at(path)
        if value is not None and not isinstance(value, str):
            raise self.error(path, "a text")
        return value or ""

    def name(self) -> str:
        name = self.text("metadata.name")
        if not name:
            raise self.error("metadata.name", "the name of the node")
        return name

    def labels(self) -> dict[str, str]:
        return {
            key: str(value)
            for key, value in self.group("metadata.labels").items()
            if not key.startswith(_LABELS_LEFT_OUT)
        }

    def sizes_path(self) -> str:
        return "status.allocatable" if self.at("status.allocatable") else "status.capacity"

    def quantity(self, resource: str) -> float:
        """Return a quantity of the API, e.g. `63920m` or `528222604Ki`; 0 where there is none."""
        path = self.sizes_path()
        given = self.group(path).get(resource)
        if given is None:
            return 0
        if isinstance(given, int) and not isinstance(given, bool) and given >= 0:
            return given
        found = _QUANTITY.fullmatch(given) if isinstance(given, str) else None
        if not found or found[3] not in {*_FACTORS, None}:
            raise self.error(
                f"{path}.{resource}", f"a quantity such as 64, 500m or 16Gi, not {given!r}"
            )
        return float(found[1] + (found[2] or "")) * _FACTORS[found[3] or ""]

    def count(self, resource: str) -> int:
        number = self.quantity(resource)
        if number != int(number):
            raise self.error(f"{self.sizes_path()}.{resource}", f"a whole number, not {number:g}")
        return int(number)

    def number_label(self, name: str) -> int:
        text = self.labels().get(name, "0")
        if not (text.isascii() and text.isdecimal()):
            raise self.error(f"metadata.labels.{name}", f"a whole number, not {text!r}")
        return int(text)


def _why_not(node: _Reading) -> str:
    """Return why no pod can start on a node now; empty where one can."""
    if node.at("spec.unschedulable") is True:
        return "cordoned"
    conditions = node.at("status.conditions")
    for condition in conditions if isinstance(conditions, list) else ():
        if isinstance(condition, dict) and condition.get("type") == "Ready":
            return "" if condition.get("status") == "True" else "not ready"
    return ""  # Nodes that nobody reports on, such as those of a simulator, have no conditions.


def _node(node: _Reading) -> Document:
    labels = node.labels()
    return node_document(
        node.name(),
        cpu_milli=round(node.quantity("cpu") * 1000),
        memory_mib=int(node.quantity("memory") / MIB),
        devices=[*_whole_devices(node), *_mig_devices(node)],
        rack=next((labels[name] for name in RACK_LABELS if labels.get(name)), ""),
        labels=labels,
        machine_id=machine_key(node.text("status.nodeInfo.machineID")),
        provider_id=node.text("spec.providerID"),
    )


def _forget_copies(nodes: Sequence[Document]) -> int:
    """Leave out machine ids that several nodes have, as copies of one disk; return how many."""
    known = Counter(node.get("machineId") for node in nodes)
    copies = [node for node in nodes if "machineId" in node and known[node["machineId"]] > 1]
    for node in copies:
        del node["machineId"]
    return len(copies)


def _first(labels: Mapping[str, str], names: tuple[str, ...]) -> str:
    return next((name for name in names if labels.get(name)), "")


def _whole_devices(node: _Reading) -> list[Document]:
    labels = node.labels()
    model = labels.get(_first(labels, MODEL_LABELS), "")
    memory_label = _first(labels, MEMORY_LABELS)
    memory = node.number_label(memory_label) if memory_label else 0
    # Time slicing advertises one device several times; Moorage shares devices by itself.
    replicas = max(node.number_label(REPLICAS_LABEL), 1)
    sizes = node.group(node.sizes_path())
    advertised = [name for name in sizes if name.endswith(("/gpu", "/gpu.shared"))]
    count = sum(node.count(name) for name in advertised)
    # The `single` strategy advertises MIG instances under the name of whole devices.
    instance = "-MIG-" in model
    return [
        device(model.removesuffix("-SHARED"), memory, exclusive=instance)
        for _ in range(-(-count // replicas))
    ]


def _mig_devices(node: _Reading) -> list[Document]:
    labels = node.labels()
    model = labels.get("nvidia.com/gpu.product", "")
    devices = []
    for resource in sorted(node.group(node.sizes_path())):
        found = _MIG.fullmatch(resource)
        if not found:
            continue
        profile = found[1]
        memory = node.number_label(f"nvidia.com/{profile}.memory") or int(found[3]) * 1024
        devices += [
            device(
                f"{model}-{profile.replace('mig-', 'MIG-')}".lstrip("-"),
                memory,
                name=f"{profile}-{number}",
                exclusive=True,
            )
            for number in range(node.count(resource))
        ]
    return devices
