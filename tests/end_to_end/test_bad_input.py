"""Bad input gets one clear reply that names the field; the daemon lives and nothing is lost."""

import json

import pytest
from served import FIRST_FIT, ask_message
from websockets.exceptions import ConnectionClosed

GOOD = ask_message(resources={"gpus": 1})

# What is sent, the code of the reply, and the field it names.
BAD = [
    ("", "bad_json", None),
    ("{", "bad_json", None),
    ("[]", "bad_message", None),
    ('"text"', "bad_message", None),
    ("null", "bad_message", None),
    ("{}", "missing_fields", None),
    ({"adhoc": True}, "missing_fields", None),
    ({"adhoc": True, "policy_rule_uri": FIRST_FIT}, "missing_fields", None),
    ({**GOOD, "policy_rule_uri": 7}, "bad_message", "policy_rule_uri"),
    ({**GOOD, "inputs": []}, "bad_message", "inputs"),
    ({**GOOD, "clusters": "east"}, "bad_message", "clusters"),
    ({**GOOD, "clusters": [{}]}, "bad_message", "clusters[0]"),
    ({**GOOD, "resources": {"gpus": -1}}, "bad_message", "resources.gpus"),
    ({**GOOD, "resources": {"gpus": 1.5}}, "bad_message", "resources.gpus"),
    ({**GOOD, "resources": {"gpu": 1}}, "bad_message", "resources.gpu"),
    ({**GOOD, "resources": {"gpus": 1, "gpu_milli": 1001}}, "bad_message", "resources.gpu_milli"),
    ({**GOOD, "resources": {"topology": "ring"}}, "bad_message", "resources.topology"),
    ({**GOOD, "lease": {"ttl_seconds": 0}}, "bad_message", "lease.ttl_seconds"),
    ({**GOOD, "lease": {"ttl_seconds": 1e12}}, "bad_message", "lease.ttl_seconds"),
    ({**GOOD, "lease": {"ttl": 5}}, "bad_message", "lease.ttl"),
    ({**GOOD, "lease": True}, "bad_message", "lease"),
    ({**GOOD, "id": {}}, "bad_message", "id"),
    ({**GOOD, "provision": {"backend": "memory"}}, "bad_message", "lease"),
    ({**GOOD, "filter": {"matchType": "cluster"}}, "bad_message", "filter.filter"),
    ({**GOOD, "search": {"matchType": "cluster"}}, "bad_message", "search.rankingPolicyRule"),
    ({"op": "nonsense"}, "unknown_op", "op"),
    ({"op": "release"}, "missing_fields", None),
    ({"op": "release", "lease": "x", "token": "y"}, "unknown_lease", "lease"),
    ({"op": "renew", "lease": "x", "token": "y"}, "unknown_lease", "lease"),
    ({"op": "why", "lease": "x"}, "unknown_request", "request"),
    ({"op": "status", "request": "x"}, "unknown_lease", "lease"),
    ({"op": "cancel", "request": "x"}, "unknown_request", "request"),
    ({"op": "fleet", "cluster": "x"}, "unknown_clusters", "cluster"),
    ({"op": "watch", "topics": ["x"]}, "bad_message", "topics[0]"),
    ({"input": {}, "mode": "allocate"}, "bad_message", "mode"),
    ({"input": []}, "bad_message", "input"),
    ({"input": {"policies": []}, "mode": 7}, "bad_message", "mode"),
    ({"input": {"policies": "none"}}, "bad_message", "input.policies"),
    ('{"adhoc": true, "policy_rule_uri": "x", "inputs": {"n": NaN}}', "bad_json", None),
    ('{"adhoc": true, "policy_rule_uri": "x", "inputs": {"s": "\\ud800"}}', None, None),
    ("[" * 100_000, None, None),
]


@pytest.mark.parametrize(("message", "code", "field"), BAD, ids=lambda value: str(value)[:60])
def test_one_reply_that_names_the_field(server, message, code, field):
    bad, good = server.say(message, GOOD)
    assert bad["success"] is False
    assert bad["message"]
    assert good["success"] is True
    if code is not None:
        assert bad["error"]["code"] == code
    if field is not None:
        assert bad["error"]["field"] == field


def test_a_binary_message_is_answered_and_the_socket_stays(server):
    with server.socket() as socket:
        socket.send(b"\x00\xff")
        assert json.loads(socket.recv(30))["success"] is False
        socket.send(json.dumps(GOOD))
        assert json.loads(socket.recv(30))["success"] is True


def test_a_message_over_the_limit_is_closed_with_1009(server):
    with server.socket() as socket:
        socket.send(json.dumps({**GOOD, "inputs": {"pad": "x" * (2 << 20)}}))
        with pytest.raises(ConnectionClosed) as closed:
            socket.recv(30)
    assert closed.value.rcvd.code == 1009
    assert server.ask(resources={"gpus": 1})["success"]


BAD_HTTP = [
    ("POST", "/clusters", b"{", 400, None),
    ("POST", "/clusters", b"[]", 400, None),
    ("POST", "/clusters", b"{}", 400, "id"),
    ("POST", "/clusters", b'{"id": "x", "nodes": {"nodeData": [{"id": []}]}}', 400, "nodes"),
    ("POST", "/clusters", b'{"id": "east", "nodes": {"nodeData": []}}', 409, None),
    ("GET", "/clusters/none", b"", 404, None),
    ("DELETE", "/clusters/none", b"", 404, None),
    ("POST", "/clusters/query", b'{"query": {"$where": "1"}}', 400, None),
    ("GET", "/cluster/none", b"", 404, None),
    ("POST", "/policy", b"{}", 400, None),
    ("POST", "/policy", b'{"policy_rule_uri": "x:1-y", "code": "def"}', 400, "code"),
    ("POST", "/policy", b'{"policy_rule_uri": "x:1-y", "code": "x = 1"}', 400, "code"),
    ("GET", "/policy/none:1-x", b"", 404, None),
    ("DELETE", "/policy/none:1-x", b"", 404, None),
    ("GET", "/nowhere", b"", 404, None),
    ("PATCH", "/clusters", b"", 405, None),
]


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "field"), BAD_HTTP, ids=lambda value: str(value)[:40]
)
def test_http_refuses_with_a_status_and_a_reason(server, method, path, body, status, field):
    answer = server.http.request(method, path, content=body)
    assert answer.status_code == status, answer.text
    said = answer.json()
    assert said["success"] is False
    assert said["message"]
    if field is not None:
        assert field in json.dumps(said)
    assert server.http.get("/healthz").status_code == 200


def test_a_broken_policy_is_shown_line_and_caret(server):
    code = "class AIOSv1PolicyRule:\n    def eval(self\n"
    answer = server.http.post("/policy", json={"policy_rule_uri": "broken:1-x", "code": code})
    assert answer.status_code == 400
    message = answer.json()["message"]
    assert "line 2" in message
    assert "^" in message
