"""Tests of requests over sockets: advice, leases, order, warnings, and policies' input."""

import json

import pytest
from served import ask_message, cluster, policy, read_message, tell


def hold(server, **more) -> dict:
    reply = server.ask(**{"lease": {"ttl_seconds": 60}, "resources": {"gpus": 1}, **more})
    if "lease" in reply:
        server.leases.append(reply["lease"])
    return reply


def test_advice_has_the_two_documented_keys_and_holds_nothing(server):
    reply = server.ask(resources={"gpus": 2})
    assert reply == {
        "success": True,
        "data": {"cluster_id": "east", "node_id": "east-0", "gpus": ["0", "1"]},
    }
    rehearsed = server.ask(resources={"gpus": 2}, lease={"ttl_seconds": 60}, dry_run=True)
    assert (rehearsed["success"], "lease" in rehearsed) == (True, False)
    assert server.held() == []


def test_an_empty_idempotency_key_is_no_key(server):
    """Likewise, an empty list of clusters, which old clients send, means all clusters."""
    for key, leases in (("", 2), ("mine", 1)):
        terms = {"ttl_seconds": 60, "idempotency_key": key}
        replies = [hold(server, lease=terms, clusters=[]) for _ in range(2)]
        assert len({each["lease"]["id"] for each in replies}) == leases


def test_the_refusal_of_a_message_that_is_too_deep_has_its_id(server):
    deep = '{"op": "status", "lease": %s, "id": 5}' % ("[" * 200 + "]" * 200)
    (reply,) = server.say(deep)
    assert (reply["id"], reply["error"]["code"]) == (5, "bad_message")


def test_a_warning_about_an_unknown_field_suggests_a_name(server):
    message = ask_message(resources={"gpus": 1}, leese={"ttl_seconds": 60}, zzz=1)
    warnings = [
        "leese: unknown field, it was ignored (did you mean lease?).",
        "zzz: unknown field, it was ignored.",
    ]
    refused = message | {"resources": {"gpus": 9}, "clusters": ["east"]}
    advice, no = server.say(message, refused)
    assert advice["warnings"] == no["warnings"] == warnings
    block = {"input": {"resources": {"gpus": 1}}, "modus": "select_clusters", "id": 8}
    (placed,) = server.say(block)
    assert placed["warnings"] == ["modus: unknown field, it was ignored (did you mean mode?)."]
    assert server.http.post("/allocate", json=message).json()["warnings"] == warnings
    described = message | {"search": {"rankingPolicyRule": {"parameters": {"like": {}}}}}
    assert server.say(described)[0]["warnings"][:2] == warnings


def test_the_refusal_of_a_model_that_no_node_has_lists_the_models(server):
    wanted = {"gpus": 1, "models": ["h100"]}
    error = server.ask(resources=wanted, lease={})["error"]
    assert (error["code"], error["models"]) == ("never_fits", ["A100", "H100"])
    assert "No candidate has h100; there are A100, H100 (did you mean H100?)." in error["reason"]
    short = server.ask(resources={"gpus": 5, "models": ["H100"]})["error"]
    assert "models" not in short


def test_listings_refuse_unknown_states_and_filters(server):
    lease = hold(server, clusters=["east"])["lease"]
    here, elsewhere, state, name, queue, fleet = server.say(
        {"op": "leases", "cluster": "east"},
        {"op": "leases", "cluster": "west"},
        {"op": "leases", "state": "actve"},
        {"op": "leases", "filters": {"stat": "active"}},
        {"op": "queue", "filters": {"state": "active"}},
        {"op": "fleet", "filters": {"models": "A100"}},
    )
    assert [each["id"] for each in here["data"]["leases"]] == [lease["id"]]
    assert elsewhere["data"]["leases"] == []
    assert "expected one of granted, starting, active" in state["error"]["reason"]
    assert (name["error"]["field"], queue["error"]["field"]) == ("filters.stat", "filters.state")
    assert fleet["error"]["code"] == "bad_message"


def test_a_warning_names_unknown_clusters_and_the_known_clusters_are_used(server):
    reply = server.ask(resources={"gpus": 1}, clusters=["nowhere", "west"])
    assert reply["data"]["cluster_id"] == "west"
    assert reply["warnings"] == ["Unknown clusters were left out: nowhere (there are east, west)."]
    near = server.ask(clusters=["Eastt", "west", "wset"], resources={"gpus": 1})["warnings"]
    assert near == [
        "Unknown clusters were left out: Eastt (did you mean east?), wset (did you mean west?)."
    ]
    error = server.ask(clusters=["eastt"])["error"]
    assert (error["code"], error["field"]) == ("unknown_clusters", "clusters")
    assert error["reason"].endswith("and live: eastt (did you mean east?).")
    (cordoned,) = server.say({"op": "cordon", "cluster": "eastt"})
    assert "(did you mean east?)" in cordoned["error"]["reason"]


