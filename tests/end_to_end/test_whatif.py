"""What-if over a real socket: nothing changes, and what it says is what then happens."""

import json
import re
import threading
import time
from collections.abc import Iterator

import pytest
from served import FIRST_FIT, Server, ask_message, cluster, policy, serving, until

pytestmark = pytest.mark.heavy

WAITS = {"ttl_seconds": 3600, "wait_seconds": 600}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    settings = {"MOORAGE_BACKENDS": "memory", "MOORAGE_OVERTAKEN_MAX": "1"}
    with serving(tmp_path_factory.mktemp("data"), environment=settings) as server:
        server.fill(cluster("east", nodes=2, gpus=4))
        yield server


@pytest.fixture(autouse=True)
def _no_one_waits(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "server" in request.fixturenames:
        server = request.getfixturevalue("server")
        for row in server.waiting():
            server.say({"op": "cancel", "request": row["request"]})


def hold(server: Server, gpus: int, lease: dict = WAITS, **more) -> dict:
    reply = server.ask(resources={"gpus": gpus}, lease=lease, **more)
    assert reply["success"], reply
    server.leases.append(reply["lease"])  # Released after the test.
    return reply["lease"]


def request(gpus: int, **more) -> dict:
    asked = {"policy_rule_uri": FIRST_FIT, "inputs": {}, "resources": {"gpus": gpus}}
    return asked | {"lease": {"ttl_seconds": 60}} | more


def whatif(server: Server, **message) -> dict:
    (reply,) = server.say({"op": "whatif", **message})
    assert reply["success"], reply
    return reply["data"]


def refused(server: Server, **message) -> dict:
    (reply,) = server.say({"op": "whatif", **message})
    assert not reply["success"], reply
    return reply["error"]


def waiting(server: Server, socket, gpus: int, **more) -> str:
    """Have a request wait on a socket; return its id."""
    before = server.waiting()
    known = {each["request"] for each in before}
    socket.send(json.dumps(ask_message(resources={"gpus": gpus}, lease=WAITS, **more)))

    def new() -> list[str]:
        rows = server.waiting()
        return [each["request"] for each in rows if each["request"] not in known]

    until(new)
    return new()[0]


def everything(server: Server) -> list:
    """Return all that a what-if might have changed."""
    listed = server.say(
        {"op": "leases"}, {"op": "queue"}, {"op": "fleet", "cluster": "east"}, {"op": "quotas"}
    )
    return [*(each["data"] for each in listed), server.http.get("/clusters/east").json()]


def test_a_request_is_answered_as_it_would_be_and_nothing_changes(server):
    assert whatif(server, request=request(4))["answer"]["state"] == "granted"
    hold(server, 4)
    hold(server, 3)
    before = everything(server)
    told = whatif(server, request=request(1))["answer"]
    (share,) = told["placement"]
    refusal = whatif(server, request=request(2))["answer"]
    assert (refusal["state"], refusal["code"]) == ("refused", "no_capacity")
    assert whatif(server, request=request(9))["answer"]["code"] == "never_fits"
    waits = whatif(server, request=request(2, lease=WAITS))["answer"]
    assert (waits["state"], waits["position"], waits["code"]) == ("waiting", 1, "no_capacity")
    advice = whatif(server, request=request(1, lease=None))["answer"]
    assert (advice["state"], advice["data"]["node_id"]) == ("advised", share["node_id"])
    assert everything(server) == before
    assert hold(server, 1)["placement"] == [share], "it is what then happens"


def test_more_nodes_say_who_would_be_granted(server):
    hold(server, 4)
    hold(server, 4)
    with server.socket() as socket:
        first, second = waiting(server, socket, 4), waiting(server, socket, 3)
        before = everything(server)
        more = {"cluster": "east", "like": "east-0"}
        told = whatif(server, change={"add_nodes": [more]})
        assert told["answer"] is None
        assert [row["request"] for row in told["granted"]] == [first]
        assert told["granted"][0]["placement"][0]["node_id"] == "east-0+1"
        told = whatif(server, request=request(1), change={"add_nodes": [more | {"count": 2}]})
        assert [row["request"] for row in told["granted"]] == [first, second]
        assert told["answer"]["placement"][0]["node_id"] == "east-0+2"
        other = {"id": "h", "gpus": {"count": 8, "modelNames": ["H100"]}, "vcpus": {"count": 8}}
        wanted = request(8)
        wanted["resources"]["models"] = ["H100"]
        change = {"add_nodes": [{"cluster": "east", "node": other}]}
        told = whatif(server, request=wanted, change=change)
        assert {row["request"] for row in told["granted"]} == {first, second}
        assert told["answer"]["state"] == "refused", "who waits is served before"
        assert everything(server) == before


def test_a_drain_says_which_leases_would_move_and_which_stay(server):
    spec = {"backend": "memory", "spec": {}}
    moves = hold(server, 4, provision=spec | {"on_failure": "requeue"})
    stays = hold(server, 3)
    place = stays["placement"][0]["node_id"], moves["placement"][0]["node_id"]
    until(lambda: server.status(moves)["state"] == "active")
    before = everything(server)
    drain = {"drain": [{"cluster": "east"}]}
    told = whatif(server, request=request(1), change=drain)
    assert {row["lease"]: row["becomes"] for row in told["drained"]} == {
        moves["id"]: "waits",
        stays["id"]: "stays",
    }
    assert told["answer"]["state"] == "refused"
    more = {"add_nodes": [{"cluster": "east", "like": place[0]}]}
    told = whatif(server, change=more | {"drain": [{"cluster": "east", "node": place[1]}]})
    (row,) = told["drained"]
    assert (row["lease"], row["becomes"]) == (moves["id"], "moves")
    assert row["placement"][0]["node_id"] == f"{place[0]}+1"
    assert everything(server) == before


def test_a_cordon_leaves_what_is_there_and_an_uncordon_starts_who_waits(server):
    hold(server, 4)
    node = {"cluster": "east", "node": "east-1"}
    assert server.say({"op": "cordon", **node})[0]["success"]
    with server.socket() as socket:
        waits = waiting(server, socket, 2)
        before = everything(server)
        (row,) = whatif(server, change={"uncordon": [node]})["granted"]
        assert (row["request"], row["placement"][0]["node_id"]) == (waits, "east-1")
        both = {"cordon": [{"cluster": "east"}], "uncordon": [node]}
        assert whatif(server, change=both)["drained"] == [], "leases stay where a cordon is"
        assert everything(server) == before
        assert server.say({"op": "cancel", "request": waits})[0]["success"]
    assert server.say({"op": "uncordon", **node})[0]["success"]
    told = whatif(server, request=request(1), change={"cordon": [{"cluster": "east"}]})
    assert told["answer"]["state"] == "refused"


def test_what_then_happens_is_what_it_said(tmp_path):
    """More nodes and a drain, first as a what-if, then really: everybody is where it said."""
    pauses = {"MOORAGE_BACKENDS": "memory", "MOORAGE_REQUEUE_PAUSE_SECONDS": "0"}
    with serving(tmp_path, environment=pauses) as server:
        document = cluster("east", nodes=3, gpus=4)
        server.fill(document)
        again = {"backend": "memory", "spec": {}, "on_failure": "requeue"}
        held = [hold(server, gpus, provision=again) for gpus in (4, 2, 1, 3)]

        def lease(name: str) -> dict | None:
            return server.say({"op": "status", "lease": name})[0].get("lease")

        until(lambda: all((lease(each["id"]) or {})["state"] == "active" for each in held))
        with server.socket() as socket:
            first, second = waiting(server, socket, 3), waiting(server, socket, 4)
            more = {"add_nodes": [{"cluster": "east", "like": "east-1", "count": 2}]}
            told = whatif(server, change=more)
            assert {row["request"] for row in told["granted"]} == {first, second}
            node = document["nodes"]["nodeData"][1]
            document["nodes"]["nodeData"] += [{**node, "id": f"east-1+{n}"} for n in (1, 2)]
            document["nodes"]["count"] = 5
            server.http.put("/clusters/east", json=document).raise_for_status()
            for row in told["granted"]:
                until(lambda row=row: lease(row["request"]))
                assert lease(row["request"])["placement"] == row["placement"]
            told = whatif(server, change={"drain": [{"cluster": "east", "node": "east-1"}]})
            assert len(told["drained"]) == 2
            assert server.say({"op": "drain", "cluster": "east", "node": "east-1"})[0]["success"]
            states = {"moves": {"starting", "active"}, "waits": {"queued"}}
            for row in told["drained"]:
                wanted = states[row["becomes"]]
                before = next(each["fencing"] for each in held if each["id"] == row["lease"])

                def settled(row=row, wanted=wanted, before=before) -> bool:
                    now = lease(row["lease"])
                    new = now["fencing"] > before or "placement" not in row
                    return now["state"] in wanted and new

                until(settled)
                if "placement" in row:
                    assert lease(row["lease"])["placement"] == row["placement"]


def test_quotas_preemption_and_other_policies(server):
    refuses = policy("return {}", "refuses:1.0-stable")
    server.publish(refuses)
    preemptible = {"ttl_seconds": 3600, "preemptible": True}
    for _ in range(2):
        victim = hold(server, 4, preemptible)
    before = everything(server)
    asked = request(4, lease=WAITS | {"priority": 5})
    told = whatif(server, request=asked)
    assert told["answer"]["state"] == "granted"
    assert [row["lease"] for row in told["preempted"]] == [victim["id"]]
    assert told["preempted"][0]["by"] == told["answer"]["request"]
    limit = {"tenant": "local", "nominal": {"gpu_milli": 9000}}
    told = whatif(server, request=asked, change={"quotas": [limit]})
    assert told["answer"]["code"] == "quota_exceeded"
    assert told["preempted"] == []
    gone = whatif(server, request=asked, change={"quotas": [limit, limit | {"remove": True}]})
    assert gone["answer"]["state"] == "granted"
    swap = {"policies": {FIRST_FIT: "refuses:1.0-stable"}}
    more = {"add_nodes": [{"cluster": "east", "like": "east-0"}]}
    told = whatif(server, request=request(1), change=swap | more)
    assert told["answer"]["code"] == "policy_declined"
    assert everything(server) == before


def test_what_cannot_be_answered_is_refused_with_its_field(server):
    assert refused(server)["code"] == "missing_fields"
    change = {"drain": [{"cluster": "west"}]}
    assert refused(server, change=change)["field"] == "change.drain[0].cluster"
    change = {"drain": [{"cluster": "east", "node": "n"}]}
    assert refused(server, change=change)["field"] == "change.drain[0].node"
    change = {"cordon": [{"cluster": "east"}], "uncordon": [{"cluster": "west"}]}
    assert refused(server, change=change)["field"] == "change.uncordon[0].cluster"
    change = {"add_nodes": [{"cluster": "east"}]}
    assert refused(server, change=change)["field"] == "change.add_nodes[0]"
    change = {"add_nodes": [{"cluster": "east", "like": "n"}]}
    assert refused(server, change=change)["field"] == "change.add_nodes[0].like"
    change = {"add_nodes": [{"cluster": "east", "node": {"gpus": 3}}]}
    assert "gpus" in refused(server, change=change)["reason"]
    change = {"policies": {FIRST_FIT: "none:1-x"}}
    told = refused(server, change=change)
    assert (told["code"], told["field"]) == ("unknown_policy", "change.policies")
    assert refused(server, change={"fly": 1})["field"] == "change.fly"
    wrong = {"quotas": [{"tenant": "a", "weight": 0}]}
    assert refused(server, change=wrong)["field"] == "change.quotas[0].weight"
    unknown = request(1) | {"policy_rule_uri": "none:1-x"}
    assert refused(server, request=unknown)["code"] == "unknown_policy"


def test_one_at_a_time_of_a_tenant_and_a_policy_that_hangs_is_stopped(server):
    server.publish(policy("while True: pass", "hangs:1.0-stable", deadline_seconds=1))
    hangs = request(1) | {"policy_rule_uri": "hangs:1.0-stable"}
    told: list[dict] = []
    codes: list[str] = []

    def asked(message: dict) -> dict:
        (reply,) = server.say({"op": "whatif", "request": message})
        if not reply["success"]:
            codes.append(reply["error"]["code"])
        return reply

    def until_told() -> None:
        while not (reply := asked(hangs))["success"]:
            time.sleep(0.05)  # The other one is being answered.
        told.append(reply["data"])

    thread = threading.Thread(target=until_told, daemon=True)
    thread.start()
    while not told and "busy" not in codes:
        asked(request(1))
    thread.join(120)
    assert set(codes) == {"busy"}, "one of the two came while the other one was answered"
    assert told[0]["answer"]["code"] == "policy_timeout"
    assert whatif(server, request=request(1))["answer"]["state"] == "granted"


def test_the_command_line(server, tmp_path):
    held = hold(server, 4)
    hold(server, 4)

    def run(*words: str, code: int = 0) -> str:
        done = server.moorage(*words)
        assert done.returncode == code, done.stderr
        return done.stdout + done.stderr

    shown = run("whatif", "--policy", FIRST_FIT, "--gpus", "4", "--add-nodes", "east/east-0:2")
    assert "the request is granted: east/east-0+1 gpus 0,1,2,3" in shown
    shown = run("whatif", "--drain", "east/east-0")
    assert re.search(rf"drained +{held['id']} +stays", shown), shown
    document = json.loads(run("whatif", "--drain", "east", "--json"))
    assert len(document["drained"]) == 2
    shown = run("whatif", "-p", FIRST_FIT, "--cordon", "east", "--uncordon", "east/east-0")
    assert "the request is refused" in shown
    request_file = tmp_path / "request.json"
    request_file.write_text(json.dumps(request(1)))
    shown = run("whatif", "--request", f"@{request_file}", "--quota", "local gpus=2")
    assert "the request is refused: Tenant “local” has" in shown
    assert "expected CLUSTER" in run("whatif", "--add-nodes", "east", code=2)
    run("whatif", code=2)


def test_it_knows_for_whom_quota_is_kept(server):
    """A smaller request of its tenant has passed one as often as they may."""
    server.say({"op": "set_quota", "tenant": "local", "nominal": {"gpu_milli": 4000}})
    hold(server, 2)
    with server.socket() as socket:
        waiting(server, socket, 4)
        hold(server, 1)
        asked = whatif(server, request=request(1))["answer"]
        reply = server.ask(resources={"gpus": 1}, lease={"ttl_seconds": 60})
    server.say({"op": "remove_quota", "tenant": "local"})
    assert reply["error"]["kept"] == 4000
    assert asked["code"] == reply["error"]["code"] == "quota_exceeded", asked
