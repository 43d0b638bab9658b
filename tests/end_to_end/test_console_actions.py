"""What pages may do without the tokens of leases, and what every operation would do."""

import json
from collections.abc import Iterator

import pytest
from served import FIRST_FIT, Server, cluster, heard, serving

TERMS = {"ttl_seconds": 600}


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("actions")
    file = folder / "moored.toml"
    file.write_text('operators = ["olga"]\n[tokens]\nann = "aa"\nbob = "bb"\nolga = "oo"\n')
    with serving(folder / "data", options=("--config", str(file))) as server:
        server.http.headers["Authorization"] = "Bearer aa"
        server.fill(cluster("east", nodes=2, gpus=4))
        yield server


def say(server: Server, *messages: dict, who: str = "aa", page: bool = False) -> list[dict]:
    headers = {"Authorization": f"Bearer {who}"}
    with server.socket(headers | ({"Origin": server.running.http} if page else {})) as socket:
        replies = []
        for message in messages:
            socket.send(json.dumps(message))
            replies.append(heard(socket))
        return replies


def lease(server: Server) -> dict:
    asked = {"adhoc": True, "policy_rule_uri": FIRST_FIT, "inputs": {}, "resources": {"gpus": 1}}
    return say(server, {**asked, "lease": TERMS})[0]["lease"]


def state(server: Server, held: dict) -> str:
    return say(server, {"op": "status", "lease": held["id"]})[0]["lease"]["state"]


@pytest.mark.parametrize("page", [True, False])
def test_a_tenant_releases_its_own_leases_and_no_others(server, page):
    held = lease(server)
    release = {"op": "release", "lease": held["id"]}
    (other,) = say(server, release, who="bb", page=page)
    assert other["error"]["code"] == "wrong_token"
    (stolen,) = say(server, {**release, "token": "guessed"}, page=page)
    assert stolen["error"]["code"] == "wrong_token"
    no = f"No lease of yours has the id {held['id']}, or the token is not its own."
    assert (other["message"], stolen["message"]) == (no, no)
    assert state(server, held) == "granted"
    dry, done = say(server, {**release, "dry_run": True}, release, page=page)
    assert (dry["lease"]["id"], dry["lease"]["state"]) == (held["id"], "ended")
    assert dry["data"]["gpus"] == held["placement"][0]["gpus"]
    assert "token" not in dry["lease"]
    assert done["success"]
    assert state(server, held) == "ended"


def test_the_command_line_releases_from_a_machine_that_never_saw_the_lease(server, tmp_path):
    held = lease(server)

    def release(token: str) -> dict:
        words = ("release", held["id"], "--json")
        state = str(tmp_path / "none.json")
        done = server.moorage(*words, MOORAGE_TOKEN=token, MOORAGE_STATE=state)
        return json.loads(done.stdout)

    assert release("bb")["error"]["code"] == "wrong_token"
    assert state(server, held) == "granted"
    assert release("aa")["state"] == "ended"


def test_a_dry_run_changes_nothing(server):
    held = lease(server)
    place = {"cluster": "east", "node": "east-0"}
    dry = {"dry_run": True}
    answers = say(
        server,
        {"op": "release", "lease": held["id"], "token": held["token"], **dry},
        {"op": "flush", **dry},
        {"op": "cordon", **place, "reason": "fans", **dry},
        {"op": "drain", **place, **dry},
        {"op": "uncordon", **place, **dry},
    )
    assert answers[0]["lease"]["state"] == "ended"
    flushed, cordoned, drained, put_back = (each["data"] for each in answers[1:])
    assert all(each["data"]["dry_run"] for each in answers[1:])
    assert flushed["flushed"] == []
    assert (cordoned["leases"], cordoned["unavailable"]) == ([held["id"]], "cordoned by ann: fans")
    assert drained["unavailable"] == "drained by ann"
    assert put_back["unavailable"] is None
    assert state(server, held) == "granted"
    (nodes,) = say(server, {"op": "fleet", "cluster": "east"})
    assert not any("unavailable" in node for node in nodes["data"]["nodes"])
    say(server, {"op": "release", "lease": held["id"], "token": held["token"]})


def test_a_request_that_waits_goes_on_waiting_after_a_dry_run(server):
    asked = {"adhoc": True, "policy_rule_uri": FIRST_FIT, "inputs": {}, "id": 1}
    waits = {**asked, "resources": {"gpus": 4, "nodes": 2}, "lease": {**TERMS, "wait_seconds": 60}}
    held = lease(server)
    with server.socket({"Authorization": "Bearer aa"}) as socket:
        socket.send(json.dumps(waits))
        while not (rows := say(server, {"op": "queue"})[0]["data"]["waiting"]):
            pass
        cancel = {"op": "cancel", "request": rows[0]["request"]}
        (dry,) = say(server, {**cancel, "dry_run": True})
        assert (dry["data"]["state"], dry["data"]["priority"]) == ("cancelled", 0)
        (other,) = say(server, {**cancel, "dry_run": True}, who="bb")
        assert other["error"]["code"] == "unknown_request"
        assert say(server, {"op": "queue"})[0]["data"]["waiting"]
        say(server, cancel)
        assert heard(socket)["error"]["code"] == "cancelled"
    say(server, {"op": "release", "lease": held["id"], "token": held["token"]})


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
    wet, dry = say(server, message, {**message, "dry_run": True}, who="oo")
    assert wet["error"]["code"] == dry["error"]["code"] == code
