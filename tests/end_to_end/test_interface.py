"""All reads over HTTP agree with `/openapi.json`; `test_notes` checks changes.

`served.Server` compares every exchange with the description.
"""

from served import FIRST_FIT, policy

from moorage.web.notes import READS

FILTER = {"matchType": "cluster", "filter": {"clusterQuery": {"id": "east"}}}
RANKING = {"matchType": "cluster", "rankingPolicyRule": {"parameters": {"like": "east"}}}
TRACE = "name,cpu_milli,memory_mib,num_gpu,gpu_milli\na,1,1,1,1000\n"
BODIES = {
    "/console/playground": {"policy_rule_uri": FIRST_FIT},
    "/console/playground/backtest": {"policy_rule_uri": FIRST_FIT, "trace": TRACE},
    "/allocate": {"policy_rule_uri": FIRST_FIT, "inputs": {}, "resources": {"gpus": 1}},
    "/api/filter": FILTER,
    "/api/filter-data": FILTER,
    "/api/no-ir/filter": {"header": {}, "body": {"values": FILTER}},
    "/api/similarity-search": RANKING,
    "/api/no-ir/similarity-search": {"header": {}, "body": {"values": RANKING}},
    "/api/search": RANKING,
    "/block/aggregate": [{"$count": "n"}],
    "/cluster/aggregate": [{"$count": "n"}],
    "/executor/{executor}/execute_policy": {"policy_rule_uri": "one:1-x", "input_data": {}},
}
MADE = {
    "/cluster": {"clusterId": "east", "nodes": [{"id": "east-0", "vcpu": {"load5m": 1}}]},
    "/blocks": {"id": "b", "cluster": {"id": "east"}},
    "/block": {"blockId": "b", "instances": []},
    "/policy-alias/one/activate": {"policy_rule_uri": "one:1-x"},
    "/policy-alias/one/canary": {"policy_rule_uri": "one:2-x", "percent": 10},
    "/policy-alias/one/shadow": {"policy_rule_uri": "one:2-x"},
}


def test_each_endpoint_that_reads_answers_as_described(server):
    server.publish(policy("return {}", "one:1-x"), policy("return {}", "one:2-x"))
    for path, body in MADE.items():
        server.http.post(path, json=body).raise_for_status()
    task = server.http.post("/blockActions/allocate", json={"input": {"id": "b"}})
    names = {"cluster_id": "east", "node_id": "east-0", "block_id": "b", "executor": "moorage"} | {
        "name": "Release",
        "uri": "one:1-x",
        "alias": "one",
        "task_id": task.json()["task_id"],
    }
    server.say({"adhoc": True, "policy_rule_uri": "one", "inputs": {}})
    paths = server.http.get("/openapi.json").json()["paths"]
    for path, methods in paths.items():
        if path in READS:
            body = BODIES.get(path, {})
            answer = server.http.post(path.format(**names), json=body)
            assert answer.is_success, (path, answer.text)
        if "get" in methods:
            answer = server.http.get(path.format(**names))
            assert answer.is_success, (path, answer.text)
    for path in MADE:
        if path.endswith(("/canary", "/shadow")):
            server.http.delete(path).raise_for_status()
