"""Tests of pages of decisions, of the fleet at a decision, and of trials on such a fleet."""

import base64
import json
import time
import zlib
from contextlib import ExitStack

import pytest
from served import FIRST_FIT, ask_message, cluster, policy, read_message, serving, tell, until

pytestmark = pytest.mark.heavy

TERMS = {"ttl_seconds": 600}
TOKENS = {"MOORAGE_TOKENS": "ann:of-ann,bob:of-bob", "MOORAGE_OPERATORS": "ann"}


@pytest.fixture(scope="module")
def server():
    with serving() as server:
        server.fill(cluster("east", nodes=2, gpus=4))
        yield server


def decisions(server, **fields):
    (answer,) = server.say({"op": "decisions", **fields})
    assert answer["success"], answer
    return answer["data"]


def hold(server, **more):
    """Return a new lease, which ends with the test."""
    lease = server.ask(**{"resources": {"gpus": 4}, "lease": TERMS, **more})["lease"]
    server.leases.append(lease)
    return lease


def unpack(text):
    return json.loads(zlib.decompress(base64.b64decode(text)))


def test_decisions_are_listed_with_grants_and_refusals_and_ends_newest_first(server):
    held = hold(server)
    refused = server.ask(id="r", resources={"gpus": 5}, lease=TERMS)
    other = hold(server)
    with server.socket() as socket:
        waits = TERMS | {"wait_seconds": 60}
        socket.send(json.dumps(ask_message(id="w", resources={"gpus": 1}, lease=waits)))
        until(server.waiting)
        server.release(held)
        granted = read_message(socket)["lease"]
    server.leases.append(granted)
    page = decisions(server, limit=6)
    assert page["kept_since"] is None
    rows = page["decisions"]
    states = [row["state"] for row in rows]
    assert states == ["granted", "ended", "queued", "granted", "refused", "granted"]
    first, second, third = (each["id"] for each in (held, other, granted))
    requests = [third, first, third, second, refused["request"], first]
    assert [row["request"] for row in rows] == requests
    assert rows[0]["placement"][0]["node_id"] == "east-0"
    assert all(rows[4][each] == refused["error"][each] for each in ("code", "reason"))
    assert [row["resources"]["gpus"] for row in rows] == [1, 4, 1, 4, 5, 4]
    assert {row["policy_rule_uri"] for row in rows} == {FIRST_FIT}
    assert all(row["at"] > 1e9 for row in rows)


def test_pages_of_decisions_join_without_gaps_or_repeats(server):
    before = len(decisions(server, limit=1000)["decisions"])
    for _ in range(5):
        server.release(server.ask(resources={"gpus": 1}, lease=TERMS)["lease"])
        server.ask(resources={"gpus": 5}, lease=TERMS)
    whole = decisions(server, limit=1000)["decisions"]
    assert len(whole) == before + 15
    for limit in (1, 3, 7):
        rows, after = [], {}
        while True:
            page = decisions(server, limit=limit, **after)
            assert len(page["decisions"]) <= limit
            rows += page["decisions"]
            if page["next"] is None:
                break
            after = {"after": page["next"]}
        assert rows == whole


def test_the_server_filters_decisions(server):
    held = hold(server)
    refused = server.ask(id="r", resources={"gpus": 5}, lease=TERMS)["request"]
    for filters, wanted in [
        ({"state": "refused"}, [refused]),
        ({"state": "granted"}, [held["id"]]),
        ({"code": "never_fits"}, [refused]),
        ({"request": held["id"]}, [held["id"]]),
        ({"policy_rule_uri": FIRST_FIT}, [refused, held["id"]]),
        ({"policy_rule_uri": "other:1-x"}, []),
        ({"state": "ended"}, []),
    ]:
        rows = decisions(server, filters=filters)["decisions"]
        found = [row["request"] for row in rows if row["request"] in {held["id"], refused}]
        assert found == wanted, filters


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"filters": {"colour": "red"}}, "filters.colour"),
        ({"after": "x"}, "after"),
        ({"after": "4"}, "after"),
        ({"after": "1:" + "9" * 4_000}, "after"),
        ({"limit": 0}, "limit"),
    ],
)
def test_the_refusal_of_an_invalid_listing_of_decisions_names_the_field(server, fields, field):
    (answer,) = server.say({"op": "decisions", **fields})
    assert (answer["error"]["code"], answer["error"]["field"]) == ("bad_message", field)


def test_after_a_restart_decisions_on_grants_come_from_the_ledger(tmp_path):
    with serving(tmp_path) as server:
        server.fill(cluster("east", nodes=2, gpus=4))
        held = server.ask(resources={"gpus": 4}, lease=TERMS)["lease"]
    with serving(tmp_path) as server:
        (row,) = decisions(server)["decisions"]
        assert (row["request"], row["state"]) == (held["id"], "granted")
        refused = server.ask(id="r", resources={"gpus": 5}, lease=TERMS)["request"]
        assert [row["request"] for row in decisions(server)["decisions"]] == [refused, held["id"]]


