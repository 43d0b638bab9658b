"""Converts a Node of the Kubernetes API to the document of a machine.

The client's import of `kubectl get nodes -o json` and the backend that watches a cluster call this
module, so both give a machine the same ids, labels and sizes. Sizes are the amounts that pods can
have (`status.allocatable`, else `status.capacity`). Devices are the resources of a device plugin:
resources whose name ends in `/gpu`, and NVIDIA's MIG instances (`nvidia.com/mig-1g.10gb`). Model
and memory of devices are in labels that GPU feature discovery, AMD's labeller, GKE or Karpenter put
on the node.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from moorage.protocol.cluster_documents import MIB, device, machine_key, node_document
from moorage.protocol.registry import Document
from moorage.records.json_values import JsonMapping, JsonValue

MODEL_LABELS: Final = (
    "nvidia.com/gpu.product",
    "amd.com/gpu.product-name",
    "cloud.google.com/gke-accelerator",
    "karpenter.k8s.aws/instance-gpu-name",
)
MEMORY_LABELS: Final = ("nvidia.com/gpu.memory", "karpenter.k8s.aws/instance-gpu-memory")
"""Labels with the memory of each GPU, in MiB."""
RACK_LABELS: Final = (
    "rack",
    "topology.kubernetes.io/rack",
    "topology.rook.io/rack",
    "cloud.provider.com/topology-rack",
)
"""Labels that name a node's rack, since Kubernetes has no standard name for racks."""
REGION_LABEL: Final = "topology.kubernetes.io/region"
REPLICAS_LABEL: Final = "nvidia.com/gpu.replicas"
"""Label with the number of pods that may share each device, if pods share devices."""
WHOLE_DEVICES: Final = ("/gpu", "/gpu.shared")
"""Endings of the names of resources that count whole devices."""

_KEEPS_PODS_AWAY: Final = frozenset({"NoSchedule", "NoExecute"})
_LABELS_LEFT_OUT: Final = ("feature.node.kubernetes.io/", "beta.kubernetes.io/")
# Dozens of CPU flags on every node, and outdated twins: no policy places workloads by these.

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


class WrongNodeError(ValueError):
    """A field of a node differs from the API's documentation.

    Args:
        path: The field, e.g. `status.allocatable.cpu`.
        expected: The value that was expected in the field.
    """

    def __init__(self, path: str, expected: str) -> None:
        super().__init__(f"{path}: expected {expected}")
        self.path = path
        self.expected = expected


def quantity(given: JsonValue) -> float | None:
    """Return a quantity of the API, e.g. `63920m` or `528222604Ki`; None: not a quantity."""
    if isinstance(given, int) and not isinstance(given, bool) and given >= 0:
        return given
    found = _QUANTITY.fullmatch(given) if isinstance(given, str) else None
    if not found or found[3] not in {*_FACTORS, None}:
        return None
    return float(found[1] + (found[2] or "")) * _FACTORS[found[3] or ""]


def mig_profile(resource: str) -> str:
    """Return the MIG profile whose instances a resource counts, e.g. `mig-1g.10gb`; empty: none."""
    found = _MIG.fullmatch(resource)
    return found[1] if found else ""


