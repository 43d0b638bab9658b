"""Documents, bodies and programs for the original services work unchanged with a daemon."""

import base64
import io
import zipfile

import pytest
import requests
from served import ask_message, policy, tell
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from moorage.testing.daemon_process import daemon
from moorage_client.services import ClusterClient, GlobalClusterMetricsClient, Services

pytestmark = pytest.mark.heavy  # Daemons.

POLICY = """
import json, logging, requests, redis
from typing import Dict
logger = logging.getLogger(__name__)
class AIOSv1PolicyRule:
    def __init__(self, rule_id, settings, parameters):
        self.region = parameters["region"]
        self.cache = redis.Redis(host=settings.get("redis_host", "localhost"))
    def eval(self, parameters, input_data, context):
        logger.info("input %s", json.dumps(input_data))
        try:
            requests.get("http://example.org/prices", timeout=2).json()
        except requests.exceptions.RequestException as error:
            logger.error(error)
        return {"allowed": True, "region": self.region, "input_data": input_data}
    def management(self, action): return {"done": action}
"""
SIMPLE = """
class AIOSv1PolicyRule:
    def __init__(self, rule_id, settings, parameters): pass
    def eval(self, parameters, input_data, context): return {}
"""
TEMPLATE_FILLED = '''
class AIOSv1PolicyRule:
    def __init__(self, rule_id, settings, parameters):
        """
        Initializes an AIOSv1PolicyRule instance.
        """
        self.rule_id = rule_id
        self.settings = settings
        self.parameters = parameters

    def eval(self, parameters, input_data, context):
        # Rule logic goes here (can modify input_data)
        return {}

    def management(self, action: str, data: dict) -> dict:
        # Implement custom management actions here
        pass
'''
JSON_SCHEMA = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "type": "object",
    "properties": {
        "count": {"type": "integer", "minimum": 1, "description": "instances"},
        "mode": {"type": "string", "enum": ["fast", "cheap"], "default": "fast"},
        "labels": {"type": "object", "additionalProperties": {"type": "string"}},
        "sizes": {"type": "array", "items": {"type": "number"}},
    },
    "required": ["count"],
    "additionalProperties": False,
}


def archive(**files: str) -> str:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as packed:
        for name, content in files.items():
            packed.writestr(f"code/{name.replace('__', '.')}", content)
    return base64.b64encode(stream.getvalue()).decode()


TUTORIAL = {
    "name": "tutorial", "version": "0.0.1", "release_tag": "stable",
    "metadata": {"author": "admin", "category": "allocation"}, "tags": "gpu,allocation",
    "code": archive(function__py=POLICY, requirements__txt="requests==2.31.0\nredis\nnumpy\n"),
    "code_type": "zip", "type": "policy", "policy_input_schema": JSON_SCHEMA,
    "policy_output_schema": {"type": "object", "properties": {"allowed": {"type": "boolean"}}},
    "policy_settings_schema": {}, "policy_parameters_schema": {"type": "object"},
    "policy_settings": {}, "policy_parameters": {}, "description": "As a tutorial has it.",
    "functionality_data": {"strategy": "score"}, "resource_estimates": {},
}  # fmt: skip
DOCUMENTS = {
    "a tutorial's": TUTORIAL,
    "minimal": {"policy_rule_uri": "minimal:1-x", "code": SIMPLE},
    "the template": {"policy_rule_uri": "template:1-x", "code": TEMPLATE_FILLED},
    "by its parts, without the rest": {
        "name": "policies.search.reputation", "version": "v0.0.01", "release_tag": "beta",
        "code": SIMPLE, "type": "python_class_v1",
    },
    "in the small dialect": {
        "policy_rule_uri": "small:1-x", "code": SIMPLE, "type": "policy",
        "policy_input_schema": {
            "count": {"type": "number", "description": "instances", "min": 1, "max": 8},
            "name": {"type": "string", "pattern": "^[a-z]+$", "max_length": 9, "length": 3},
            "kind": {"type": "string", "choices": ["a", "b"]},
            "what": {"type": "any"},
            "inner": {"type": "object", "properties": {"x": {"type": "boolean"}}},
            "list": {"type": "array", "items": {"type": "number"}},
        },
        "management_commands_schema": [
            {"name": "reset", "description": "forget all", "schema": {}},
            {"name": "set", "description": "", "schema": JSON_SCHEMA},
        ],
    },
    "with what cannot be read": {
        "policy_rule_uri": "odd:1-x", "code": SIMPLE, "type": "policy",
        "policy_input_schema": {"$ref": "#/definitions/x", "definitions": {"x": {}}},
        "policy_output_schema": "free text", "policy_settings_schema": [1],
        "policy_parameters_schema": {"a": "number", "b": {"type": "int", "minn": 0}},
        "policy_parameters": {"a": "text"}, "management_commands_schema": {"reset": {}},
    },
    "with nulls": {
        "policy_rule_uri": "nulls:1-x", "code": SIMPLE, "type": None, "tags": None,
        "metadata": None, "policy_input_schema": None, "policy_parameters": None,
    },
    "with tags in a list": {
        "policy_rule_uri": "tags:1-x", "code": archive(function__py=SIMPLE), "tags": ["a", "b"],
        "_id": "5", "created_at": 1,
    },
}  # fmt: skip


