"""Metrics documents: accepts both spellings of fields, and computes totals over nodes.

The embedded catalog calls `read_metrics_document` for every document that it stores. The format is
that of docs/reference/allocation-server.md, "Metrics documents"; totals follow the section
"Aggregation" of that page.
"""

import re
from collections.abc import Sequence
from typing import Final

from moorage.catalog.documents.encoding import cluster_id_of
from moorage.catalog.limits import NODES_PER_CLUSTER_MAX
from moorage.catalog.values import Document
from moorage.model import ClusterId
from moorage.protocol.faults import ServiceError
from moorage.records.json_values import JsonMapping, JsonValue

TREE_DEPTH_MAX: Final = 16
"""Maximum levels of groups in a node's metrics; deeper ones are not added up."""

_LOAD: Final = re.compile(r"load_?(\d+m)")
# Identity and lists (the devices of `gpus`) have no total.
_NOT_ADDED: Final = frozenset({"id", "nodeId", "gpu_id", "timestamp"})


def read_metrics_document(given: JsonValue) -> tuple[ClusterId, Document]:
    """Check a metrics document, and add missing fields.

    Args:
        given: The document as it was posted; it is not changed.

    Returns:
        The cluster's id, and the document. The document has `nodes` and `node` (the same list),
        both `load5m` and `load_5m` if it had either, and `cluster`, by default added up from the
        nodes.

    Raises:
        ServiceError: `bad_message` naming the field.
    """
    if not isinstance(given, dict):
        raise ServiceError.wrong_field("body", "a metrics document (an object)")
    cluster_id = cluster_id_of(given.get("clusterId"), "clusterId")
    document = {**given}
    name = "nodes" if given.get("nodes") is not None else "node"
    trees = given.get(name)
    if trees is not None:
        if not isinstance(trees, list) or len(trees) > NODES_PER_CLUSTER_MAX:
            raise ServiceError.wrong_field(
                name, f"a list of at most {NODES_PER_CLUSTER_MAX} node trees"
            )
        for number, tree in enumerate(trees):
            if not isinstance(tree, dict):
                raise ServiceError.wrong_field(f"{name}[{number}]", "a node tree (an object)")
        document["nodes"] = document["node"] = [_with_both_loads(tree) for tree in trees]
    totals = given.get("cluster")
    if not totals and trees:
        totals = aggregate(trees)
    if totals is not None:
        if not isinstance(totals, dict):
            raise ServiceError.wrong_field("cluster", "an object of groups")
        document["cluster"] = _with_both_loads(totals)
    return cluster_id, document


def aggregate(trees: Sequence[JsonMapping]) -> Document:
    """Return the cluster's metrics, aggregated over its nodes, with the same structure.

    Values are added up. Exceptions: `averageUtil`, `avg…` and `load…` are averaged, without nodes
    that have no devices (`count` 0); `maxDisk` is the largest value, `minDisk` the smallest.
    """
    return _merge(trees, 0)


def _merge(groups: Sequence[JsonMapping], depth: int) -> Document:
    merged: Document = {}
    for key in dict.fromkeys(key for group in groups for key in group if key not in _NOT_ADDED):
        values = [group[key] for group in groups if key in group]
        nested = [value for value in values if isinstance(value, dict)]
        if nested and depth < TREE_DEPTH_MAX:
            merged[key] = _merge(nested, depth + 1)
            continue
        if _is_average(key):
            values = [g[key] for g in groups if key in g and g.get("count", 1) != 0]
        numbers = [
            value
            for value in values
            if isinstance(value, (int, float)) and not isinstance(value, bool)
        ]
        if numbers:
            merged[key] = _total(key, numbers)
        elif _is_average(key) and any(isinstance(group.get(key), (int, float)) for group in groups):
            merged[key] = 0  # No node has devices: the group keeps its shape.
    return merged


def _is_average(key: str) -> bool:
    return key == "averageUtil" or key.startswith(("avg", "load"))


def _total(key: str, numbers: Sequence[float]) -> float:
    if _is_average(key):
        return sum(numbers) / len(numbers)
    if key == "maxDisk":
        return max(numbers)
    return min(numbers) if key == "minDisk" else sum(numbers)


def _with_both_loads(tree: JsonMapping) -> Document:
    """Return a copy whose `vcpu` has every load average under `load5m` and `load_5m`."""
    copy = {**tree}
    vcpu = tree.get("vcpu")
    if isinstance(vcpu, dict):
        both = {**vcpu}
        for key, value in vcpu.items():
            if found := _LOAD.fullmatch(key):
                both.setdefault(f"load{found[1]}", value)
                both.setdefault(f"load_{found[1]}", value)
        copy["vcpu"] = both
    return copy
