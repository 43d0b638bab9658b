"""One daemon executes policies for another, which verifies the answers like any proposal."""

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler

import pytest
from served import FIRST_FIT, Server, ask_message, cluster, policy, serving

from moorage_policies import catalog
from tests.sites import Answer, Site

pytestmark = pytest.mark.heavy  # Many daemons, restarts and kills: minutes in all.

POLICIES = {
    "shows:1-x": "return {'keys': sorted(input_data), 'p': parameters, 's': self.settings['a'],"
    " 'free': input_data['cluster_data']['east']['capacity']['east-0']['gpus']['0']}",
    "fails:1-x": "raise ValueError('on purpose')",
    "spins:1-x": "while True: pass",
    "counts:1-x": "context['n'] = context.get('n', 0) + 1\nreturn {'n': context['n']}",
}
NO_CLUSTERS = {"c": {"capacity": {}, "data": 7}}
DEFAULTS = {"policy_parameters": {"x": 1, "y": 2}, "policy_settings": {"a": "default"}}


def policies() -> list[dict]:
    documents = [policy(body, uri, **DEFAULTS) for uri, body in POLICIES.items()]
    documents[2]["deadline_seconds"] = 0.3  # For the policy that never ends.
    return [*documents, catalog.document("first_fit")]


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Server, Server]]:
    """A daemon that decides, and one that executes its policies and has no machines."""
    with serving() as executes:
        executes.publish(*policies())
        executes.http.post("/executor", json={"executor_id": "e1"}).raise_for_status()
        elsewhere = {
            "POLICY_EXECUTION_MODE": "central",
            "POLICY_EXECUTOR_HOST_URL": executes.running.http,
            "POLICY_SYSTEM_EXECUTOR_ID": "e1",
        }
        with serving(environment=elsewhere) as decides:
            decides.register(cluster("east"), cluster("west", model="H100"))
            decides.publish(*policies())
            yield decides, executes


def count_evaluations(server: Server) -> float:
    """Return how many evaluations a daemon's own sandbox has made."""
    lines = server.http.get("/metrics").text.splitlines()
    found = [line for line in lines if line.startswith('moorage_sandbox{what="evaluations"}')]
    return float(found[0].split()[1]) if found else 0.0


def test_leases_are_decided_by_a_policy_that_runs_on_another_daemon(pair):
    decides, executes = pair
    here, there = count_evaluations(decides), count_evaluations(executes)
    one = {"resources": {"gpus": 1}, "lease": {"ttl_seconds": 60}}
    held = [decides.ask(**one)["lease"] for _ in range(8)]
    replies = decides.say(*(ask_message(**one, id=number) for number in range(8)))
    at_once = [reply["lease"] for reply in replies if reply["success"]]
    assert {r["error"]["code"] for r in replies if not r["success"]} <= {"conflict"}
    held += at_once + [decides.ask(**one)["lease"] for _ in range(8 - len(at_once))]
    places = [(s["node_id"], gpu) for each in held for s in each["placement"] for gpu in s["gpus"]]
    assert len(set(places)) == 16, "the executor gets the free amounts"
    assert decides.ask(**one)["error"]["code"] == "no_capacity"
    assert count_evaluations(executes) >= there + 16
    assert count_evaluations(decides) == here, "no policy ran in its own sandbox"
    for lease in held:
        decides.release(lease)


def test_the_policy_gets_documented_fields_with_overrides_of_the_caller(pair):
    decides, _ = pair
    given = {"parameters": {"y": 3}, "settings": {"a": "mine"}, "clusters": ["east"]}
    said = decides.ask("shows:1-x", **given)["data"]
    assert said["keys"] == ["cluster_data", "inputs", "resources", "seed"]
    assert (said["p"], said["s"], said["free"]) == ({"x": 1, "y": 3}, "mine", 1000)
    assert [decides.ask("counts:1-x")["data"]["n"] for _ in range(3)] == [1, 2, 3]


@pytest.mark.parametrize(
    ("policy", "code", "says"),
    [
        ("fails:1-x", "policy_error", "on purpose"),
        ("spins:1-x", "policy_timeout", "did not answer within 0.3 s"),
    ],
)
def test_faults_of_a_policy_at_an_executor_are_reported(pair, policy, code, says):
    decides, _ = pair
    for _ in range(6):
        error = decides.ask(policy)["error"]
        assert (error["code"], says in error["reason"]) == (code, True), error
    assert decides.ask("shows:1-x")["success"], "a policy's fault does not count as the service's"


def test_management_of_policies_that_run_elsewhere_is_refused(pair):
    decides, _ = pair
    (reply,) = decides.say({"op": "manage", "policy_rule_uri": FIRST_FIT, "action": "x"})
    assert reply["error"]["code"] == "unsupported"