def test_documents_are_registered_unchanged_and_returned_complete(server):
    for kind, document in DOCUMENTS.items():
        answer = requests.post(f"{server.running.http}/policy", json=document, timeout=30)
        assert answer.status_code == 200, (kind, answer.text)
        uri = answer.json()["data"]["policy_rule_uri"]
        found = server.http.get(f"/policy/{uri}").json()["data"]
        assert found.items() >= {k: v for k, v in document.items() if v is not None}.items(), kind
        missing = {field for field in TUTORIAL if found.get(field) is None}
        assert not missing, kind
    with Services(server.running.http) as services:
        services.publish_policy(TUTORIAL)
        warnings = services.warnings
    for text in ("'requests==2.31.0' is not", "'requests' is not", "without parameters.region",
                 "management cannot be called"):  # fmt: skip
        assert any(text in each for each in warnings), text
    odd = server.http.post("/policy", json=DOCUMENTS["with what cannot be read"]).json()
    assert len(odd["warnings"]) >= 6


def test_a_policy_of_a_tutorial_answers_requests(server):
    server.publish(TUTORIAL)
    message = ask_message("tutorial:0.0.1-stable", inputs={"count": 2}, parameters={"region": "eu"})
    (reply,) = server.say(message)
    assert reply["success"], reply
    assert (reply["data"]["allowed"], reply["data"]["region"]) == (True, "eu")
    found = reply["data"]["input_data"]
    assert found.keys() == {"inputs", "cluster_data"}
    assert found["inputs"] == {"count": 2, "mode": "fast"}
    for inputs, field in (({"count": "2"}, "inputs.count"), ({"count": 1, "x": 1}, "inputs.x")):
        (refused,) = server.say({**message, "inputs": inputs})
        assert refused["error"]["field"] == field
    (refused,) = server.say({**message, "parameters": {}})
    assert "KeyError: 'region'" in refused["message"]


BLOCK = {
    "id": "wrapped",
    "policies": {"clusterAllocator": {"policyRuleURI": "default", "parameters": {}}},
}


def test_a_block_may_be_in_an_envelope_and_the_word_default_names_no_policy(server):
    envelope = {"header": {"templateUri": "x"}, "body": {"spec": {"values": BLOCK}}}
    bare = server.http.post("/blockActions/dryRun", json=BLOCK)
    assert bare.status_code == 200, bare.text
    assert server.http.post("/blockActions/dryRun", json=envelope).json() == bare.json()
    missing = {**BLOCK, "policies": {"clusterAllocator": {"policyRuleURI": "no:1-x"}}}
    envelope["body"]["spec"]["values"] = missing
    refused = server.http.post("/blockActions/dryRun", json=envelope)
    assert refused.json()["error"]["code"] == "unknown_policy"
    (reply,) = server.say({"input": envelope, "mode": "dry_run"})
    assert reply["error"]["code"] == "unknown_policy"
    envelope["body"]["spec"]["values"] = BLOCK
    assert server.http.post("/blocks", json=envelope).json()["data"] == BLOCK


def test_endpoints_of_blocks_answer_as_documented(server):
    http = server.http
    for name, count in (("b1", 2), ("b2", 0)):
        http.post("/blocks", json={"id": name, "tags": ["t"]}).raise_for_status()
        instances = [{"instanceId": str(n)} for n in range(count)]
        http.put(f"/block/{name}", json={"instances": instances, "kind": "k"}).raise_for_status()
    assert {"b1", "b2"} <= {each["id"] for each in http.get("/blocks").json()["data"]}
    found = http.get("/block/query", params={"blockId": ["b1", "b9"]}).json()["data"]
    assert [each["blockId"] for each in found] == ["b1"]
    stages = [{"$match": {"kind": "k"}}, {"$count": "n"}]
    assert http.post("/block/aggregate", json=stages).json()["data"] == [{"n": 2}]
    for name, healthy, count in (("b1", True, 2), ("b2", False, 0)):
        health = http.get(f"/block/health/{name}").json()["data"]
        assert health == {"blockId": name, "healthy": healthy, "instances": count}
    assert http.get("/block/health/b9").status_code == 404