def test_a_grant_is_explained(server):
    held = hold(server, explain=True)
    assert held["reasons"]["nodes_fitting"] == 4
    (why,) = server.say({"op": "why", "lease": held["lease"]["id"]})
    assert "first_fit:1.0-stable proposed east/east-0" in why["data"]["reason"]


def test_the_text_none_cancels_no_request_without_an_id(server):
    filled = hold(server, clusters=["east"], resources={"gpus": 4, "nodes": 2})["lease"]
    lease = {"ttl_seconds": 60, "wait_seconds": 60}
    with server.socket() as socket:
        socket.send(json.dumps(ask_message(resources={"gpus": 1}, lease=lease, clusters=["east"])))
        reply = tell(socket, {"op": "cancel", "request": "None", "id": "cancel"})
        assert (reply["id"], reply["error"]["code"]) == ("cancel", "unknown_request")
        server.release(filled)
        server.leases.append(read_message(socket)["lease"])


def test_a_policy_sees_documents_metrics_capacity_inputs_and_its_clients(server):
    metrics = {"clusterId": "west", "nodes": [{"id": "west-0", "vcpu": {"load5m": 0.5}}]}
    server.http.post("/cluster", json=metrics).raise_for_status()
    body = """
west = input_data["cluster_data"]["west"]
client, live = self.settings["cluster_client"], self.settings["cluster_metrics_client"]
reads = [client.read_cluster("east")[1]["id"], client.read_cluster("nowhere")[1][:19]]
reads.append(live.get_cluster("west")["clusterId"])
seen = west["data"]["id"]
west["data"]["id"] = "changed"
load = west["metrics"]["nodes"][0]["vcpu"]["load_5m"]
same = west["cluster_metrics"] is west["metrics"]
free = west["capacity"]["west-0"]["gpus"]["3"]
names = sorted(input_data["cluster_data"])
return [names, seen, load, same, free, reads, input_data["inputs"], parameters]
"""
    server.publish(policy(body, "see:1-x", policy_parameters={"depth": 1, "width": 2}))
    reads, parameters = ["east", "HTTP error occurred", "west"], {"depth": 9, "width": 2}
    for _ in range(2):  # An evaluation must not see the changes of an earlier one.
        reply = server.ask("see:1-x", inputs={"a": [1]}, parameters={"depth": 9})
        names = ["east", "west"]
        assert reply["data"] == [names, "west", 0.5, True, 1000, reads, {"a": [1]}, parameters]


def test_a_policy_reads_current_documents_and_metrics(server):
    body = """
ok, document = self.settings["cluster_client"].read_cluster("north")
try:
    load = self.settings["cluster_metrics_client"].get_cluster("north")["load"]
except Exception as error:
    load = type(error).__name__
return [document["tags"] if ok else document[:19], load]
"""
    server.publish(policy(body, "now:1-x"))
    server.register(cluster("north", tags=["old"]))
    server.http.post("/cluster", json={"clusterId": "north", "load": 1}).raise_for_status()
    assert server.ask("now:1-x")["data"] == [["old"], 1]
    for load in (2, 3):
        for path, change in (("clusters", {"tags": [f"new{load}"]}), ("cluster", {"load": load})):
            server.http.put(f"/{path}/north", json={"$set": change}).raise_for_status()
        assert server.ask("now:1-x")["data"] == [[f"new{load}"], load]
    for path in ("cluster", "clusters"):
        server.http.delete(f"/{path}/north").raise_for_status()
    assert server.ask("now:1-x")["data"] == ["HTTP error occurred", "APIError"]


def test_a_policys_value_that_names_no_cluster_is_passed_on_to_the_client(server):
    server.publish(policy('return {"error": "GPU memory"}', "error:1-x"))
    passed_on = server.ask("error:1-x", clusters=["east"])
    assert passed_on == {"success": True, "data": {"error": "GPU memory"}}
    error = hold(server, policy="error:1-x")["error"]
    assert (error["code"], error["data"]) == ("policy_declined", {"error": "GPU memory"})
    assert error["reason"] == "The policy declined: GPU memory."


