"""Each change over HTTP or by `manage` leaves a log line with caller, action and address."""

import json

import httpx
import pytest
from served import cluster, invoke, policy, serving, until

from moorage.web.notes import READS

pytestmark = pytest.mark.heavy

BODIES = {
    "POST /clusters": cluster("east"),
    "POST /clusters/{cluster_id}/nodes": cluster("east"),
    "PUT /clusters/{cluster_id}": {"$set": {"tags": ["a"]}},
    "POST /cluster": {"clusterId": "east", "nodes": []},
    "PUT /cluster": {"clusterId": "east", "nodes": []},
    "PUT /cluster/{cluster_id}": {"clusterId": "east", "nodes": []},
    "POST /blocks": {"id": "b", "cluster": {"id": "east"}},
    "PUT /blocks/{block_id}": {"$set": {"tags": ["a"]}},
    "POST /block": {"blockId": "b", "instances": []},
    "PUT /block": {"blockId": "b", "instances": []},
    "PUT /block/{block_id}": {"blockId": "b", "instances": []},
    "POST /policy": policy("return {}", "one:1-x"),
    "PUT /policy/{uri}": {"$set": {"description": "new"}},
    "POST /policy-alias/{alias}/activate": {"policy_rule_uri": "one:1-x"},
    "POST /policy-alias/{alias}/canary": {"policy_rule_uri": "one:2-x", "percent": 10},
    "POST /policy-alias/{alias}/shadow": {"policy_rule_uri": "one:2-x"},
    "POST /policy/{uri}/manage": {"action": "look"},
    "POST /executor": {"executor_id": "e"},
    "PUT /executor/{executor}": {"$set": {"note": "x"}},
    "PUT /quotas/{tenant}": {"weight": 2},
    "POST /tokens": {"name": "ci", "role": "client", "tenant": "ann"},
}
NAMES = {"cluster_id": "east", "block_id": "b", "uri": "one:1-x", "alias": "one:stable"} | {
    "executor": "e",
    "tenant": "ann",
    "name": "ci",
}
REFUSED = {"POST /executor/{executor}/create-infra", "DELETE /executor/{executor}/remove-infra"}
"""Operations that the server refuses, and that change nothing."""
LOGINS = {"POST /console/session", "DELETE /console/session"}
"""Operations that only log callers in or out; separate tests cover them."""
ACTIVATE = "POST /policy-alias/{alias}/activate"
CANARY, SHADOW = "POST /policy-alias/{alias}/canary", "POST /policy-alias/{alias}/shadow"
NEEDED = {
    "POST /policy-alias/{alias}/rollback": [ACTIVATE],
    "DELETE /policy-alias/{alias}/canary": [ACTIVATE, CANARY],
    "DELETE /policy-alias/{alias}/shadow": [ACTIVATE, SHADOW],
}
"""By operation: the operations that must run before it."""
LAST = ("DELETE /policy-alias/{alias}", "DELETE /policy/{uri}")


def managed_policy(name):
    document = policy("return {}", name)
    document["code"] += "    def management(self, action, data):\n        return action\n"
    return document


@pytest.fixture(scope="module")
def notes_server(tmp_path_factory):
    variables = {
        "MOORAGE_TOKENS": "ann:sesame",
        "MOORAGE_OPERATORS": "ann",
        "MOORAGE_LOG_LEVEL": "info",
    }
    data = tmp_path_factory.mktemp("notes")
    with serving(data, environment=variables, bearer="sesame") as server:
        yield server


@pytest.fixture
def noting(notes_server):
    """The daemon, whose log lines count only during the test itself."""
    notes_server.before = 0
    notes_server.before = len(changes(notes_server))
    return notes_server


def changes(server):
    read = map(json.loads, server.log().splitlines())
    return [line for line in read if line.get("event") == "changed"][server.before :]


def call(server, operation, bodies):
    method, _, path = operation.partition(" ")
    before = len(changes(server))
    answer = server.http.request(method, path.format(**NAMES), json=bodies.get(operation))
    assert answer.status_code < 300, (operation, answer.text)
    until(lambda: len(changes(server)) > before)  # Lines are written after the reply.


