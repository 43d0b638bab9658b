"""Reads Ray's nodes: the live ones, their resources, and whether the autoscaler adds more."""

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from moorage.slices.lazy_ray import ray
from moorage.slices.ray_values import RayValue

NODE_ID_LABEL: Final = "ray.io/node-id"
SLICE_LABEL: Final = "ray.io/tpu-slice-name"
_AUTOSCALER_REPORT: Final = b"__autoscaling_status"


@dataclass(frozen=True)
class RayNode:
    """A live node of the Ray cluster."""

    node_id: str
    ip: str
    resources: Mapping[str, float] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)


def alive_nodes() -> dict[str, RayNode]:
    """Return the nodes that are alive, by their ids."""
    return {
        each["NodeID"]: RayNode(
            each["NodeID"],
            each["NodeManagerAddress"],
            each.get("Resources", {}),
            each.get("Labels", {}),
        )
        for each in ray.nodes()  # type: ignore[no-untyped-call]  # Ray has no types for it.
        if each["Alive"]
    }


def addresses() -> dict[str, str]:
    """Return the addresses of all nodes by id, including dead nodes."""
    return {
        each["NodeID"]: each["NodeManagerAddress"]
        for each in ray.nodes()  # type: ignore[no-untyped-call]  # As above.
    }


def draining(node_id: str) -> bool:
    """Return whether Ray drains a node, for example because a cloud reclaims a spot machine."""
    with contextlib.suppress(AttributeError):  # An API of Ray for its own libraries.
        return node_id in _state().get_draining_nodes()
    return False


def largest_resources(nodes: Sequence[RayNode]) -> Mapping[str, float] | None:
    """Return the largest amount of each resource that the cluster can ever have; None if unknown.

    An autoscaler may report its limits. Without an autoscaler, the present nodes are all nodes,
    until a user adds one.
    """
    with contextlib.suppress(AttributeError):  # As above.
        limits = _state().get_max_resources_from_cluster_config()
        if limits is not None:
            return dict(limits)
    if not _autoscaler_is_absent(nodes):
        return None
    total: dict[str, float] = {}
    for node in nodes:
        for name, amount in node.resources.items():
            total[name] = total.get(name, 0) + amount
    return total


def _state() -> RayValue:
    return ray._private.state.state  # noqa: SLF001  # No public API for these two.


def _autoscaler_is_absent(nodes: Sequence[RayNode]) -> bool:
    """Return whether Ray's monitor adds no nodes: it then lists each node as its own type."""
    from ray.experimental.internal_kv import _internal_kv_get  # noqa: PLC0415  # An extra.

    try:
        report = json.loads(_internal_kv_get(_AUTOSCALER_REPORT) or b"{}")
        types = set(report["autoscaler_report"]["active_nodes"])
    except (ValueError, KeyError, TypeError):
        return False
    return bool(types) and types <= {f"node_{node.node_id}" for node in nodes}


def hosts_group_name(head: RayValue) -> str:
    """Return the name of the placement group of a slice's hosts, made of its head group's id."""
    return f"hosts-of-{head.id.hex()}"


def remove_groups(head: RayValue) -> None:
    """Free the placement groups of a slice: that of its head (the first host), and of its hosts.

    Ray does not free these groups when the slice's actor dies: a group lasts as long as its
    creator's job.
    """
    ray.util.remove_placement_group(head)
    with contextlib.suppress(ValueError):  # The hosts were not reserved, or have been freed.
        ray.util.remove_placement_group(ray.util.get_placement_group(hosts_group_name(head)))


def request_bundles(bundles: Sequence[Mapping[str, float]]) -> None:
    """Request nodes for bundles from the autoscaler; this replaces earlier requests."""
    if ray.is_initialized():
        from ray.autoscaler.sdk import request_resources  # noqa: PLC0415  # An extra.

        request_resources(bundles=[dict(each) for each in bundles])
