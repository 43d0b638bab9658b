"""Tests of block requests: selection, dry run and choice by policies, over socket and HTTP."""

import json
from collections.abc import Iterator

import pytest
from served import Server, cluster, policy, serving, until

from moorage_policies import catalog

pytestmark = pytest.mark.heavy

# The fewest GPUs of one healthy node with enough free memory in total.
POOLS = policy(
    """
payload = input_data["payload"]
assert input_data["action"] == "dry_run" and input_data["cluster"] == payload["cluster"]
assert input_data["block"] == payload["block"]
need = payload["block"]["needs_mb"]
free = {node["id"]: {gpu["gpu_id"]: gpu["freeMem"] for gpu in node["gpus"]}
        for node in input_data["cluster_metrics"]["nodes"]}
ways = []
for node in payload["healthy_nodes"]:
    gpus = sorted(free.get(node, {}), key=lambda gpu: -free[node][gpu])
    for count in range(1, len(gpus) + 1):
        pooled = sum(free[node][gpu] for gpu in gpus[:count])
        if pooled >= need:
            ways.append((count, pooled - need, node, sorted(gpus[:count])))
            break
if not ways:
    return {"error": f"no node has {need} MB of free GPU memory"}
count, spare, node, gpus = min(ways)
info = {"node_id": node, "gpus": gpus}
return {"selection_score_data": {"score": 1 / count, "node_info": info}}
""",
    "pools:1.0-gpus",
)
# Returns the answer that the block contains, to test the checks.
OBEYS = policy(
    """
block = input_data.get("block") or input_data.get("block_data") or {}
if input_data["action"] == "dry_run":
    answer = block["says"].get(input_data["cluster"]["id"], block["says"].get("*"))
    while answer == "spin":
        pass
    if answer == "raise":
        raise RuntimeError("broken on purpose")
    return answer
if input_data["action"] == "selection":
    every = {"clusters": input_data["filter_result"], "why": self.parameters.get("why")}
    return block.get("selects", every)
lowest = min(input_data["clusters"], key=lambda each: each["score_data"]["score"])
return input_data["clusters"][0]["block_data"].get("chooses", {**lowest, "because": "lowest"})
""",
    "obeys:1.0-block",
)


@pytest.fixture(scope="module")
def site() -> Iterator[Server]:
    """A daemon with three clusters of L4s, one of which is not live, and the block policies."""
    with serving() as server:
        three = {"nodes": 3, "gpus": 4, "model": "L4"}
        server.register(cluster("one", tags=["a"], **three), cluster("two", tags=["b"], **three))
        server.register(cluster("down", status="maintenance", **three))
        server.publish(POOLS, OBEYS, catalog.document("first_fit"))
        measured = {"clusterId": "two", "cluster": {"gpu": {"totalFreeMem": 9_000}}}
        server.http.post("/cluster", json=measured).raise_for_status()
        yield server
        assert server.log() == "", "the daemon logged a warning or an error"


FREE = "cluster.gpu.totalFreeMem"


def only(name: str) -> dict:
    query = {"variable": "id", "operator": "==", "value": name}
    return {"matchType": "cluster", "filter": {"clusterQuery": query}}


def block(resource: str = "", allocator: str = "", where: dict | None = None, **more) -> dict:
    """Return a block document; without URIs the built-in policies decide."""
    parameters = {"filter": where} if where is not None else {}
    policies = {"clusterAllocator": {"policyRuleURI": allocator, "parameters": parameters}}
    policies["resourceAllocator"] = {"policyRuleURI": resource}
    return {"id": "block-1", "policies": policies, **more}


def obeying(where: dict | None = None, **more) -> dict:
    return block("obeys:1.0-block", "obeys:1.0-block", where, **more)


def say(site, document: dict, **more) -> dict:
    return site.say({"input": document, **more})[0]


def score(value, **more) -> dict:
    """Return a score of a cluster, as policies return it."""
    return {"selection_score_data": {"score": value, "node_info": {}, **more}}


