"""A what-if over a socket changes nothing, and its prediction holds."""

import json
from collections.abc import Iterator

import pytest
from served import FIRST_FIT, Server, ask_message, cluster, policy, read_message, serving, until

pytestmark = pytest.mark.heavy

WAITS = {"ttl_seconds": 3600, "wait_seconds": 600}
AGAIN = {"backend": "memory", "spec": {}, "on_failure": "requeue"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    settings = {
        "MOORAGE_BACKENDS": "memory",
        "MOORAGE_OVERTAKEN_MAX": "1",
        "MOORAGE_REQUEUE_PAUSE_SECONDS": "0",
    }
    with serving(tmp_path_factory.mktemp("data"), environment=settings) as server:
        server.fill(cluster("east"))
        yield server


@pytest.fixture(autouse=True)
def _no_one_waits(server: Server) -> Iterator[None]:
    yield
    for row in server.waiting():
        server.say({"op": "cancel", "request": row["request"]})


def hold(server: Server, gpus: int, lease: dict = WAITS, **more) -> dict:
    reply = server.ask(resources={"gpus": gpus}, lease=lease, **more)
    assert reply["success"], reply
    server.leases.append(reply["lease"])  # Released after the test.
    return reply["lease"]


def request(gpus: int, **more) -> dict:
    wanted = {"policy_rule_uri": FIRST_FIT, "inputs": {}, "resources": {"gpus": gpus}}
    return wanted | {"lease": {"ttl_seconds": 60}} | more


def whatif(server: Server, **message) -> dict:
    (reply,) = server.say({"op": "whatif", **message})
    assert reply["success"], reply
    return reply["data"]


def waiting(server: Server, socket, gpus: int, **more) -> str:
    """Send a request that waits, on a socket; return its id."""
    known = {each["request"] for each in server.waiting()}
    socket.send(json.dumps(ask_message(resources={"gpus": gpus}, lease=WAITS, **more)))

    def new() -> list[str]:
        return [each["request"] for each in server.waiting() if each["request"] not in known]

    until(new)
    return new()[0]


def everything(server: Server) -> list:
    """Return all state that a what-if could have changed by mistake."""
    fleet = {"op": "fleet", "cluster": "east"}
    listed = server.say({"op": "leases"}, {"op": "queue"}, fleet, {"op": "quotas"})
    return [*(each["data"] for each in listed), server.http.get("/clusters/east").json()]


def test_a_what_if_of_a_request_is_answered_and_changes_nothing(server):
    hold(server, 4)
    hold(server, 3)
    before = everything(server)
    (share,) = whatif(server, request=request(1))["answer"]["placement"]
    assert whatif(server, request=request(9))["answer"]["code"] == "never_fits"
    waits = whatif(server, request=request(2, lease=WAITS))["answer"]
    assert (waits["state"], waits["position"], waits["code"]) == ("waiting", 1, "no_capacity")
    advice = whatif(server, request=request(1, lease=None))["answer"]
    assert (advice["state"], advice["data"]["node_id"]) == ("advised", share["node_id"])
    assert everything(server) == before
    assert hold(server, 1)["placement"] == [share], "the real answer is the predicted one"


def test_a_what_if_of_more_nodes_names_the_waiters_that_would_be_granted(server):
    hold(server, 4)
    hold(server, 4)
    with server.socket() as socket:
        first, second = waiting(server, socket, 4), waiting(server, socket, 3)
        before = everything(server)
        found = whatif(server, change={"add_nodes": [{"cluster": "east", "like": "east-0"}]})
        assert found["answer"] is None
        (row,) = found["granted"]
        assert (row["request"], row["placement"][0]["node_id"]) == (first, "east-0+1")
        node = {"id": "h", "gpus": {"count": 8, "modelNames": ["H100"]}, "vcpus": {"count": 8}}
        wanted = request(8, resources={"gpus": 8, "models": ["H100"]})
        change = {"add_nodes": [{"cluster": "east", "node": node}]}
        found = whatif(server, request=wanted, change=change)
        assert {row["request"] for row in found["granted"]} == {first, second}
        assert found["answer"]["state"] == "refused", "waiters are served first"
        assert everything(server) == before


def test_a_what_if_of_a_cordon_keeps_leases_and_a_what_if_of_an_uncordon_starts_waiters(server):
    hold(server, 4)
    node = {"cluster": "east", "node": "east-1"}
    assert server.say({"op": "cordon", **node})[0]["success"]
    with server.socket() as socket:
        waits = waiting(server, socket, 2)
        before = everything(server)
        (row,) = whatif(server, change={"uncordon": [node]})["granted"]
        assert (row["request"], row["placement"][0]["node_id"]) == (waits, "east-1")
        both = {"cordon": [{"cluster": "east"}], "uncordon": [node]}
        found = whatif(server, request=request(1), change=both)
        assert found["drained"] == [], "a cordon moves no lease"
        assert found["answer"]["state"] == "refused"
        assert everything(server) == before
        assert server.say({"op": "cancel", "request": waits})[0]["success"]
    assert server.say({"op": "uncordon", **node})[0]["success"]


def test_added_nodes_and_a_drain_have_the_effects_that_the_what_if_predicted(server):
    document = cluster("west", nodes=3)
    server.register(document)
    west = {"clusters": ["west"]}
    held = [hold(server, gpus, provision=AGAIN, **west) for gpus in (4, 2, 1)]
    held += [hold(server, 1, **west), hold(server, 3, provision=AGAIN, **west)]
    stays = held[3]
    for each in held:
        until(lambda each=each: server.status(each)["state"] in {"active", "granted"})
    with server.socket() as socket:
        first, second = (waiting(server, socket, gpus, **west) for gpus in (3, 4))
        more = {"add_nodes": [{"cluster": "west", "like": "west-1", "count": 2}]}
        granted = whatif(server, change=more)["granted"]
        assert {row["request"] for row in granted} == {first, second}
        node = document["nodes"]["nodeData"][1]
        document["nodes"]["nodeData"] += [{**node, "id": f"west-1+{n}"} for n in (1, 2)]
        document["nodes"]["count"] = 5
        server.http.put("/clusters/west", json=document).raise_for_status()
        for _ in granted:
            server.leases.append(read_message(socket)["lease"])
        placed = {each["id"]: each["placement"] for each in server.leases}
        assert all(placed[row["request"]] == row["placement"] for row in granted)
        drain = {"cluster": "west", "node": "west-1"}
        drained = whatif(server, change={"drain": [drain]})["drained"]
        assert {row["becomes"] for row in drained} == {"moves", "waits", "stays"}
        assert [row["lease"] for row in drained if row["becomes"] == "stays"] == [stays["id"]]
        assert server.say({"op": "drain", **drain})[0]["success"]
        states = {"moves": {"starting", "active"}, "waits": {"queued"}, "stays": {"granted"}}
        for row in drained:
            lease = next(each for each in held if each["id"] == row["lease"])

            def is_settled(row=row, lease=lease) -> bool:
                now = server.status(lease)
                moved = row["becomes"] != "moves" or now["fencing"] > lease["fencing"]
                return moved and now["state"] in states[row["becomes"]]

            until(is_settled)
            if row["becomes"] == "moves":
                assert server.status(lease)["placement"] == row["placement"]
    for lease in server.leases:
        server.release(lease)
    server.http.delete("/clusters/west").raise_for_status()


def test_a_what_if_covers_quotas_preemption_and_other_policies(server):
    server.publish(policy("return {}", "refuses:1.0-stable"))
    for _ in range(2):
        victim = hold(server, 4, {"ttl_seconds": 3600, "preemptible": True})
    before = everything(server)
    wanted = request(4, lease=WAITS | {"priority": 5})
    limit = {"tenant": "local", "nominal": {"gpu_milli": 9000}}
    lifted = {"quotas": [limit, limit | {"remove": True}]}
    found = whatif(server, request=wanted, change=lifted)
    assert found["answer"]["state"] == "granted"
    (row,) = found["preempted"]
    assert (row["lease"], row["by"]) == (victim["id"], found["answer"]["request"])
    found = whatif(server, request=wanted, change={"quotas": [limit]})
    assert (found["answer"]["code"], found["preempted"]) == ("quota_exceeded", [])
    swap = {"policies": {FIRST_FIT: "refuses:1.0-stable"}}
    more = {"add_nodes": [{"cluster": "east", "like": "east-0"}]}
    found = whatif(server, request=request(1), change=swap | more)
    assert found["answer"]["code"] == "policy_declined"
    assert everything(server) == before


NOWHERE = {"cluster": "nowhere"}


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"drain": [NOWHERE]}, "drain[0].cluster"),
        ({"drain": [{"cluster": "east", "node": "n"}]}, "drain[0].node"),
        ({"cordon": [{"cluster": "east"}], "uncordon": [NOWHERE]}, "uncordon[0].cluster"),
        ({"add_nodes": [{"cluster": "east"}]}, "add_nodes[0]"),
        ({"add_nodes": [{"cluster": "east", "like": "n"}]}, "add_nodes[0].like"),
        ({"policies": {FIRST_FIT: "none:1-x"}}, "policies"),
        ({"fly": 1}, "fly"),
        ({"quotas": [{"tenant": "a", "weight": 0}]}, "quotas[0].weight"),
    ],
)
def test_the_refusal_of_a_wrong_change_in_a_what_if_names_the_field(server, change, field):
    (reply,) = server.say({"op": "whatif", "change": change})
    assert reply["error"]["field"] == f"change.{field}"