def test_a_decision_is_returned_with_its_fleet(server):
    inputs = {"name": "one"}
    before = hold(server)
    larger = hold(server, id="a", inputs=inputs, resources={"gpus": 3})
    refused = server.ask(id="r", inputs=inputs, resources={"gpus": 4}, lease=TERMS)["request"]
    for each in (before, larger):
        server.release(each)
    wholly = [1000] * 4
    for request, gpus, taken in [
        (before["id"], 4, [0] * 8),
        (larger["id"], 3, [*wholly, 0, 0, 0, 0]),
        (refused, 4, [*wholly, 1000, 1000, 1000, 0]),
    ]:
        (answer,) = server.say({"op": "decision_fleet", "request": request})
        then = answer["data"]
        assert unpack(then["packed"])["milli"] == taken
        assert then["request"]["resources"]["gpus"] == gpus
        assert then["request"]["policy_rule_uri"] == FIRST_FIT
        assert then["at"] > 1e9
    assert then["request"]["inputs"] == inputs
    (again,) = server.say(then["request"])
    assert again["success"]
    server.leases += [again["lease"]] if "lease" in again else []
    (unknown,) = server.say({"op": "decision_fleet", "request": "unheard-of"})
    assert (unknown["error"]["code"], unknown["error"]["field"]) == ("unknown_request", "request")


def test_the_fleet_at_an_earlier_time_can_be_read(server):
    held = hold(server)
    hold(server, resources={"gpus": 1})
    server.release(held)
    rows = decisions(server, limit=3)["decisions"]
    times = {row["state"]: row["at"] for row in rows}
    first = min(row["at"] for row in rows)

    def then(at):
        (answer,) = server.say({"op": "past_fleet", "at": at})
        assert answer["success"], answer
        assert answer["data"]["at"] == at
        fleet = unpack(answer["data"]["packed"])
        return fleet["nodes"], sum(fleet["milli"]), answer["data"]["seq"]

    assert then(0) == ([], 0, 0)
    assert then(first - 0.001)[:2] == (["east-0", "east-1"], 0)
    assert then(times["ended"] - 0.001)[1] == 5000
    nodes, milli, seq = then(times["ended"])
    assert (nodes, milli) == (["east-0", "east-1"], 1000)
    assert then(times["ended"] + 3600) == (nodes, milli, seq)
    (wrong,) = server.say({"op": "past_fleet", "at": -1})
    assert (wrong["error"]["code"], wrong["error"]["field"]) == ("bad_message", "at")


def list_keys(socket, op, name, key, **more):
    return [row[key] for row in tell(socket, {"op": op, **more})["data"][name]]


def test_tenants_see_their_own_decisions_and_operators_see_all():
    waits = {"resources": {"nodes": 2, "gpus": 4}, "lease": TERMS | {"wait_seconds": 600}}
    with serving(environment=TOKENS, bearer="of-ann") as shared, ExitStack() as stack:
        shared.fill(cluster("east", nodes=2, gpus=4))
        ann, bob = (
            stack.enter_context(shared.socket(bearer=f"of-{each}")) for each in ("ann", "bob")
        )
        sockets = {"ann": ann, "bob": bob}
        held, requests = {}, {}
        for name, socket in sockets.items():
            held[name] = tell(socket, ask_message(resources={"gpus": 4}, lease=TERMS))["lease"]
        mine, lease = held["ann"]["id"], held["bob"]["id"]
        refused = tell(bob, ask_message(id="r", resources={"gpus": 9}))["request"]
        assert list_keys(ann, "decisions", "decisions", "request", limit=3) == [
            refused,
            lease,
            mine,
        ]
        assert list_keys(bob, "decisions", "decisions", "request", limit=2) == [refused, lease]
        of = {name: {"filters": {"tenant": name}} for name in sockets}
        assert set(list_keys(bob, "decisions", "decisions", "tenant", **of["ann"])) <= {"bob"}
        foreign = tell(bob, {"op": "decision_fleet", "request": mine})
        assert foreign["error"]["code"] == "unknown_request"

        def tenants(socket, **message):
            return unpack(tell(socket, message)["data"]["packed"])["tenants"]

        now = time.time()
        assert "ann" not in tenants(bob, op="decision_fleet", request=lease)
        assert {"ann", "bob"} <= set(tenants(ann, op="decision_fleet", request=refused))
        assert tenants(bob, op="past_fleet", at=now) == ["", "yours", "busy"]
        assert "bob" in tenants(ann, op="past_fleet", at=now)

        for name, socket in sockets.items():
            waiter = stack.enter_context(shared.socket(bearer=f"of-{name}"))
            waiter.send(json.dumps(ask_message(id="w", **waits)))
            until(lambda s=socket, n=name: n in list_keys(s, "queue", "waiting", "tenant"))
        for row in tell(ann, {"op": "queue"})["data"]["waiting"]:
            requests[row["tenant"]] = row["request"]
        assert requests.keys() == {"ann", "bob"}
        assert list_keys(bob, "queue", "waiting", "tenant") == ["bob"]
        assert list_keys(ann, "leases", "leases", "tenant") == ["ann", "bob"]
        assert list_keys(bob, "leases", "leases", "tenant") == ["bob"]
        assert list_keys(ann, "leases", "leases", "id", **of["bob"]) == [lease]
        assert list_keys(bob, "leases", "leases", "id", **of["ann"]) == []
        for op in ("status", "why"):
            for field, ids in (("lease", {"ann": mine, "bob": lease}), ("request", requests)):
                reply = tell(ann, {"op": op, field: ids["bob"]})
                assert reply["success"]
                assert held["bob"]["token"] not in json.dumps(reply)
                assert not tell(bob, {"op": op, field: ids["ann"]})["success"]
        assert not tell(ann, {"op": "cancel", "request": requests["bob"]})["success"]
        stolen = {"op": "release", "lease": lease, "token": held["ann"]["token"]}
        assert not tell(ann, stolen)["success"]
        assert list_keys(bob, "leases", "leases", "tenant") == ["bob"]


