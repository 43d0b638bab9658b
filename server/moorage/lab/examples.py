"""The built-in fleet and requests for tests of policies: small, with all kinds of demand.

Three clusters: eight-GPU nodes with two NVLink groups, two NUMA domains and racks; four-GPU nodes
of another model; nodes without GPUs. The first requests use each kind of field. The others are
ordinary and fill the site, since a careless policy fails on a full site. The cluster without GPUs
has no metrics, like any cluster before a client posts metrics.
"""

from typing import Final

from moorage.records.json_values import JsonObject, JsonValue

FILLING: Final = 60
"""Number of ordinary requests at the end: more than the fleet has room for."""


def clusters() -> list[JsonObject]:
    """Return the cluster documents of the built-in fleet."""
    a100 = [
        {"modelName": "A100", "memory": 40_960, "linkGroup": f"link-{n // 4}", "numa": n // 4}
        for n in range(8)
    ]
    t4 = [{"modelName": "T4", "memory": 16_384} for _ in range(4)]
    return [
        _cluster("alpha", 4, 64, 524_288, a100, regionId="north", tags=["training"]),
        _cluster("beta", 4, 32, 131_072, t4, regionId="south", tags=["serving"]),
        _cluster("gamma", 2, 64, 262_144, [], regionId="south", tags=["batch"]),
    ]


def metrics() -> list[JsonObject]:
    """Return the metrics documents of the built-in clusters with GPUs."""
    return [
        {
            "clusterId": cluster["id"],
            "nodes": [
                {
                    "id": node["id"],
                    "vcpu": {"load1m": 1 + row, "load5m": 1 + row, "load15m": 1 + row},
                    "memory": {"totalMem": node["memory"], "freeMem": node["memory"] // (row + 1)},
                    "gpu": {"count": node["gpus"]["count"], "totalFreeMem": 1_000 * (row + 1)},
                }
                for row, node in enumerate(cluster["nodes"]["nodeData"])
            ],
        }
        for cluster in clusters()
        if cluster["nodes"]["nodeData"][0]["gpus"]["count"]
    ]


def requests() -> list[JsonObject]:
    """Return the built-in requests, in the form that clients send."""
    wanted: list[JsonObject] = [
        {"gpus": 1},
        {"gpus": 1, "gpu_milli": 300, "memory_mib": 4_096},
        {"gpus": 1, "gpu_milli": 700},
        {"gpus": 1, "models": ["T4"]},
        {"gpus": 1, "models": ["A100", "H100"], "cpu_milli": 4_000},
        {"gpus": 2, "gpu_memory_mib": 30_000},
        {"gpus": 4, "topology": "nvlink"},
        {"gpus": 4, "topology": "numa"},
        {"gpus": 8, "cpu_milli": 32_000, "memory_mib": 262_144},
        {"gpus": 2, "nodes": 2},
        {"gpus": 1, "nodes": 3, "models": ["T4"]},
        {"gpus": 1, "nodes": 2, "topology": "rack"},
        {"cpu_milli": 16_000, "memory_mib": 65_536},
        {"gpus": 16},
    ]
    lease = {"ttl_seconds": 3_600}
    requests: list[JsonObject] = [{"resources": each, "lease": lease} for each in wanted]
    requests += [
        {"resources": {"gpus": 1}, "clusters": ["beta"], "lease": lease},
        {"resources": {"gpus": 1}},
        {},
    ]
    ordinary = ({"gpus": 1}, {"gpus": 1, "gpu_milli": 500}, {"gpus": 2}, {"cpu_milli": 8_000})
    requests += [
        {"resources": ordinary[number % len(ordinary)], "lease": lease} for number in range(FILLING)
    ]
    return [{"inputs": {}, **each} for each in requests]


def _cluster(
    name: str, nodes: int, cpus: int, memory: int, gpus: list[JsonObject], **more: JsonValue
) -> JsonObject:
    rows = [
        {
            "id": f"{name}-{row}",
            "rack": f"rack-{row // 2}",
            "vcpus": {"count": cpus},
            "memory": memory,
            "gpus": {"count": len(gpus), "gpus": gpus},
        }
        for row in range(nodes)
    ]
    return {"id": name, "nodes": {"nodeData": rows}, **more}