def test_a_what_if_that_is_empty_or_names_an_unknown_policy_or_a_bad_node_is_refused(server):
    unknown = request(1) | {"policy_rule_uri": "none:1-x"}
    bad = {"add_nodes": [{"cluster": "east", "node": {"gpus": 3}}]}
    for message, code in (({}, "missing_fields"), ({"request": unknown}, "unknown_policy")):
        assert server.say({"op": "whatif", **message})[0]["error"]["code"] == code
    error = server.say({"op": "whatif", "change": bad})[0]["error"]
    assert error["field"] == "change.add_nodes[0].node.gpus"
    assert error["reason"] == f"{error['field']}: expected {error['expected']}"


def test_a_tenant_has_one_what_if_at_a_time_and_a_hanging_policy_is_stopped(server):
    server.publish(policy("while True: pass", "hangs:1.0-stable", deadline_seconds=1))
    hangs = request(1) | {"policy_rule_uri": "hangs:1.0-stable"}
    both = [{"op": "whatif", "request": hangs}, {"op": "whatif", "request": request(1)}]
    replies = server.say(*({**each, "id": n} for n, each in enumerate(both)))
    late, busy = sorted(replies, key=lambda reply: reply["id"])
    assert busy["error"]["code"] == "busy"
    assert late["data"]["answer"]["code"] == "policy_timeout"