def order(operation):
    """Return a sort key: operations that create objects come first, those that remove them last."""
    method = operation.partition(" ")[0]
    rank = {"POST": 0, "PUT": 1, "DELETE": 2}[method]
    last = LAST.index(operation) if operation in LAST else -1
    return rank, last, "rollback" in operation, "alias" in operation, operation


def test_each_change_has_its_log_line(noting):
    paths = noting.http.get("/openapi.json").json()["paths"]
    operations = {
        f"{method.upper()} {path}"
        for path, methods in paths.items()
        if path not in READS
        for method in methods
        if method in {"post", "put", "patch", "delete"}
    }
    assert set(READS) - set(paths) == set()
    noting.publish(managed_policy("one:2-x"), managed_policy("one:1-x"))
    noting.http.post(
        "/policy-alias/one/activate", json={"policy_rule_uri": "one:2-x"}
    ).raise_for_status()
    until(lambda: len(changes(noting)) == 3)
    bodies = BODIES | {"POST /policy": managed_policy("one:3-x")}
    for operation in sorted(operations - REFUSED - LOGINS, key=order):
        for first in NEEDED.get(operation, ()):
            call(noting, first, bodies)
        before = len(changes(noting))
        call(noting, operation, bodies)
        lines = changes(noting)
        assert len(lines) == before + 1, operation
        line = lines[-1]
        assert (line["who"], line["what"]) == ("ann", operation)
        assert line["remote"].startswith("127.0.0.1:")
        about = [*NAMES.values(), "one:3-x", "one:2-x"]
        assert any(value in about for value in line.values()), line


def test_refusals_and_reads_have_no_log_line(noting):
    noting.http.post("/clusters/query", json={})
    noting.http.get("/policy")
    assert noting.http.delete("/clusters/none").status_code == 404
    assert noting.http.post("/clusters", json={}, headers={"Authorization": ""}).status_code == 401
    assert changes(noting) == []


def test_the_address_that_a_proxy_forwards_has_its_own_field_in_the_log(noting):
    forged = {"X-Forwarded-For": "10.9.9.9"}
    noting.http.post("/clusters", json=cluster("west"), headers=forged).raise_for_status()
    until(lambda: changes(noting))
    (line,) = changes(noting)
    assert line["forwarded_for"] == "10.9.9.9"
    assert line["remote"].startswith("127.0.0.1:")
    assert (line["id"], line["who"]) == ("west", "ann")


def test_logins_and_logouts_have_log_lines(noting):
    url = noting.running.http
    with httpx.Client(base_url=url, headers={"Origin": url}) as page:
        login = page.post("/console/session", json={"token": "sesame"}).json()["data"]
        headers = {"X-Console-Token": login["csrf"]}
        page.delete("/console/session", headers=headers).raise_for_status()
    until(lambda: len(changes(noting)) == 2)
    assert [(line["who"], line["what"]) for line in changes(noting)] == [
        ("ann", "POST /console/session"),
        ("ann", "DELETE /console/session"),
    ]
    assert "sesame" not in noting.log()


def test_a_call_of_management_over_the_socket_has_a_log_line(noting):
    noting.publish(managed_policy("own:1-x"))
    message = {"op": "manage", "policy_rule_uri": "own:1-x", "action": "look", "data": {}}
    assert noting.say(message)[0]["success"]
    until(lambda: len(changes(noting)) == 2)
    line = changes(noting)[-1]
    assert (line["who"], line["what"], line["action"]) == ("ann", "manage", "look")
    assert line["remote"].startswith("127.0.0.1:")
    audited = ("audit", "--what", "policy.managed", "--json", "--data", noting.data)
    until(lambda: invoke(*audited).stdout)
    entry = json.loads(invoke(*audited).stdout)
    assert entry["about"] == {"uri": "own:1-x", "action": "look"}
    assert (entry["who"], entry["remote"]) == ("ann", line["remote"])


def test_a_flush_has_its_log_line(noting):
    noting.register(cluster("east"))
    for reply in noting.say({"op": "flush", "cluster": "east"}, {"op": "flush"}):
        assert reply["data"] == {"flushed": []}
    until(lambda: len(changes(noting)) == 3)
    lines = changes(noting)[1:]
    assert [(each["who"], each["what"], each["cluster"]) for each in lines] == [
        ("ann", "flush", "east"),
        ("ann", "flush", ""),
    ]
    assert lines[0]["remote"].startswith("127.0.0.1:")
