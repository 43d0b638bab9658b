"""What was decided of late, page by page, and the fleet as it was for a decision."""

import base64
import json
import time
import zlib
from contextlib import ExitStack

import pytest
from served import FIRST_FIT, ask_message, cluster, heard, serving, until

pytestmark = pytest.mark.heavy

TERMS = {"ttl_seconds": 600}
TOKENS = 'operators = ["ann"]\n[tokens]\nann = "of-ann"\nbob = "of-bob"\n'


@pytest.fixture(scope="module")
def server():
    with serving() as server:
        server.fill(cluster("east", nodes=2, gpus=4))
        yield server


def decided(server, **fields):
    (answer,) = server.say({"op": "decisions", **fields})
    assert answer["success"], answer
    return answer["data"]


def hold(server, **more):
    """Return a new lease, which ends with the test."""
    lease = server.ask(**{"resources": {"gpus": 4}, "lease": TERMS, **more})["lease"]
    server.leases.append(lease)
    return lease


def states(rows):
    return [row["state"] for row in rows]


def unpacked(text):
    return json.loads(zlib.decompress(base64.b64decode(text)))


def test_grants_refusals_queue_and_ends_are_listed_newest_first(server):
    held = hold(server)
    refused = server.ask(id="r", resources={"gpus": 5}, lease=TERMS)
    other = hold(server)
    with server.socket() as socket:
        waits = TERMS | {"wait_seconds": 60}
        socket.send(json.dumps(ask_message(id="w", resources={"gpus": 1}, lease=waits)))
        until(server.waiting)
        server.release(held)
        granted = heard(socket)["lease"]
    server.leases.append(granted)
    page = decided(server, limit=6)
    assert page["kept_since"] is None
    rows = page["decisions"]
    assert states(rows) == ["granted", "ended", "queued", "granted", "refused", "granted"]
    assert [row["request"] for row in rows] == [
        granted["id"],
        held["id"],
        granted["id"],
        other["id"],
        refused["request"],
        held["id"],
    ]
    assert rows[0]["placement"][0]["node_id"] == "east-0"
    assert rows[4]["code"] == refused["error"]["code"]
    assert rows[4]["reason"] == refused["error"]["reason"]
    assert [row["resources"]["gpus"] for row in rows] == [1, 4, 1, 4, 5, 4]
    assert {row["policy_rule_uri"] for row in rows} == {FIRST_FIT}
    assert all(row["at"] > 1e9 for row in rows)


def test_pages_join_without_gap_or_double(server):
    before = len(decided(server, limit=1000)["decisions"])
    for n in range(30):
        answer = server.ask(resources={"gpus": 5 if n % 3 else 1}, lease=TERMS)
        if answer["success"]:
            server.release(answer["lease"])
    whole = decided(server, limit=1000)["decisions"]
    assert len(whole) == before + 40
    for limit in (1, 3, 7, 40):
        rows, after = [], ""
        while True:
            page = decided(server, limit=limit, **({"after": after} if after else {}))
            assert len(page["decisions"]) <= limit
            rows += page["decisions"]
            if page["next"] is None:
                break
            after = page["next"]
        assert rows == whole


def test_more_facts_than_one_answer_looks_through(server):
    """Where nothing of a page matches, `next` goes on."""
    first = hold(server, resources={"gpus": 2})
    message = json.dumps(ask_message(resources={"gpus": 1}, lease=TERMS))
    with server.socket() as socket:
        for _ in range(2600):
            socket.send(message)
            lease = heard(socket)["lease"]
            ended = {"op": "release", "lease": lease["id"], "token": lease["token"]}
            socket.send(json.dumps(ended))
            socket.recv(30)
    found = {"filters": {"request": first["id"]}}
    page = decided(server, **found)
    assert page["decisions"] == []
    page = decided(server, after=page["next"], **found)
    assert [row["request"] for row in page["decisions"]] == [first["id"]]


def test_the_server_filters(server):
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
        rows = decided(server, filters=filters)["decisions"]
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
def test_what_cannot_be_listed_is_refused_with_its_field(server, fields, field):
    (answer,) = server.say({"op": "decisions", **fields})
    assert (answer["error"]["code"], answer["error"]["field"]) == ("bad_message", field)


