"""What pages may do without the tokens of leases, and what every operation would do."""

import json
from collections.abc import Iterator

import pytest
from served import Server, ask_message, bearing, cluster, heard, serving, tell, until

TERMS = {"ttl_seconds": 600}
TOKENS = {"MOORAGE_TOKENS": "ann:of-ann,bob:of-bob,olga:of-olga", "MOORAGE_OPERATORS": "olga"}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(bearer="of-ann", environment=TOKENS) as server:
        server.fill(cluster("east", nodes=2, gpus=4))
        yield server


def say(server: Server, *messages: dict, who: str = "of-ann", page: bool = False) -> list[dict]:
    origin = {"Origin": server.running.http} if page else {}
    with server.socket(bearing(who) | origin) as socket:
        return [tell(socket, message) for message in messages]


def lease(server: Server) -> dict:
    held = server.ask(resources={"gpus": 1}, lease=TERMS)["lease"]
    server.leases.append(held)
    return held


@pytest.mark.parametrize("page", [True, False])
def test_a_tenant_releases_its_own_leases_and_no_others(server, page):
    held = lease(server)
    release = {"op": "release", "lease": held["id"]}
    (other,) = say(server, release, who="of-bob", page=page)
    (stolen,) = say(server, {**release, "token": "guessed"}, page=page)
    no = f"No lease of yours has the id {held['id']}, or the token is not its own."
    for refused in (other, stolen):
        assert (refused["error"]["code"], refused["message"]) == ("wrong_token", no)
    assert server.status(held)["state"] == "granted"
    dry, done = say(server, {**release, "dry_run": True}, release, page=page)
    assert (dry["lease"]["id"], dry["lease"]["state"]) == (held["id"], "ended")
    assert dry["data"]["gpus"] == held["placement"][0]["gpus"]
    assert "token" not in dry["lease"]
    assert done["success"]
    assert server.status(held)["state"] == "ended"


def test_the_command_line_releases_from_a_machine_that_never_saw_the_lease(server, tmp_path):
    held = lease(server)

    def release(token: str) -> dict:
        variables = {"MOORAGE_TOKEN": token, "MOORAGE_STATE": str(tmp_path / "none.json")}
        return json.loads(server.moorage("release", held["id"], "--json", **variables).stdout)

    assert release("of-bob")["error"]["code"] == "wrong_token"
    assert server.status(held)["state"] == "granted"
    assert release("of-ann")["state"] == "ended"


def test_a_dry_run_changes_nothing(server):
    held = lease(server)
    place, dry = {"cluster": "east", "node": "east-0"}, {"dry_run": True}
    released, *others = say(
        server,
        {"op": "release", "lease": held["id"], "token": held["token"], **dry},
        {"op": "flush", **dry},
        {"op": "cordon", **place, "reason": "fans", **dry},
        {"op": "drain", **place, **dry},
        {"op": "uncordon", **place, **dry},
    )
    assert released["lease"]["state"] == "ended"
    assert all(each["data"]["dry_run"] for each in others)
    flushed, cordoned, drained, put_back = (each["data"] for each in others)
    assert flushed["flushed"] == []
    assert (cordoned["leases"], cordoned["unavailable"]) == ([held["id"]], "cordoned by ann: fans")
    assert drained["unavailable"] == "drained by ann"
    assert put_back["unavailable"] is None
    assert server.status(held)["state"] == "granted"
    (nodes,) = server.say({"op": "fleet", "cluster": "east"})
    assert not any("unavailable" in node for node in nodes["data"]["nodes"])


def test_a_request_that_waits_goes_on_waiting_after_a_dry_run(server):
    waits = {"resources": {"gpus": 4, "nodes": 2}, "lease": {**TERMS, "wait_seconds": 60}}
    lease(server)
    with server.socket() as socket:
        socket.send(json.dumps(ask_message(id=1, **waits)))
        until(server.waiting)
        (row,) = server.waiting()
        cancel = {"op": "cancel", "request": row["request"]}
        (dry,) = server.say({**cancel, "dry_run": True})
        assert (dry["data"]["state"], dry["data"]["priority"]) == ("cancelled", 0)
        (other,) = server.say({**cancel, "dry_run": True}, bearer="of-bob")
        assert other["error"]["code"] == "unknown_request"
        assert server.waiting()
        server.say(cancel)
        assert heard(socket)["error"]["code"] == "cancelled"


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ({"op": "release", "lease": "none", "token": "x"}, "unknown_lease"),
        ({"op": "cordon", "cluster": "none"}, "unknown_clusters"),
        ({"op": "drain", "cluster": "east", "node": "none"}, "not_found"),
        ({"op": "cancel", "request": "none"}, "unknown_request"),
    ],
)
def test_what_would_be_refused_is_refused_in_a_dry_run_too(server, message, code):
    wet, dry = say(server, message, {**message, "dry_run": True}, who="of-olga")
    assert wet["error"]["code"] == dry["error"]["code"] == code