def free(site, nodes: dict[int, list[int]]) -> None:
    """Report the free MB of each GPU of nodes of cluster `one`, by node number."""
    rows = [
        {"id": f"one-{node}", "gpus": [{"gpu_id": n, "freeMem": mb} for n, mb in enumerate(gpus)]}
        for node, gpus in nodes.items()
    ]
    site.http.post("/cluster", json={"clusterId": "one", "nodes": rows}).raise_for_status()


@pytest.mark.parametrize(
    ("needs_mb", "nodes", "node", "gpus"),
    [
        (15_000, {0: [12_000] * 2}, "one-0", [0, 1]),
        (20_000, {0: [12_000] * 2, 2: [1, 1, 1, 24_000]}, "one-2", [3]),
        (30_000, {0: [12_000] * 2, 1: [12_000] * 3}, "one-1", [0, 1, 2]),
        # A node in the metrics but not in the registry is not healthy.
        (15_000, {0: [12_000] * 2, 7: [24_000]}, "one-0", [0, 1]),
    ],
)
def test_the_named_resource_allocator_pools_gpus(site, needs_mb, nodes, node, gpus):
    free(site, nodes)
    reply = say(site, block("pools:1.0-gpus", where=only("one"), needs_mb=needs_mb))
    assert reply.get("id") == "one", reply
    assert reply["score_data"]["node_info"] == {"node_id": node, "gpus": gpus}
    assert reply["score_data"]["score"] == 1 / len(gpus)
    assert reply["cluster"]["tags"] == ["a"]
    assert reply["block_data"]["needs_mb"] == needs_mb


def test_a_demand_that_fits_nowhere_is_refused_in_the_policys_words(site):
    free(site, {0: [8_000] * 2})
    error = say(site, block("pools:1.0-gpus", where=only("one"), needs_mb=20_000))["error"]
    assert (error["code"], error["left_out"][0]["cluster_id"]) == ("policy_declined", "one")
    assert "GPU memory" in json.dumps(error)


def test_the_default_mode_of_blocks_is_dry_run_and_select_clusters_stops_after_the_selection(site):
    reply = say(site, block())
    assert set(reply) == {"id", "cluster", "score_data", "block_data"}
    assert reply == say(site, block(), mode="dry_run")
    selection = say(site, block(), mode="select_clusters")
    assert [each["id"] for each in selection["clusters"]] == ["one", "two"]
    assert set(selection) == {"clusters"}
    error = say(site, block(), mode="allocate")["error"]
    assert (error["field"], "dry_run" in error["expected"]) == ("mode", True)


@pytest.mark.parametrize(
    "where",
    [
        only("two"),
        {"header": {}, "body": {"values": only("two")}},
        only("two")["filter"],
        {"body": {"values": only("two")["filter"]}},
        {"clusterQuery": {"variable": "tags", "operator": "IN", "value": ["b"]}},
        {"clusterMetricsQuery": {"variable": FREE, "operator": ">", "value": "8000"}},
    ],
)
def test_a_filter_is_accepted_in_each_form(site, where):
    selection = say(site, block(where=where), mode="select_clusters")
    assert [each["id"] for each in selection["clusters"]] == ["two"]


def test_the_named_cluster_allocator_is_consulted_twice(site):
    document = obeying(says={"one": score(0.9), "two": score(0.2, more=1)})
    document["policies"]["clusterAllocator"]["parameters"]["why"] = "tried"
    reply = say(site, document)
    assert (reply["id"], reply["because"]) == ("two", "lowest")
    assert reply["score_data"] == {"score": 0.2, "node_info": {}, "more": 1}
    selection = say(site, document, mode="select_clusters")
    assert (len(selection["clusters"]), selection["why"]) == (2, "tried")
    assert say(site, {**document, "selects": {"clusters": ["one"]}})["id"] == "one"