def test_http_gives_the_same_answers_to_requests_as_the_socket(server):
    body = {"policy_rule_uri": "first_fit:1.0-stable", "inputs": {}, "resources": {"gpus": 1}}
    answer = server.http.post("/allocate", json=body)
    assert (answer.status_code, answer.json()) == (200, server.ask(resources={"gpus": 1}))
    streamed = server.http.post("/allocate", json=body | {"stream": True, "strict": True}).json()
    assert streamed["warnings"] == [
        "stream: it was ignored; progress is sent over the WebSocket only."
    ]
    for more, status in (({"clusters": ["nowhere"]}, 404), ({"resources": {"gpus": 500}}, 422)):
        refused = server.http.post("/allocate", json=body | more)
        (reply,) = server.say({"adhoc": True} | body | more)
        assert (refused.status_code, refused.json()) == (status, reply)
    for name, path in (("status", ""), ("manage", "POST /policy/URI/manage")):
        refused = server.http.post("/allocate", json={"op": name, "lease": "x", "id": 7})
        assert (refused.status_code, refused.json()["id"]) == (400, 7)
        reason = refused.json()["error"]["reason"]
        assert "operations go over the WebSocket, ws://127.0.0.1:" in reason
        assert path in reason


def test_inventory_changes_apply_to_the_next_request(server):
    server.register(cluster("fresh", nodes=1, gpus=8, model="B200"))
    resources = {"gpus": 8, "models": ["B200"]}
    assert server.ask(resources=resources)["data"]["cluster_id"] == "fresh"
    server.http.put("/clusters/fresh", json={"$set": {"status": "maintenance"}}).raise_for_status()
    assert server.ask(resources=resources)["error"]["code"] == "never_fits"
    reply = server.ask(resources={"gpus": 1}, clusters=["fresh", "east"])
    assert reply["warnings"] == ["Clusters that are not live were left out: fresh."]
    server.http.delete("/clusters/fresh").raise_for_status()


def test_a_value_of_a_policy_that_declines_is_returned_once_and_not_stored(server):
    server.publish(policy("return ['no'] * 1000", "decliner:1.0-x"))
    reply = server.ask("decliner:1.0-x", lease={})
    assert reply["error"]["code"] == "policy_declined"
    assert reply["error"]["data"] == ["no"] * 1000
    why = server.say({"op": "why", "request": reply["request"]})[0]
    assert why["data"]["code"] == "policy_declined"
    assert "data" not in why["data"]


GOOD = ask_message(resources={"gpus": 1})
ONCE = GOOD | {"lease": {}, "provision": {"backend": "local", "spec": {}, "attempts_max": 2}}


@pytest.mark.parametrize(
    ("message", "code", "field"),
    [
        ("{", "bad_json", None),
        ("[]", "bad_message", None),
        ("{}", "missing_fields", None),
        ({**GOOD, "resources": {"gpus": -1}}, "bad_message", "resources.gpus"),
        ({**GOOD, "provision": {"backend": "memory"}}, "bad_message", "lease"),
        (ONCE, "bad_message", "provision.attempts_max"),
        ({"op": "nonsense"}, "unknown_op", "op"),
        ({"op": "release", "lease": "x", "token": "y"}, "unknown_lease", "lease"),
        ({"op": "renew", "lease": "x", "token": "y"}, "unknown_lease", "lease"),
        ({"op": "why", "lease": "x"}, "unknown_request", "request"),
        ({"op": "status", "request": "x"}, "unknown_lease", "lease"),
        ({"op": "cancel", "request": "x"}, "unknown_request", "request"),
        ({"op": "fleet", "cluster": "x"}, "unknown_clusters", "cluster"),
        ({"op": "watch", "topics": ["x"]}, "bad_message", "topics[0]"),
        ({"input": {"policies": []}, "mode": 7}, "bad_message", "mode"),
        ({"input": {"policies": "none"}}, "bad_message", "input.policies"),
        ('{"adhoc": true, "policy_rule_uri": "x", "inputs": {"s": "\\ud800"}}', None, None),
        ("[" * 100_000, None, None),
    ],
    ids=lambda value: str(value)[:60],
)
def test_each_bad_message_gets_a_single_reply_that_names_the_field(server, message, code, field):
    bad, good = server.say(message, GOOD)
    assert (bad["success"], bool(bad["message"]), good["success"]) == (False, True, True)
    assert code in {None, bad["error"]["code"]}
    assert field in {None, bad["error"].get("field")}


def test_consecutive_request_ids_begin_with_the_same_digits_and_differ(server):
    """With similar ids, a commit changes few pages of the ledger's index."""
    ids = [server.ask(resources={"gpus": 1}, id=number)["request"] for number in range(20)]
    assert len(set(ids)) == 20
    assert len({each[:4] for each in ids}) <= 2  # 256 ids share a beginning.
