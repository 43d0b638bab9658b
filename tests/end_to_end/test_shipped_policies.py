"""Every shipped policy on a real daemon; those that read documents and metrics, with such."""

import pytest
from served import cluster, serving

from moorage_policies import catalog

pytestmark = pytest.mark.heavy

PRICE = "moorage.io/gpu-hour-price"
NAMES = [f"site-{number:02}" for number in range(40)]


def metrics(name: str, percent: float) -> dict:
    """Return what a cluster's two nodes report: all GPUs and cores so busy."""
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
    """A daemon with forty clusters of two nodes, labels, metrics and every shipped policy."""
    with serving() as server:
        for number, name in enumerate(NAMES):
            document = cluster(name, tags=[f"tag-{number % 3}"])
            for node in document["nodes"]["nodeData"]:
                node["labels"] = {PRICE: str(100 - number)}
                node["labels"] |= {"karpenter.sh/capacity-type": "spot"} if number == 23 else {}
            server.register(document)
            server.http.post("/cluster", json=metrics(name, 90)).raise_for_status()
        server.publish(*map(catalog.document, catalog.shipped()))
        yield server
        assert server.log() == "", "the daemon had something to complain about"


def asked(server, policy, **more):
    reply = server.ask(f"{policy}:1.0-stable", **{"resources": {"gpus": 1}} | more)
    assert reply["success"], reply
    return reply


def held(server, reply):
    """Give a lease back and return its shares."""
    lease = reply["lease"]
    server.release(lease)
    return lease["placement"]


@pytest.mark.parametrize("policy", catalog.shipped())
def test_it_is_granted_what_it_proposes(server, policy):
    resources = {"gpus": 1, "gpu_milli": 500, "cpu_milli": 1000, "nodes": 2}
    reply = asked(server, policy, resources=resources, lease={"ttl_seconds": 60})
    shares = held(server, reply)
    assert len({share["node_id"] for share in shares}) == 2
    assert all(len(share["gpus"]) == 1 for share in shares)


def test_least_loaded_follows_the_metrics_as_they_are_posted(server):
    every_time = {"parameters": {"refresh_seconds": 0}}
    for idle in ("site-31", "site-07"):
        server.http.post("/cluster", json=metrics(idle, 5)).raise_for_status()
        assert asked(server, "least_loaded", **every_time)["data"]["cluster_id"] == idle
        server.http.post("/cluster", json=metrics(idle, 95)).raise_for_status()
    one_gpu = metrics("site-12", 80)
    one_gpu["nodes"][1]["gpus"][2]["cudaUtilization"] = 0
    server.http.post("/cluster", json=one_gpu).raise_for_status()
    found = asked(server, "least_loaded", **every_time)["data"]
    assert (found["node_id"], found["gpus"]) == ("site-12-1", ["2"])


def test_cheapest_reads_labels_and_notices_when_they_change(server):
    assert asked(server, "cheapest")["data"]["cluster_id"] == "site-39"
    document = cluster("site-05", tags=["tag-2"])
    for node in document["nodes"]["nodeData"]:
        node["labels"] = {PRICE: "0.5"}
    server.http.put("/clusters/site-05", json={"$set": document}).raise_for_status()
    assert asked(server, "cheapest")["data"]["cluster_id"] == "site-05"
    some = asked(server, "cheapest", clusters=["site-01", "site-02"])
    assert some["data"]["cluster_id"] == "site-02"


def test_spot_first_finds_the_one_spot_site(server):
    assert asked(server, "spot_first")["data"]["cluster_id"] == "site-23"


def test_similarity_ranks_a_search_and_places_by_it(server):
    like = {"like": "site-04", "weights": {"tags": 1}}
    rank = {"policyRuleURI": "similarity:1.0-stable", "parameters": like | {"return": 4}}
    search = {"matchType": "cluster", "rankingPolicyRule": rank}
    answer = server.http.post("/api/similarity-search", json=search)
    found = [document["id"] for document in answer.raise_for_status().json()["data"]]
    assert found == ["site-01", "site-07", "site-10", "site-13"]
    near = asked(server, "similarity", clusters=["site-02", "site-10"], parameters=like)
    assert near["data"]["cluster_id"] == "site-10"