def test_block_specifications_list_their_policies(site):
    named = {"values": {"name": "resourceAllocator", "policyRuleURI": "obeys:1.0-block"}}
    filtered = {"name": "clusterAllocator", "parameters": {"filter": only("one")}}
    rules = [named, filtered, {"name": "autoscaler"}]
    reply = say(site, {"policyRulesSpec": rules, "says": {"*": score(0.25)}})
    assert (reply["id"], reply["score_data"]["score"]) == ("one", 0.25)


def test_a_policy_that_fails_for_one_cluster_does_not_affect_other_clusters(site):
    document = block("obeys:1.0-block", says={"one": "raise", "two": score(0.1)})
    assert say(site, document)["id"] == "two"
    answer = site.http.post("/blockActions/dryRun", json=document).json()
    assert answer["data"]["id"] == "two"
    assert "one" in answer["warnings"][0]
    assert "broken on purpose" in answer["warnings"][0]
    numbered = say(site, document, id=7)
    assert (numbered["id"], numbered["data"]["id"], len(numbered["warnings"])) == (7, "two", 1)
    document["says"]["one"] = "spin"
    assert say(site, document)["id"] == "two"
    document["says"]["two"] = "spin"
    error = say(site, document)["error"]
    assert {each["code"] for each in error["left_out"]} == {"policy_timeout"}


def test_very_large_documents_of_clusters_are_returned_completely(site):
    site.register(cluster("vast", note="x" * 900_000))
    try:
        document = obeying(says={"*": score(1)})
        selection = say(site, document, mode="select_clusters")
        notes = {each["id"]: len(each.get("note", "")) for each in selection["clusters"]}
        assert notes == {"one": 0, "two": 0, "vast": 900_000}
        document["says"]["vast"] = score(0.5)
        reply = say(site, document)
        assert (reply["id"], len(reply["cluster"]["note"])) == ("vast", 900_000)
        assert reply["because"] == "lowest"
    finally:
        site.http.delete("/clusters/vast").raise_for_status()


ALLOCATOR = "input.policies.clusterAllocator"
SCORER = "input.policies.resourceAllocator"
FILTER = f"{ALLOCATOR}.parameters.filter"
ODD = {"clusterQuery": {"variable": "id", "operator": "~", "value": 1}}
PATH = {"policies": {"resourceAllocator": {"codePath": "code/function.py"}}}


@pytest.mark.parametrize(
    ("document", "code", "field"),
    [
        ({"policies": 7}, "bad_message", "input.policies"),
        ({"policies": {"clusterAllocator": "x"}}, "bad_message", ALLOCATOR),
        (
            {"policyRulesSpec": [{"values": {}}]},
            "bad_message",
            "input.policyRulesSpec[0].values.name",
        ),
        (block("none:1-x"), "unknown_policy", f"{SCORER}.policyRuleURI"),
        (block(where={"matchType": "block", "filter": {}}), "unsupported", None),
        (block(where=only("nowhere")), "unknown_clusters", FILTER),
        (block(where=only("down")), "unknown_clusters", FILTER),
        (block(where=ODD), "bad_message", f"{FILTER}.clusterQuery.operator"),
        (block(resources={"gpus": -1}), "bad_message", "input.resources.gpus"),
        (block(resources={"nodes": 2}), "bad_message", "input.resources.nodes"),
        (PATH, "unsupported", f"{SCORER}.codePath"),
    ],
    ids=str,
)
def test_the_refusal_of_a_wrong_block_names_the_place_of_the_error(site, document, code, field):
    error = say(site, document)["error"]
    assert error["code"] == code
    assert field in {None, error["field"]}


def test_wrong_resources_of_a_block_are_explained_as_in_a_request(site):
    error = say(site, block(resources={"gpus": "1"}))["error"]
    assert error["expected"] == "a whole number of GPUs between 0 and 1024"


BAD_SCORES = [
    7,
    {"selection_score_data": 1},
    score(1.5),
    score(value=True),
    score("0.5"),
    score(0.5, note="x" * (16 << 10)),
    score(0.5, node_info={"node_id": "two-0"}),
    score(0.5, node_info={"node_id": "one-0", "gpus": [4]}),
    score(0.5, node_info={"node_id": "one-0", "gpus": [1, "1"]}),
    score(0.5, node_info={"gpus": [1]}),
]