ELSEWHERE = {
    "POST": "/jobs/submit/ex-1 /jobs/submit-with-estimate/ex-1 /jobs/query /function/query"
    " /function/deployments/create/ex-1 /graph/execute_graph /controller/block-scaling/c1"
    " /pre-check-policies/x/dry_run /api/with-spec/filter /api/reinitiate/5",
    "GET": "/jobs/5 /function/get_logs/f /graphs /api/tasks /groups",
    "DELETE": "/groups/5",
}


def test_paths_of_other_services_are_refused_as_unsupported(server):
    for operation in ((method, path) for method in ELSEWHERE for path in ELSEWHERE[method].split()):
        answer = server.http.request(*operation)
        assert answer.status_code == 400, operation
        error = answer.json()["error"]
        assert error["code"] == "unsupported", operation
        assert len(error["reason"]) > 40, operation


def test_a_search_is_limited_to_the_clusters_of_its_filter(server):
    server.http.post("/blocks", json={"id": "s1", "kind": "searched"}).raise_for_status()
    server.publish({
        "policy_rule_uri": "ranked:1-x",
        "code": SIMPLE.replace("return {}", "return [{**each, 'seen': each['metrics'].get('x', 0)}"
                               " for each in input_data]"),
    })  # fmt: skip
    condition = {"variable": "kind", "operator": "==", "value": "searched"}
    rule = {
        "policyRuleURI": "ranked:1-x",
        "parameters": {
            "filterRule": {"matchType": "block", "filter": {"blockQuery": condition}}, "return": 5,
        },
    }  # fmt: skip
    for outer in ({}, {"matchType": "block"}, {"matchType": "cluster"}):
        body = {**outer, "rankingPolicyRule": rule}
        for path in ("/api/no-ir/similarity-search", "/api/search"):
            answer = server.http.post(path, json=body)
            assert answer.status_code == 200, answer.text
            (found,) = answer.json()["data"]
            assert (found["id"], found["seen"], found["metrics"]) == ("s1", 0, {})


def test_credentials_in_the_url_of_the_server_are_enough(tmp_path, monkeypatch):
    """Old programs work after a change of the address alone."""
    with daemon(tmp_path, environment={"MOORAGE_TOKENS": "team-a:s3cret"}) as running:
        http, ws = running.http, running.ws
        for user in ("user", "team-a", ""):
            address = http.replace("http://", f"http://{user}:s3cret@")
            assert requests.get(f"{address}/policy", timeout=10).status_code == 200
        wrong = http.replace("http://", "http://user:wrong@")
        assert requests.get(f"{wrong}/policy", timeout=10).status_code == 401
        for user in ("user", "team-a"):
            with connect(ws.replace("ws://", f"ws://{user}:s3cret@")) as socket:
                assert tell(socket, {"op": "leases"})["success"]
        with pytest.raises(InvalidStatus):
            connect(ws.replace("ws://", "ws://user:wrong@"))
        for name in ("CLUSTER_SERVICE_URL", "GLOBAL_CLUSTER_METRICS_URL"):
            monkeypatch.setenv(name, http)
        assert ClusterClient().execute_query({})[0] is False
        monkeypatch.setenv("MOORAGE_TOKEN", "s3cret")
        assert ClusterClient().execute_query({}) == (True, [])
        assert GlobalClusterMetricsClient().query_clusters({"cluster.n": {"$gte": 1}}) == []
        assert GlobalClusterMetricsClient().query_clusters() == []


def test_queries_of_metrics_are_the_same_inside_and_outside_of_policies(server, monkeypatch):
    monkeypatch.setenv("GLOBAL_CLUSTER_METRICS_URL", server.running.http)
    for name, free in (("m1", 1), ("m2", 2), ("m3", 3)):
        server.http.post("/cluster", json={"clusterId": name, "free": free}).raise_for_status()
    server.publish(policy("return [each['clusterId'] for each in self.settings"
                          "['cluster_metrics_client'].query_clusters(input_data['inputs']['q'])]",
                          "asks:1-x"))  # fmt: skip
    for query in (
        {"free": {"$gte": 2}}, {"clusterId": {"$in": ["m1", "m3"]}}, {"clusterId": "m2"},
        {"free": 2, "clusterId": "m2"}, {"free": "2"}, {}, None,
        {"$or": [{"free": 1}, {"clusterId": "m3"}]},
    ):  # fmt: skip
        outside = [each["clusterId"] for each in GlobalClusterMetricsClient().query_clusters(query)]
        inside = server.ask("asks:1-x", inputs={"q": query})
        assert inside.get("data") == outside, (query, inside)