def test_a_restart_keeps_what_the_ledger_has(tmp_path):
    with serving(tmp_path) as server:
        server.fill(cluster("east", nodes=2, gpus=4))
        held = server.ask(resources={"gpus": 4}, lease=TERMS)["lease"]
    with serving(tmp_path) as server:
        (row,) = decided(server)["decisions"]
        assert (row["request"], row["state"]) == (held["id"], "granted")
        refused = server.ask(id="r", resources={"gpus": 5}, lease=TERMS)["request"]
        assert [row["request"] for row in decided(server)["decisions"]] == [refused, held["id"]]


def test_the_fleet_of_a_decision(server):
    inputs = {"name": "one"}
    before = hold(server)
    asked = hold(server, id="a", inputs=inputs, resources={"gpus": 3})
    refused = server.ask(id="r", inputs=inputs, resources={"gpus": 4}, lease=TERMS)["request"]
    for each in (before, asked):
        server.release(each)
    wholly = [1000] * 4
    for request, gpus, taken in [
        (before["id"], 4, [0] * 8),
        (asked["id"], 3, [*wholly, 0, 0, 0, 0]),
        (refused, 4, [*wholly, 1000, 1000, 1000, 0]),
    ]:
        (answer,) = server.say({"op": "decision_fleet", "request": request})
        then = answer["data"]
        assert unpacked(then["packed"])["milli"] == taken
        assert then["request"]["resources"]["gpus"] == gpus
        assert then["request"]["policy_rule_uri"] == FIRST_FIT
        assert then["at"] > 1e9
    assert then["request"]["inputs"] == inputs
    (again,) = server.say(then["request"])
    assert again["success"]
    server.leases += [again["lease"]] if "lease" in again else []
    (unknown,) = server.say({"op": "decision_fleet", "request": "unheard-of"})
    assert (unknown["error"]["code"], unknown["error"]["field"]) == ("unknown_request", "request")


def test_the_fleet_at_a_time(server):
    held = hold(server)
    hold(server, resources={"gpus": 1})
    server.release(held)
    times = {row["state"]: row["at"] for row in decided(server, limit=3)["decisions"]}
    first = min(row["at"] for row in decided(server, limit=3)["decisions"])

    def then(at):
        (answer,) = server.say({"op": "past_fleet", "at": at})
        assert answer["success"], answer
        assert answer["data"]["at"] == at
        told = unpacked(answer["data"]["packed"])
        return told["nodes"], sum(told["milli"]), answer["data"]["seq"]

    assert then(0) == ([], 0, 0)
    assert then(first - 0.001)[:2] == (["east-0", "east-1"], 0)
    assert then(times["ended"] - 0.001)[1] == 5000
    nodes, milli, seq = then(times["ended"])
    assert (nodes, milli) == (["east-0", "east-1"], 1000)
    assert then(times["ended"] + 3600) == (nodes, milli, seq)
    (wrong,) = server.say({"op": "past_fleet", "at": -1})
    assert (wrong["error"]["code"], wrong["error"]["field"]) == ("bad_message", "at")


def test_a_refused_decision_opens_in_the_playground(server):
    held = hold(server)
    refused = server.ask(id="r", resources={"gpus": 4, "nodes": 2}, lease=TERMS)
    assert not refused["success"]
    server.release(held)
    (answer,) = server.say({"op": "decision_fleet", "request": refused["request"]})
    wanted = {name: answer["data"]["request"][name] for name in ("inputs", "resources")}
    body = {"policy_rule_uri": FIRST_FIT, "requests": [wanted]}
    for fleet, good in (({"decision": refused["request"]}, False), ("live", True)):
        played = server.http.post(
            "/console/playground", json=body | {"fleet": fleet}, timeout=120
        ).json()
        assert [each["ok"] for each in played["data"]["results"]] == [good]


AS_ANN, AS_BOB = ({"Authorization": f"Bearer of-{name}"} for name in ("ann", "bob"))


def say(socket, message):
    socket.send(json.dumps(message))
    return heard(socket)


def listed(socket, op, name, key, **more):
    return [row[key] for row in say(socket, {"op": op, **more})["data"][name]]


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """A daemon of two tenants, of whom ann is an operator."""
    folder = tmp_path_factory.mktemp("tenants")
    file = folder / "moored.toml"
    file.write_text(TOKENS)
    with serving(folder / "data", options=("--config", str(file)), bearer="of-ann") as server:
        server.fill(cluster("east", nodes=2, gpus=4))
        yield server


