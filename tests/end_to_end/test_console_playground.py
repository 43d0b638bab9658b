"""The console's playground: a policy on the fleet as it is, as it was, or as one would have it."""

import json
from collections.abc import Iterator

import pytest
from served import Server, cluster, policy, serving

from moorage_policies import catalog

pytestmark = pytest.mark.heavy  # Daemons.

FIRST = catalog.document("first_fit")
TERMS = {"ttl_seconds": 600}
PRINTS = """
print("asked for", input_data["inputs"]["name"])
return {"cluster_id": "east", "node_id": "east-1", "gpus": ["0"]}
"""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving() as server:
        server.register(cluster("east", nodes=2, gpus=4))
        server.publish(FIRST)
        yield server


def code(body: str) -> str:
    return policy(body, "p:1.0-a")["code"]


def play(server: Server, path: str = "", **body) -> dict:
    answer = server.http.post(f"/console/playground{path}", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer.json()["data"]


def refused(server: Server, path: str = "", **body) -> tuple[int, dict]:
    answer = server.http.post(f"/console/playground{path}", json=body, timeout=120)
    return answer.status_code, answer.json()["error"]


def test_a_policy_is_tried_on_the_fleet_as_it_is_and_nothing_changes(server):
    held = server.ask(resources={"gpus": 3}, lease=TERMS)["lease"]
    two = {"resources": {"gpus": 2}}
    told = play(server, policy_rule_uri=FIRST["policy_rule_uri"], requests=[two, two, two, two])
    assert told["fleet"] == {"nodes": 2, "gpus": 8}
    places = [each.get("placement") for each in told["results"]]
    assert [each and (each[0]["node_id"], each[0]["gpus"]) for each in places] == [
        ("east-1", ["0", "1"]),
        ("east-1", ["2", "3"]),
        None,
        None,
    ]
    assert [each.get("code") for each in told["results"]] == [
        None,
        None,
        "no_capacity",
        "no_capacity",
    ]
    assert all(each["seconds"] >= 0 for each in told["results"])
    (row,) = server.held()
    assert row["id"] == held["id"]
    assert (
        server.http.get("/policy").json()["data"][0]["policy_rule_uri"] == FIRST["policy_rule_uri"]
    )
    server.release(held)


def test_what_it_prints_returns_and_is_refused_for_is_told(server):
    named = {"resources": {"gpus": 1}, "inputs": {"name": "one"}}
    told = play(server, code=code(PRINTS), requests=[named, named, {"inputs": {}}])
    assert [each["ok"] for each in told["results"]] == [True, False, False]
    assert told["results"][1]["data"]["node_id"] == "east-1"
    assert told["results"][2]["code"] == "policy_error"
    assert told["results"][2]["line"] == 5
    assert "asked for one" in told["prints"]
    assert any(line["line"] == 5 and line["hits"] for line in told["lines"])


def test_a_fleet_may_be_uploaded(server):
    documents = [cluster("mine", nodes=1, gpus=2, model="H")]
    wanted = {"resources": {"gpus": 2, "models": ["H"]}}
    uri = FIRST["policy_rule_uri"]
    told = play(server, policy_rule_uri=uri, fleet={"clusters": documents}, requests=[wanted] * 2)
    assert told["fleet"] == {"nodes": 1, "gpus": 2}
    assert [each["ok"] for each in told["results"]] == [True, False]


def test_a_decision_opens_with_the_fleet_as_it_was(server):
    before = server.ask(resources={"gpus": 4}, lease=TERMS)["lease"]
    asked = server.ask(resources={"gpus": 4}, lease=TERMS)["lease"]
    for each in (before, asked):
        server.release(each)
    uri, wanted = FIRST["policy_rule_uri"], {"resources": {"gpus": 4}}
    then = play(server, policy_rule_uri=uri, fleet={"decision": asked["id"]}, requests=[wanted] * 2)
    assert [each["ok"] for each in then["results"]] == [True, False]
    assert then["results"][0]["placement"][0]["node_id"] == asked["placement"][0]["node_id"]
    now = play(server, policy_rule_uri=uri, requests=[wanted] * 2)
    assert [each["ok"] for each in now["results"]] == [True, True]


def test_a_backtest_has_a_curve(server):
    rows = ["name,cpu_milli,memory_mib,num_gpu,gpu_milli"]
    rows += [f"p{n},1000,1024,1,1000" for n in range(20)]
    trace = "\n".join(rows) + "\n"
    told = play(server, "/backtest", policy_rule_uri=FIRST["policy_rule_uri"], trace=trace)
    assert told["granted"] == 8
    assert told["allocation"] == 1.0
    assert told["curve"][-1][1] == 1.0
    assert sum(told["refused"].values()) == told["asked"] - 8
    status, error = refused(server, "/backtest", code=FIRST["code"], trace="no,table\n1,2\n")
    assert (status, error["code"]) == (400, "bad_message")


def test_code_that_does_not_load_is_told_with_its_place(server):
    status, error = refused(server, code="class AIOSv1PolicyRule:\n    def eval(self:\n")
    assert (status, error["code"]) == (400, "bad_policy")
    assert "line 2" in error["reason"]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "code"),
        ({"code": "x", "policy_rule_uri": "y"}, "code"),
        ({"code": 3}, "code"),
        ({"code": "x", "fleet": "other"}, "fleet"),
        ({"code": "x", "fleet": {"clusters": []}}, "fleet"),
        ({"code": "x", "fleet": {"clusters": [{}], "decision": "a"}}, "fleet"),
        ({"code": "x", "requests": {}}, "requests"),
        ({"code": "x", "requests": [3]}, "requests"),
        ({"code": "x", "requests": [{}] * 101}, ""),
        ({"code": "x", "more": 1}, "more"),
    ],
)
def test_what_cannot_be_tried_is_refused_with_its_field(server, body, field):
    status, error = refused(server, **body)
    assert (status, error["code"], error.get("field", "")) == (400, "bad_message", field)


def test_unknown_decisions_and_policies_are_named(server):
    status, error = refused(server, code="x", fleet={"decision": "unheard-of"})
    assert (status, error["code"], error["field"]) == (404, "unknown_request", "request")
    assert refused(server, policy_rule_uri="none:1.0-a")[0] == 404


def test_a_tenant_is_known_first(tmp_path):
    file = tmp_path / "moored.toml"
    file.write_text('[tokens]\nann = "aa"\n')
    with serving(tmp_path / "data", options=("--config", str(file))) as server:
        answer = server.http.post("/console/playground", content=json.dumps({"code": "x"}))
        assert answer.status_code == 401
