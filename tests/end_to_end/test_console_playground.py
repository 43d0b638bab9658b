"""The console's playground: a policy on the fleet as it is, as it was, or as one would have it."""

from collections.abc import Iterator

import pytest
from served import FIRST_FIT, Server, cluster, policy, serving

pytestmark = pytest.mark.heavy

TERMS = {"ttl_seconds": 600}
PRINTS = """
print("wants", input_data["inputs"]["name"])
return {"cluster_id": "east", "node_id": "east-1", "gpus": ["0"]}
"""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving() as server:
        server.fill(cluster("east", nodes=2, gpus=4))
        yield server


def play(server: Server, path: str = "", **body) -> dict:
    answer = server.http.post(f"/console/playground{path}", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer.json()["data"]


def refused(server: Server, path: str = "", **body) -> tuple[int, dict]:
    answer = server.http.post(f"/console/playground{path}", json=body, timeout=120)
    return answer.status_code, answer.json()["error"]


def placed(played: dict) -> list[list[tuple[str, list[str]]]]:
    """Return where each request is placed; an empty list is nowhere."""
    return [
        [(share["node_id"], share["gpus"]) for share in each.get("placement") or ()]
        for each in played["results"]
    ]


def test_a_policy_is_tried_on_the_fleet_as_it_is_and_nothing_changes(server):
    held = server.ask(resources={"gpus": 3}, lease=TERMS)["lease"]
    played = play(server, policy_rule_uri=FIRST_FIT, requests=[{"resources": {"gpus": 2}}] * 3)
    assert played["fleet"] == {"nodes": 2, "gpus": 8}
    assert placed(played) == [[("east-1", ["0", "1"])], [("east-1", ["2", "3"])], []]
    assert [each.get("code") for each in played["results"]] == [None, None, "no_capacity"]
    assert all(each["seconds"] >= 0 for each in played["results"])
    assert [row["id"] for row in server.held()] == [held["id"]]
    (known,) = server.http.get("/policy").json()["data"]
    assert known["policy_rule_uri"] == FIRST_FIT
    server.release(held)


def test_prints_results_and_errors_come_with_their_lines(server):
    named = {"resources": {"gpus": 1}, "inputs": {"name": "one"}}
    code = policy(PRINTS, "p:1.0-a")["code"]
    played = play(server, code=code, requests=[named, named, {"inputs": {}}])
    _, declined, raised = played["results"]
    assert [each["ok"] for each in played["results"]] == [True, False, False]
    assert declined["data"]["node_id"] == "east-1"
    assert (raised["code"], raised["line"]) == ("policy_error", 5)
    assert "wants one" in played["prints"]
    assert any(line["line"] == 5 and line["hits"] for line in played["lines"])


def test_a_decision_opens_with_the_fleet_as_it_was(server):
    demand = {"resources": {"gpus": 4}}
    leases = [server.ask(**demand, lease=TERMS)["lease"] for _ in range(2)]
    no = server.ask(**demand, lease=TERMS)["request"]
    for each in leases:
        server.release(each)
    place = (leases[1]["placement"][0]["node_id"], ["0", "1", "2", "3"])
    for decision, expected in ((leases[1]["id"], [[place], []]), (no, [[], []])):
        fleet = {"decision": decision}
        then = play(server, policy_rule_uri=FIRST_FIT, fleet=fleet, requests=[demand] * 2)
        assert placed(then) == expected
    now = play(server, policy_rule_uri=FIRST_FIT, requests=[demand] * 2)
    assert all(placed(now))


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
