"""Tests of searches for policies and blocks, of scores, and of the input of rankings."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from served import cluster, policy, serving

from moorage_policies import catalog

SCORES = policy(
    "ranked = sorted(input_data, key=lambda each: -each['reputation'])\n"
    "for number, each in enumerate(ranked):\n"
    "    each['score'] = 1 / (1 + number)\n"
    "return ranked",
    "scores:1.0-x",
)
FREE = policy(
    "for each in input_data:\n"
    "    gpu = each['metrics'].get('cluster', {}).get('gpu', {})\n"
    "    each['free'] = gpu.get('totalFreeMem', 0)\n"
    "return input_data",
    "free:1.0-x",
)
BRIEF = policy(
    "return [{'id': each['id'], 'score': 7} for each in input_data] + ['east']", "brief:1.0-x"
)
BY_LOAD = policy(
    "busy = {}\n"
    "for each in self.settings['block_metrics_api'].query_blocks({}):\n"
    "    busy[each['blockId']] = each['instances'][0]['load']\n"
    "one = self.settings['block_metrics_api'].get_block('llama')\n"
    "free = self.settings['cluster_metrics_api'].get_cluster('east')['cluster']\n"
    "try:\n"
    "    self.settings['block_metrics_api'].get_block('none')\n"
    "    raised = ''\n"
    "except Exception as error:\n"
    "    raised = str(error)\n"
    "ranked = sorted(input_data, key=lambda each: busy[each['id']])\n"
    "for each in ranked:\n"
    "    each['said'] = [one['blockId'], free['gpu']['totalFreeMem'], raised]\n"
    "return ranked",
    "by_load:1.0-x",
)


@pytest.fixture(scope="module")
def server():
    with serving() as server:
        for number, name in enumerate(("east", "north", "west")):
            server.register(cluster(name, tags=[name], reputation=number))
        metrics = {"clusterId": "east", "nodes": [{"id": "east-0", "gpu": {"totalFreeMem": 5}}]}
        server.http.post("/cluster", json=metrics).raise_for_status()
        server.publish(catalog.document("first_fit"), SCORES, FREE, BRIEF, BY_LOAD)
        for name, where, load in (("llama", "east", 3), ("whisper", "west", 1)):
            block = {"id": name, "cluster": {"id": where}, "kind": "model"}
            assert server.http.post("/blocks", json=block).status_code == 201
            measured = {"blockId": name, "instances": [{"load": load}]}
            assert server.http.post("/block", json=measured).status_code == 201
        yield server
        assert server.log() == ""


def find(server, body, path="/api/no-ir/filter"):
    answer = server.http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["data"]


def rank(server, match_type, uri="", **parameters):
    rule = {"policyRuleURI": uri, "parameters": parameters}
    body = {"matchType": match_type, "rankingPolicyRule": rule}
    return find(server, body, "/api/similarity-search")


def test_a_ranking_policy_can_add_its_own_fields_to_the_answer(server):
    found = rank(server, "cluster", "scores:1.0-x", **{"return": 2})
    assert [(each["id"], each["score"]) for each in found] == [("west", 1.0), ("north", 0.5)]
    assert found[0]["nodes"] == server.http.get("/clusters/west").json()["nodes"]
    found = rank(server, "cluster", "brief:1.0-x")
    names = ("east", "north", "west")
    assert [(each["id"], each["score"]) for each in found] == [(name, 7) for name in names]
    # Candidates of a request are ranked in the same way.
    search = {"matchType": "cluster", "rankingPolicyRule": {"policyRuleURI": "scores:1.0-x"}}
    reply = server.ask(search=search, resources={"gpus": 1})
    assert reply["data"]["cluster_id"]


def test_a_ranking_policy_gets_the_metrics_of_the_clusters(server):
    measured = {
        each["id"]: [each["free"], each["metrics"].get("clusterId")]
        for each in rank(server, "cluster", "free:1.0-x")
    }
    assert measured == {"east": [5, "east"], "north": [0, None], "west": [0, None]}
    (east, *_) = rank(server, "cluster", like="east", **{"return": 1})
    assert east["metrics"] == {}
    (east,) = find(server, {"matchType": "cluster", "filter": {"clusterQuery": {"id": "east"}}})
    assert "metrics" not in east


def test_metrics_that_are_too_large_for_a_ranking_policy_are_left_out_with_a_warning(server):
    for name in ("north", "west"):
        large = {"clusterId": name, "nodes": [], "notes": "x" * (9 << 20)}
        server.http.post("/cluster", json=large).raise_for_status()
    try:
        body = {"matchType": "cluster", "rankingPolicyRule": {"policyRuleURI": "free:1.0-x"}}
        answer = server.http.post("/api/similarity-search", json=body).json()
        assert [each["free"] for each in answer["data"]] == [0, 0, 0]
        assert "The metrics of 3 clusters were left out" in answer["warnings"][0]
        assert answer["data"][0]["metrics"]["clusterId"] == "east"
    finally:
        for name in ("north", "west"):
            server.http.delete(f"/cluster/{name}").raise_for_status()


def test_ranking_policies_get_clients_for_metrics(server):
    found = rank(server, "block", "by_load:1.0-x")
    assert [each["id"] for each in found] == ["whisper", "llama"]
    name, free, raised = found[0]["said"]
    assert (name, free) == ("llama", 5)
    assert "no metrics of a block 'none'" in raised


def test_a_search_can_be_about_policies(server):
    condition = {"variable": "policy_rule_uri", "operator": "LIKE", "value": "first*"}
    (found,) = find(server, {"matchType": "policy", "filter": {"policyQuery": condition}})
    assert found["policy_rule_uri"] == "first_fit:1.0-stable"
    everything = find(server, {"matchType": "policy", "filter": {}})
    assert len(everything) == 5
    like = rank(server, "policy", like="first_fit:1.0-stable", **{"return": 1})
    assert like[0]["policy_rule_uri"] != "first_fit:1.0-stable"
    named = rank(server, "policy", like={"name": "first_fit"}, **{"return": 1})
    assert named[0]["policy_rule_uri"] == "first_fit:1.0-stable"


def test_blocks_are_found_by_their_documents_and_metrics_and_clusters(server):
    def of(**queries):
        body = {"matchType": "block", "filter": queries}
        return [each["id"] for each in find(server, body, "/api/filter-data")]

    assert of() == ["llama", "whisper"]
    assert of(blockQuery={"kind": "model"}) == ["llama", "whisper"]
    assert of(blockMetricsQuery={"instances.load": {"$gt": 2}}) == ["llama"]
    assert of(clusterQuery={"tags": "west"}) == ["whisper"]
    assert of(clusterQuery={"tags": "west"}, blockMetricsQuery={"instances.load": 3}) == []
    assert of(clusterQuery={"tags": "nowhere"}) == []
    (found,) = find(server, {"matchType": "block", "filter": {"blockQuery": {"id": "llama"}}})
    assert found["metrics"] == {"blockId": "llama", "instances": [{"load": 3}]}
    assert [each["id"] for each in rank(server, "block", like="llama")] == ["whisper"]


def test_documents_of_blocks_are_stored_and_deleted(server):
    http = server.http
    assert http.post("/blocks", json={"id": "llama"}).status_code == 409
    for method, path, body, field in (
        ("POST", "/blocks", {"id": "../x"}, "id"),
        ("POST", "/blocks", {"id": "x", "cluster": 7}, "cluster"),
        ("PUT", "/block/x", {"instances": 7}, "instances"),
    ):
        assert http.request(method, path, json=body).json()["error"]["field"] == field
    assert http.get("/blocks/none").status_code == 404
    made = http.post("/blocks", json={"id": "tmp", "a": {"b": 1}})
    assert made.json() == {"success": True, "data": {"id": "tmp", "a": {"b": 1}}}
    assert http.put("/block/tmp", json={"instances": []}).status_code == 201
    assert http.put("/block/tmp", json={"blockId": "other"}).status_code == 400
    assert http.get("/block/tmp").json()["data"]["blockId"] == "tmp"
    for path in ("/block/tmp", "/blocks/tmp"):
        assert [http.delete(path).status_code for _ in range(2)] == [200, 404]


class Git(BaseHTTPRequestHandler):
    """An HTTP server on this machine that serves a policy with a mistake in its syntax."""

    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"class AIOSv1PolicyRule:\n    key = = 'wJalrXUtnFEMI'\n")


@pytest.mark.heavy
def test_blocks_outlast_a_restart_and_code_comes_only_from_configured_hosts(tmp_path):
    """Code comes only from configured hosts, and no refusal quotes the code."""
    with serving(tmp_path) as server:
        server.fill(cluster("east"))
        server.http.post("/blocks", json={"id": "b"}).raise_for_status()
        server.http.post("/block", json={"blockId": "b", "instances": []}).raise_for_status()
    settings = {
        "MOORAGE_ALLOCATE_OVER_HTTP": "false",
        "MOORAGE_POLICY_CODE_HOSTS": "git.lan,localhost",
    }
    with (
        ThreadingHTTPServer(("127.0.0.1", 0), Git) as git,
        serving(tmp_path, environment=settings) as server,
    ):
        found = find(server, {"matchType": "block", "filter": {}})
        assert found == [{"id": "b", "metrics": {"blockId": "b", "instances": []}}]
        assert server.http.post("/allocate", json={}).status_code == 404
        assert "/allocate" not in server.http.get("/openapi.json").json()["paths"]
        assert server.ask(resources={"gpus": 1})["success"]
        threading.Thread(target=git.handle_request, daemon=True).start()
        document = {"policy_rule_uri": "x:1-y", "code": f"http://localhost:{git.server_port}/x.py"}
        refused = server.http.post("/policy", json=document)
        assert "line 2: SyntaxError: invalid syntax" in refused.json()["message"]
        assert "wJalr" not in refused.text
        document = {"policy_rule_uri": "x:1-y", "code": "http://127.0.0.1:9/rule.py"}
        refused = server.http.post("/policy", json=document).json()
        assert refused["message"].startswith("code: the host 127.0.0.1 is not allowed")
        assert refused["error"]["expected"] == "one of git.lan, localhost"


def test_metrics_are_aggregated_and_read_as_in_the_original_gateway(server):
    http = server.http
    group = {"_id": None, "f": {"$sum": "$nodes.gpu.totalFreeMem"}}
    stages = [{"$unwind": "$nodes"}, {"$group": group}]
    for body in (stages, {"pipeline": stages}):
        answer = http.post("/cluster/aggregate", json=body)
        assert answer.json() == {"success": True, "data": [{"_id": None, "f": 5}]}
    refused = http.post("/cluster/aggregate", json=[{"$out": "x"}])
    assert (refused.status_code, refused.json()["error"]["field"]) == (400, "pipeline[0].$out")
    assert http.get("/cluster-metrics/east").json() == http.get("/cluster/east").json()
    node = http.get("/cluster-metrics/east/node/east-0").json()["data"]
    assert node["gpu"] == {"totalFreeMem": 5}
    assert http.get("/cluster-metrics/east/node/x").status_code == 404
    assert http.get("/cluster-metrics/nowhere").status_code == 404
