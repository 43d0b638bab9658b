"""A daemon grants each shipped policy's proposals; `tests/policies` checks the preferences."""

import pytest
from served import cluster, serving

from moorage_policies import catalog

pytestmark = pytest.mark.heavy

NAMES = [f"site-{number}" for number in range(4)]


def metrics(name: str, percent: float) -> dict:
    """Return metrics of a cluster's two nodes, with a given load of all GPUs and cores."""
    trees = [
        {
            "id": f"{name}-{number}",
            "vcpu": {"load1m": 64 * percent / 100},
            "gpus": [{"gpu_id": n, "cudaUtilization": percent} for n in range(4)],
        }
        for number in range(2)
    ]
    return {"clusterId": name, "nodes": trees}


@pytest.fixture(scope="module")
def server():
    with serving() as server:
        for name in NAMES:
            server.register(cluster(name))
            server.http.post("/cluster", json=metrics(name, 90)).raise_for_status()
        server.publish(*map(catalog.document, catalog.shipped()))
        yield server
        assert server.log() == "", "the daemon logged a warning or an error"


@pytest.mark.parametrize("policy", catalog.shipped())
def test_each_proposal_of_a_shipped_policy_is_granted(server, policy):
    resources = {"gpus": 1, "gpu_milli": 500, "cpu_milli": 1000, "nodes": 2}
    reply = server.ask(f"{policy}:1.0-stable", resources=resources, lease={"ttl_seconds": 60})
    assert reply["success"], reply
    server.release(reply["lease"])
    shares = reply["lease"]["placement"]
    assert len({share["node_id"] for share in shares}) == 2
    assert all(len(share["gpus"]) == 1 for share in shares)


def test_the_policy_least_loaded_follows_posted_metrics(server):
    def post(document: dict) -> dict:
        server.http.post("/cluster", json=document).raise_for_status()
        more = {"resources": {"gpus": 1}, "parameters": {"refresh_seconds": 0}}
        return server.ask("least_loaded:1.0-stable", **more)["data"]

    for idle in ("site-3", "site-1"):
        assert post(metrics(idle, 5))["cluster_id"] == idle
        assert post(metrics(idle, 95))["cluster_id"] != idle
    one_gpu = metrics("site-2", 80)
    one_gpu["nodes"][1]["gpus"][2]["cudaUtilization"] = 0
    found = post(one_gpu)
    assert (found["node_id"], found["gpus"]) == ("site-2-1", ["2"])