def test_tenants_see_their_own_and_operators_all(shared):
    with shared.socket(AS_ANN) as ann, shared.socket(AS_BOB) as bob:
        first = say(ann, ask_message(resources={"gpus": 4}, lease=TERMS))["lease"]
        second = say(bob, ask_message(resources={"gpus": 1}, lease=TERMS))["lease"]
        mine, lease = first["id"], second["id"]
        refused = say(bob, ask_message(id="r", resources={"gpus": 9}))["request"]
        assert listed(ann, "decisions", "decisions", "request", limit=3) == [refused, lease, mine]
        assert listed(bob, "decisions", "decisions", "request", limit=2) == [refused, lease]
        assert listed(ann, "leases", "leases", "id") == [mine, lease]
        assert listed(bob, "leases", "leases", "id") == [lease]
        foreign = {"filters": {"tenant": "ann"}}
        assert set(listed(bob, "decisions", "decisions", "tenant", **foreign)) <= {"bob"}
        foreign = say(bob, {"op": "decision_fleet", "request": mine})
        assert foreign["error"]["code"] == "unknown_request"
        own = unpacked(say(bob, {"op": "decision_fleet", "request": lease})["data"]["packed"])
        assert "ann" not in own["tenants"]
        past = {"op": "past_fleet", "at": time.time()}
        own = unpacked(say(bob, past)["data"]["packed"])
        assert own["tenants"] == ["", "yours", "busy"]
        assert "bob" in unpacked(say(ann, past)["data"]["packed"])["tenants"]
        whole = say(ann, {"op": "decision_fleet", "request": refused})["data"]["packed"]
        assert {"ann", "bob"} <= set(unpacked(whole)["tenants"])
        for socket, held in ((ann, first), (bob, second)):
            say(socket, {"op": "release", "lease": held["id"], "token": held["token"]})


def test_leases_and_waiters_of_others_are_operators_news_alone(shared):
    with shared.socket(AS_ANN) as ann, shared.socket(AS_BOB) as bob, ExitStack() as waiting:
        held = {}
        for name, socket, headers in (("ann", ann, AS_ANN), ("bob", bob, AS_BOB)):
            held[name] = say(socket, ask_message(resources={"gpus": 4}, lease=TERMS))["lease"]
            waiter = waiting.enter_context(shared.socket(headers))
            waits = {"nodes": 2, "gpus": 4}
            asked = ask_message(id="w", resources=waits, lease=TERMS | {"wait_seconds": 600})
            waiter.send(json.dumps(asked))
            until(lambda s=socket, n=name: n in listed(s, "queue", "waiting", "tenant"))
        assert sorted(listed(ann, "queue", "waiting", "tenant")) == ["ann", "bob"]
        assert listed(bob, "queue", "waiting", "tenant") == ["bob"]
        assert listed(ann, "leases", "leases", "tenant") == ["ann", "bob"]
        assert listed(bob, "leases", "leases", "tenant") == ["bob"]
        requests = {
            row["tenant"]: row["request"] for row in say(ann, {"op": "queue"})["data"]["waiting"]
        }
        of = {name: {"filters": {"tenant": name}} for name in ("ann", "bob")}
        assert listed(ann, "leases", "leases", "id", **of["bob"]) == [held["bob"]["id"]]
        assert listed(bob, "leases", "leases", "id", **of["ann"]) == []
        for op in ("status", "why"):
            for field, one in (("lease", held["bob"]["id"]), ("request", requests["bob"])):
                told = say(ann, {"op": op, field: one})
                assert told["success"]
                assert held["bob"]["token"] not in json.dumps(told)
            for field, one in (("lease", held["ann"]["id"]), ("request", requests["ann"])):
                assert not say(bob, {"op": op, field: one})["success"]
        assert not say(ann, {"op": "cancel", "request": requests["bob"]})["success"]
        none = {"op": "release", "lease": held["bob"]["id"], "token": held["ann"]["token"]}
        assert not say(ann, none)["success"]
        assert listed(bob, "leases", "leases", "tenant") == ["bob"]
        for name, socket in (("ann", ann), ("bob", bob)):
            lease = held[name]
            say(socket, {"op": "cancel", "request": requests[name]})
            say(socket, {"op": "release", "lease": lease["id"], "token": lease["token"]})