PRINTS = """
print("wants", input_data["inputs"]["name"])
return {"cluster_id": "east", "node_id": "east-1", "gpus": ["0"]}
"""


def play(server, **body) -> dict:
    answer = server.http.post("/console/playground", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer.json()["data"]


def refusal(server, **body) -> tuple[int, dict]:
    answer = server.http.post("/console/playground", json=body, timeout=120)
    return answer.status_code, answer.json()["error"]


def placements(played: dict) -> list[list[tuple[str, list[str]]]]:
    """Return where each request is placed; an empty list means that it is not placed."""
    return [
        [(share["node_id"], share["gpus"]) for share in each.get("placement") or ()]
        for each in played["results"]
    ]


def test_a_trial_of_a_policy_on_the_present_fleet_changes_nothing(server):
    held = server.ask(resources={"gpus": 3}, lease=TERMS)["lease"]
    played = play(server, policy_rule_uri=FIRST_FIT, requests=[{"resources": {"gpus": 2}}] * 3)
    assert played["fleet"] == {"nodes": 2, "gpus": 8}
    assert placements(played) == [[("east-1", ["0", "1"])], [("east-1", ["2", "3"])], []]
    assert [each.get("code") for each in played["results"]] == [None, None, "no_capacity"]
    assert all(each["seconds"] >= 0 for each in played["results"])
    assert [row["id"] for row in server.held()] == [held["id"]]
    (known,) = server.http.get("/policy").json()["data"]
    assert known["policy_rule_uri"] == FIRST_FIT
    server.release(held)


def test_a_trial_of_a_policy_returns_prints_and_results_and_errors_with_their_lines(server):
    named = {"resources": {"gpus": 1}, "inputs": {"name": "one"}}
    code = policy(PRINTS, "p:1.0-a")["code"]
    played = play(server, code=code, requests=[named, named, {"inputs": {}}])
    _, declined, raised = played["results"]
    assert [each["ok"] for each in played["results"]] == [True, False, False]
    assert declined["data"]["node_id"] == "east-1"
    assert (raised["code"], raised["line"]) == ("policy_error", 5)
    assert "wants one" in played["prints"]
    assert any(line["line"] == 5 and line["hits"] for line in played["lines"])


def test_a_decision_opens_with_the_fleet_of_its_time(server):
    demand = {"resources": {"gpus": 4}}
    leases = [server.ask(**demand, lease=TERMS)["lease"] for _ in range(2)]
    no = server.ask(**demand, lease=TERMS)["request"]
    for each in leases:
        server.release(each)
    place = (leases[1]["placement"][0]["node_id"], ["0", "1", "2", "3"])
    for decision, expected in ((leases[1]["id"], [[place], []]), (no, [[], []])):
        fleet = {"decision": decision}
        then = play(server, policy_rule_uri=FIRST_FIT, fleet=fleet, requests=[demand] * 2)
        assert placements(then) == expected
    now = play(server, policy_rule_uri=FIRST_FIT, requests=[demand] * 2)
    assert all(placements(now))


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
def test_the_refusal_of_an_invalid_trial_names_the_field(server, body, field):
    status, error = refusal(server, **body)
    assert (status, error["code"], error.get("field", "")) == (400, "bad_message", field)


def test_the_refusal_of_an_unknown_decision_names_the_field_request(server):
    status, error = refusal(server, code="x", fleet={"decision": "unheard-of"})
    assert (status, error["code"], error["field"]) == (404, "unknown_request", "request")
    assert refusal(server, policy_rule_uri="none:1.0-a")[0] == 404
