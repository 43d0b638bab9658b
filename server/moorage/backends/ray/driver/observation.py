"""Reads the capacity and use of a Ray cluster, and requests more capacity from its autoscaler.

The functions may run in a task on the cluster; Ray sends their code there.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from moorage.records.json_values import JsonObject


def observe(server: str) -> JsonObject:
    """Return the live nodes, their free resources, and the resources of each worker process.

    Args:
        server: Id of the server. Its placement groups, and those of slice pools, count as leased.

    A `ray://` client cannot make these calls of Ray, so it must run this function on the cluster.
    """
    import ray  # noqa: PLC0415  # This function travels to the cluster.
    from ray._private.internal_api import node_stats  # noqa: PLC0415  # Not public.
    from ray._private.state import available_resources_per_node  # noqa: PLC0415  # As above.

    free = available_resources_per_node()  # type: ignore[no-untyped-call]  # Ray has no types.
    alive = [each for each in ray.nodes() if each["Alive"]]  # type: ignore[no-untyped-call]  # As above.

    def workers(node: JsonObject) -> list[JsonObject] | None:
        try:
            address, port = node["NodeManagerAddress"], node["NodeManagerPort"]
            stats = node_stats(address, port, include_memory_info=False)  # type: ignore[no-untyped-call]  # As above.
        except Exception:  # noqa: BLE001  # Ray lists a lost node for a while.
            return None
        found = []
        for worker in stats.core_workers_stats:
            used: dict[str, dict[str, float]] = {}
            group = ""
            for name, resource in worker.used_resources.items():
                kind, _, reserved = name.partition("_group_")
                group = reserved.rpartition("_")[2] or group
                for slot in resource.resource_slots:
                    used.setdefault(kind, {})[str(slot.slot)] = slot.allocation
            if used:
                found.append({"actor": worker.actor_id.hex(), "group": group, "used": used})
        return found

    leased: dict[str, list[JsonObject]] = {}
    for group_id, group in ray.util.placement_group_table().items():
        if (
            group["name"].startswith(("moorage-lease/", f"{server}/"))
            and group["state"] != "REMOVED"
        ):
            for bundle, node_id in group["bundles_to_node_id"].items():
                held = {"group": group_id, "resources": group["bundles"][bundle]}
                leased.setdefault(node_id, []).append(held)

    with ThreadPoolExecutor(16) as threads:
        answers = list(threads.map(workers, alive))
    return {
        "nodes": [
            {
                "id": node["NodeID"],
                "name": node.get("NodeName", ""),
                "address": node["NodeManagerAddress"],
                "resources": node.get("Resources", {}),
                "labels": node.get("Labels", {}),
                "free": free.get(node["NodeID"], {}),
                "answers": found is not None,
                "workers": found or [],
                "leased": leased.get(node["NodeID"], []),
            }
            for node, found in zip(alive, answers, strict=True)
        ]
    }


def request(bundles: Sequence[Mapping[str, float]]) -> None:
    """Request from Ray's autoscaler a cluster that can hold these bundles."""
    from ray.autoscaler.sdk import request_resources  # noqa: PLC0415  # This function travels to the cluster.

    request_resources(bundles=[dict(each) for each in bundles])