def test_the_command_line_prints_what_if_answers(server, tmp_path):
    for _ in range(2):
        hold(server, 4)

    def run(*words: str, code: int = 0) -> str:
        done = server.moorage("whatif", *words)
        assert done.returncode == code, done.stderr
        return done.stdout + done.stderr

    change = ("--cordon", "east", "--uncordon", "east/east-0")
    document = json.loads(run("-p", FIRST_FIT, "--gpus", "1", *change, "--json"))
    assert document["answer"]["state"] == "refused"
    file = tmp_path / "request.json"
    file.write_text(json.dumps(request(1)))
    shown = run("--request", f"@{file}", "--quota", "local gpus=2")
    assert "the request is refused: Tenant “local” has" in shown
    assert "expected CLUSTER" in run("--add-nodes", "east", code=2)
    run(code=2)


def test_a_what_if_respects_quota_reserved_for_an_overtaken_waiter(server):
    """A waiter was overtaken the maximum number of times, by its own tenant's smaller requests."""
    server.say({"op": "set_quota", "tenant": "local", "nominal": {"gpu_milli": 4000}})
    hold(server, 2)
    with server.socket() as socket:
        waiting(server, socket, 4)
        hold(server, 1)
        found = whatif(server, request=request(1))["answer"]
        error = server.ask(resources={"gpus": 1}, lease={"ttl_seconds": 60})["error"]
    server.say({"op": "remove_quota", "tenant": "local"})
    assert (error["kept"], error["code"]) == (4000, "quota_exceeded")
    assert found["code"] == error["code"], found