@pytest.mark.parametrize("answer", BAD_SCORES, ids=lambda answer: str(answer)[:60])
def test_invalid_scores_are_refused(site, answer):
    error = say(site, block("obeys:1.0-block", where=only("one"), says={"*": answer}))["error"]
    assert (error["code"], error["field"]) == ("policy_bad_output", SCORER)


BAD_CHOICES = [
    {"selects": {"clusters": [{"id": "down"}]}},
    {"selects": {"clusters": ["one", "one"]}},
    {"selects": ["one"]},
    {"chooses": {"id": "down"}},
    {"chooses": []},
    {"chooses": {"id": "one", "score_data": {"score": 2}}},
]
NONE = [{"selects": {"error": "none is good"}}, {"selects": {"clusters": []}}]


@pytest.mark.parametrize("answer", BAD_CHOICES + NONE, ids=str)
def test_invalid_selections_and_choices_are_refused(site, answer):
    error = say(site, obeying(says={"*": score(1)}, **answer))["error"]
    code = "policy_declined" if answer in NONE else "policy_bad_output"
    assert (error["code"], error["field"]) == (code, ALLOCATOR)


def test_a_site_with_external_services_places_blocks_by_their_data(site):
    free(site, {0: [12_000] * 2})
    names = ("CLUSTER_SERVICE_URL", "GLOBAL_CLUSTER_METRICS_URL", "POLICY_DB_URL")
    services = dict.fromkeys((*names, "SEARCH_SERVER_API_URL"), site.running.http)
    with serving(environment=services) as server:
        reply = say(server, block("pools:1.0-gpus", where=only("one"), needs_mb=20_000))
        assert reply["score_data"]["node_info"] == {"node_id": "one-0", "gpus": [0, 1]}
        selection = say(server, obeying(says={"*": score(1)}), mode="select_clusters")
        assert len(selection["clusters"]) == 2
        unknown = say(server, block("none:1-x"))["error"]
        expected = ("unknown_policy", f"{SCORER}.policyRuleURI")
        assert (unknown["code"], unknown["field"]) == expected


def test_select_clusters_over_http_has_no_envelope(site):
    def post(document: dict) -> tuple[int, dict]:
        answer = site.http.post("/blockActions/selectClusters", json=document)
        return answer.status_code, answer.json()

    status, bare = post(block(where=only("one")))
    assert (status, set(bare)) == (200, {"clusters"})
    wrapped = {"input": block(where=only("one")), "mode": "select_clusters"}
    assert post(wrapped) == (200, bare)
    status, refused = post({**wrapped, "mode": "dry_run"})
    assert (status, refused["error"]["field"]) == (400, "mode")
    status, none = post(block(where=only("nowhere")))
    assert (status, none["success"]) == (404, False)


def test_dry_run_over_http_has_an_envelope(site):
    answer = site.http.post("/blockActions/dryRun", json=block(where=only("two"))).json()
    assert (answer["success"], answer["data"]["id"]) == (True, "two")
    assert set(answer) == {"success", "data"}
    refused = site.http.post("/blockActions/dryRun", json={"block": 1 << 70})
    assert (refused.status_code, refused.json()["error"]["field"]) == (400, "input")


def test_allocate_returns_a_task(site):
    def wait_finished(document: dict) -> dict:
        task_id = site.http.post("/blockActions/allocate", json=document).json()["task_id"]
        path = f"/api/tasks/{task_id}"
        until(lambda: site.http.get(path).json()["data"]["status"] != "pending")
        return site.http.get(path).json()["data"]

    done = wait_finished(block(where=only("two")))
    assert (done["status"], done["result"]["id"]) == ("completed", "two")
    failed = wait_finished(block(where=only("nowhere")))
    assert (failed["status"], failed["error"]["code"]) == ("failed", "unknown_clusters")
    assert "result" not in failed
    unknown = site.http.get("/api/tasks/none")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "not_found")
