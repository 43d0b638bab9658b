"""A "no" says which kind it is, with names; `why` says what each node lacks."""

import json

import pytest
from served import FIRST_FIT, ask_message


@pytest.fixture
def full(server):
    replies = [
        server.ask(FIRST_FIT, resources={"gpus": 4, "models": ["A100"]}, lease={"ttl_seconds": 60})
        for _ in range(2)
    ]
    yield
    for reply in replies:
        held = reply["lease"]
        server.say({"op": "release", "lease": held["id"], "token": held["token"]})


def test_never_names_what_would_fit(server):
    reply = server.ask(FIRST_FIT, resources={"gpus": 9}, lease={"ttl_seconds": 60})
    error = reply["error"]
    assert (error["code"], error["verdict"]) == ("never_fits", "never")
    most = error["largest"]["gpus"]
    change = {"field": "resources.gpus", "asked": 9, "fits": most}
    assert error["fits_if"] == [change]
    assert f"It would fit with resources.gpus {most} instead of 9." in reply["message"]
    smaller = server.ask(FIRST_FIT, resources={"gpus": most}, lease={"ttl_seconds": 60})
    held = smaller["lease"]
    server.say({"op": "release", "lease": held["id"], "token": held["token"]})


def test_not_now_tells_the_nodes_of_why(server, full):
    wanted = {"gpus": 3, "models": ["A100"]}
    reply = server.ask(FIRST_FIT, resources=wanted, lease={"ttl_seconds": 60})
    assert (reply["error"]["code"], reply["error"]["verdict"]) == ("no_capacity", "not_now")
    (told,) = server.say({"op": "why", "request": reply["request"], "nodes": True, "limit": 2})
    rows = told["data"]["node_verdicts"]
    assert [row["text"].partition(" ")[2] for row in rows] == ["lacks 3 of 3 GPUs free"] * 2
    assert told["data"]["verdict"] == "not_now"
    after = told["data"]["next"]
    (rest,) = server.say({"op": "why", "request": reply["request"], "nodes": True, "after": after})
    assert {row["verdict"] for row in rest["data"]["node_verdicts"]} == {"never"}
    assert rest["data"]["next"] is None
    (plain,) = server.say({"op": "why", "request": reply["request"]})
    assert "node_verdicts" not in plain["data"], json.dumps(plain)


def test_the_queue_estimates_a_turn_from_deadlines(server, full):
    wanted = {"gpus": 3, "models": ["A100"]}
    with server.socket() as socket:
        terms = {"ttl_seconds": 60, "wait_seconds": 300}
        asked = ask_message(FIRST_FIT, resources=wanted, lease=terms, stream=True, id=1)
        socket.send(json.dumps(asked))
        assert json.loads(socket.recv(30))["data"]["state"] == "queued"
        (told,) = server.say({"op": "queue"})
        (row,) = told["data"]["waiting"]
        (held,) = server.say({"op": "leases"})
        ends = [each["expires_at"] for each in held["data"]["leases"]]
        assert row["expected_at"] == min(ends)
        server.say({"op": "cancel", "request": row["request"]})