def test_executor_documents_are_at_their_documented_paths(pair):
    http, document = pair[1].http, {"executor_id": "e2", "description": "second"}
    assert http.post("/executor", json=document).status_code == 200
    assert http.post("/executor", json=document).status_code == 409
    assert http.post("/executor", json={"executor_id": "../x"}).status_code == 400
    assert http.get("/executor/e2").json()["data"] == document
    changed = http.put("/executor/e2", json={"$set": {"description": "changed"}}).json()["data"]
    assert changed["description"] == "changed"
    for query, ids in (({"description": "changed"}, ["e2"]), ({}, ["moorage", "e1", "e2"])):
        found = http.post("/executor/query", json={"query": query}).json()["data"]
        assert [each["executor_id"] for each in found] == ids
    assert http.post("/executor/e2/create-infra", json={}).json()["error"]["code"] == "unsupported"
    assert http.delete("/executor/e2").json()["data"]["executor_id"] == "e2"
    assert http.get("/executor/e2").status_code == 404
    assert http.delete("/executor/moorage").status_code == 400


@pytest.mark.parametrize(
    ("path", "policy", "more", "status", "code"),
    [
        ("none", "shows:1-x", {"input_data": {}}, 404, "not_found"),
        ("e1", "none:1-x", {"input_data": {}}, 404, "unknown_policy"),
        ("e1", "shows:1-x", {}, 400, "bad_message"),
        ("e1", None, {"input_data": {}}, 400, "bad_message"),
        ("e1", "fails:1-x", {"input_data": 1}, 400, "policy_error"),
        ("e1", "shows:1-x", {"input_data": {"cluster_data": NO_CLUSTERS}}, 400, "bad_message"),
    ],
)
def test_an_impossible_execution_at_an_executor_is_refused_with_a_code(
    pair, path, policy, more, status, code
):
    body = {"policy_rule_uri": policy, **more} if policy else more
    answer = pair[1].http.post(f"/executor/{path}/execute_policy", json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)


def test_a_server_is_also_an_executor_for_foreign_clients(pair):
    body = {"policy_rule_uri": "counts:1-x", "input_data": {"anything": 1}, "parameters": {}}
    answer = pair[1].http.post("/executor/moorage/execute_policy", json=body).json()
    assert answer["success"]
    assert answer["data"]["n"] >= 1


class Liar(Site):
    """An executor server whose answers the test prepares."""

    def __init__(self) -> None:
        self.says: Answer = None
        self.requests: list[dict] = []
        super().__init__()

    def answer(self, request: BaseHTTPRequestHandler, body: bytes) -> Answer:
        self.requests.append(json.loads(body))
        return self.says


@pytest.fixture
def liar() -> Iterator[Liar]:
    with Liar() as liar:
        yield liar


def test_with_a_lying_or_broken_or_missing_executor_no_lease_is_granted(tmp_path, liar):
    elsewhere = {
        "MOORAGE_POLICY_EXECUTION_MODE": "remote",
        "MOORAGE_POLICY_EXECUTOR_HOST_URL": liar.url,
        "MOORAGE_EXTERNAL_TIMEOUT_SECONDS": "30",
    }
    with serving(tmp_path, environment=elsewhere) as server:
        server.fill(cluster("east"))
        nowhere = {"success": True, "data": {"cluster_id": "east", "node_id": "n", "gpus": ["0"]}}
        cases = [
            (200, json.dumps(nowhere), "policy_unsound"),
            (200, '{"success": true, "data": {"cluster_id": 7.5}}', "policy_bad_output"),
            (200, '{"success": false, "message": "no"}', "policy_error"),
            (200, json.dumps({"success": True, "data": "x" * 2_000_000}), "policy_bad_output"),
            (200, "<html>", "unavailable"),
            (200, '{"success": true, "data": {"e": "\udce9"}}', "unavailable"),  # Not UTF-8.
            (200, '{"success": true, "data": {"n": %s}}' % ("9" * 500), "policy_bad_output"),
            (500, '{"success": false, "message": "down"}', "unavailable"),
        ]
        for status, says, code in cases:
            liar.says = status, says.encode(errors="surrogateescape")
            reply = server.ask(resources={"gpus": 1}, lease={"ttl_seconds": 5})
            assert reply["error"]["code"] == code, (says, reply)
        assert set(liar.requests[0]) == {"policy_rule_uri", "input_data", "parameters"}
        assert liar.requests[0]["policy_rule_uri"] == FIRST_FIT
        liar.server_close()
        for _ in range(3):
            reply = server.ask(resources={"gpus": 1}, lease={"ttl_seconds": 5})
            assert reply["error"]["code"] == "unavailable"
            assert reply["error"]["service"] == "policy executor"
