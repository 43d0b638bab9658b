"""Labels of nodes, for policies that choose machines by price and by capacity type.

Labels come from the cluster documents (`nodes.nodeData[].labels`), where imports put those of
Kubernetes and Ray. Authors' policies inside a cell, and the policies that ship with
Moorage, read labels as follows:

    def __init__(self, rule_id, settings, parameters):
        self._labels = NodeLabels()

    def eval(self, parameters, input_data, context):
        fleet = input_data["fleet"]
        zones = self._labels.column(fleet, input_data["cluster_data"], zone_of)
"""

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

from moorage.policy.view import FleetView
from moorage.records.json_values import JsonMapping

T = TypeVar("T")

COLUMNS_MAX: Final = 64
"""At most this many cached columns; a further one clears the cache."""
_NO_LABELS: Final[Mapping[str, str]] = {}

CAPACITY_LABELS: Final = (
    "karpenter.sh/capacity-type",
    "eks.amazonaws.com/capacityType",
    "cloud.google.com/gke-provisioning",
    "kubernetes.azure.com/scalesetpriority",
    "ray.io/market-type",
)
"""Labels that say how a machine is bought; the first one that a node has is used."""
_SPOT_FLAGS: Final = ("cloud.google.com/gke-spot", "cloud.google.com/gke-preemptible")
_SAME: Final = {
    "preemptible": "spot",
    "standard": "on-demand",
    "regular": "on-demand",
    "capacity-block": "reserved",
}


class NodeLabels:
    """The labels of all nodes, read from the documents once per inventory.

    A policy makes one object in its constructor. The object is a cache: labels are part of the
    inventory, so a changed label changes `FleetView.layout`, which clears the cache.
    """

    def __init__(self) -> None:
        self._nodes: Any = None
        self._layout = -1
        self._read: set[str] = set()
        self._labels: dict[tuple[str, str], dict[str, str]] = {}
        self._columns: dict[Callable[[Mapping[str, str]], Any], tuple[Any, ...]] = {}

    def column(
        self, fleet: FleetView, cluster_data: JsonMapping, read: Callable[[Mapping[str, str]], T]
    ) -> tuple[T, ...]:
        """Return the result of `read` for each node's labels, one value per row.

        Args:
            fleet: The view; the result has one value for each of its rows.
            cluster_data: The `cluster_data` of `input_data`. Nodes of clusters that it lacks have
                no labels here; the request may not use them anyway.
            read: A function of the labels alone, the same object every time: its values are cached,
                and the same tuple is returned, until the inventory changes.
        """
        if self._nodes is not fleet.node_ids or self._layout != fleet.layout:
            self._nodes, self._layout = fleet.node_ids, fleet.layout
            self._read.clear()
            self._labels.clear()
            self._columns.clear()
        if len(self._read) < len(fleet.cluster_ids) and not cluster_data.keys() <= self._read:
            self._read_all(cluster_data)
        column = self._columns.get(read)
        if column is None:
            if len(self._columns) >= COLUMNS_MAX:
                self._columns.clear()
            labels = self._labels
            column = tuple(read(labels.get(node, _NO_LABELS)) for node in fleet.node_ids)
            self._columns[read] = column
        return column

    def _read_all(self, cluster_data: JsonMapping) -> None:
        self._columns.clear()
        for cluster_id, entry in cluster_data.items():
            self._read.add(cluster_id)
            for node in (entry["data"].get("nodes") or {}).get("nodeData") or ():
                labels = node.get("labels") or {}
                texts = {str(name): _text(value) for name, value in labels.items()}
                self._labels[cluster_id, str(node.get("id"))] = texts


def capacity_type(labels: Mapping[str, str]) -> str:
    """Return the capacity type of a machine: `spot`, `reserved`, `on-demand` or another value.

    The value is that of a label in `CAPACITY_LABELS` (Karpenter, EKS, GKE, AKS, Ray), in lower
    case with hyphens; `preemptible` counts as spot, and a machine without such a label as on
    demand.
    """
    for name in CAPACITY_LABELS:
        if value := labels.get(name):
            value = value.lower().replace("_", "-")
            return _SAME.get(value, value)
    spot = any(labels.get(name) == "true" for name in _SPOT_FLAGS)
    return "spot" if spot else "on-demand"


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)