@dataclass(frozen=True, slots=True)
class NodeReading:
    """A Node, from which the document of its machine is made.

    Raises:
        WrongNodeError: In any method: a field does not match the API's documentation.
    """

    item: JsonValue

    def at(self, path: str) -> JsonValue:
        """Return the value at a path; None if the path does not exist."""
        value = self.item
        for key in path.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        return value

    def text(self, path: str) -> str:
        """Return the text at a path; empty if there is none."""
        value = self.at(path)
        if value is not None and not isinstance(value, str):
            raise WrongNodeError(path, "a text")
        return value or ""

    def check_kind(self) -> None:
        """Refuse an object of another kind; items of a typed list have no `kind`."""
        if self.text("kind") not in {"Node", ""}:
            raise WrongNodeError("kind", "a Node: give the output of `kubectl get nodes -o json`")

    def name(self) -> str:
        """Return the node's `metadata.name`."""
        name = self.text("metadata.name")
        if not name:
            raise WrongNodeError("metadata.name", "the name of the node")
        return name

    def labels(self) -> dict[str, str]:
        """Return the node's labels, except those on which no placement depends."""
        return {
            key: str(value)
            for key, value in self._group("metadata.labels").items()
            if not key.startswith(_LABELS_LEFT_OUT)
        }

    def why_not(self) -> str:
        """Return why no pod can start on the node now; empty if a pod can."""
        if self.at("spec.unschedulable") is True:
            return "cordoned"
        conditions = self.at("status.conditions")
        # Nodes that no kubelet reports on, such as those of a simulator, have no conditions.
        for condition in conditions if isinstance(conditions, list) else ():
            if isinstance(condition, dict) and condition.get("type") == "Ready":
                if condition.get("status") != "True":
                    return "not ready"
                break
        taints = self.at("spec.taints")
        for taint in taints if isinstance(taints, list) else ():
            if isinstance(taint, dict) and taint.get("effect") in _KEEPS_PODS_AWAY:
                key = str(taint.get("key"))
                if not key.endswith(WHOLE_DEVICES):  # Such a taint only excludes pods without GPUs.
                    return f"tainted {key}"
        return ""

    def document(self) -> Document:
        """Return the document of the machine."""
        labels = self.labels()
        return node_document(
            self.name(),
            cpu_milli=round(self._quantity("cpu") * 1000),
            memory_mib=int(self._quantity("memory") / MIB),
            devices=[*self._whole_devices(), *self._mig_devices()],
            rack=next((labels[name] for name in RACK_LABELS if labels.get(name)), ""),
            labels=labels,
            machine_id=machine_key(self.text("status.nodeInfo.machineID")),
            provider_id=self.text("spec.providerID"),
        )

    def _group(self, path: str) -> JsonMapping:
        value = self.at(path)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise WrongNodeError(path, "an object")
        return value

    def _sizes_path(self) -> str:
        return "status.allocatable" if self.at("status.allocatable") else "status.capacity"

    def _quantity(self, resource: str) -> float:
        path = self._sizes_path()
        given = self._group(path).get(resource, 0)
        amount = 0 if given is None else quantity(given)
        if amount is None:
            raise WrongNodeError(
                f"{path}.{resource}", f"a quantity such as 64, 500m or 16Gi, not {given!r}"
            )
        return amount

    def _count(self, resource: str) -> int:
        number = self._quantity(resource)
        if number != int(number):
            path = f"{self._sizes_path()}.{resource}"
            raise WrongNodeError(path, f"a whole number, not {number:g}")
        return int(number)

    def _number_label(self, name: str) -> int:
        text = self.labels().get(name, "0")
        if not (text.isascii() and text.isdecimal()):
            raise WrongNodeError(f"metadata.labels.{name}", f"a whole number, not {text!r}")
        return int(text)

    def replicas(self) -> int:
        """Return how many pods may share each device, at least 1."""
        return max(self._number_label(REPLICAS_LABEL), 1)

    def _whole_devices(self) -> list[Document]:
        labels = self.labels()
        model = labels.get(_first(labels, MODEL_LABELS), "")
        memory_label = _first(labels, MEMORY_LABELS)
        memory = self._number_label(memory_label) if memory_label else 0
        sizes = self._group(self._sizes_path())
        count = sum(self._count(name) for name in sizes if name.endswith(WHOLE_DEVICES))
        # The `single` strategy advertises MIG instances under the name of whole devices.
        instance = "-MIG-" in model
        return [
            device(model.removesuffix("-SHARED"), memory, exclusive=instance)
            # Time slicing advertises one device several times; Moorage shares devices by itself.
            for _ in range(-(-count // self.replicas()))
        ]

    def _mig_devices(self) -> list[Document]:
        model = self.labels().get("nvidia.com/gpu.product", "")
        devices = []
        for resource in sorted(self._group(self._sizes_path())):
            found = _MIG.fullmatch(resource)
            if not found:
                continue
            profile = found[1]
            memory = self._number_label(f"nvidia.com/{profile}.memory") or int(found[3]) * 1024
            devices += [
                device(
                    f"{model}-{profile.replace('mig-', 'MIG-')}".lstrip("-"),
                    memory,
                    name=f"{profile}-{number}",
                    exclusive=True,
                )
                for number in range(self._count(resource))
            ]
        return devices


def without_copies(nodes: Iterable[Document]) -> tuple[list[Document], int]:
    """Remove machine ids that several nodes share, as copies of a disk do; also count the nodes.

    An id of several nodes does not identify a machine, and the server registers no machine twice.
    """
    found = list(nodes)
    known = Counter(node.get("machineId") for node in found)
    copies = {each for each, number in known.items() if each and number > 1}
    originals = [
        {name: value for name, value in node.items() if name != "machineId"}
        if node.get("machineId") in copies
        else node
        for node in found
    ]
    return originals, sum(known[each] for each in copies)


def _first(labels: Mapping[str, str], names: tuple[str, ...]) -> str:
    return next((name for name in names if labels.get(name)), "")
