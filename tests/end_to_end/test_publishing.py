"""Tests of aliases on a real daemon: changes under load, kills, canaries and fallbacks."""

import json
import threading
import time
from collections import Counter

import pytest
from served import (
    Server,
    ask_message,
    bearing,
    cluster,
    kill,
    policy,
    serve_and_kill,
    serving,
    tell,
)

pytestmark = pytest.mark.heavy  # Many daemons, restarts and kills: minutes in all.

ONE = "swap:1-a"
TWO = "swap:2-b"
SAYS = 'return {{"cluster_id": "east", "node_id": "east-0", "says": "{0}"}}'


def version(uri: str, body: str = "", **more) -> dict:
    return policy(body or SAYS.format(uri), uri, **more)


def activate(server: Server, alias: str, uri: str) -> dict:
    path = f"/policy-alias/{alias}/activate"
    answer = server.http.post(path, json={"policy_rule_uri": uri})
    assert answer.status_code == 200, answer.text
    return answer.json()["data"]


@pytest.fixture
def swap(server):
    """The shared server with two versions of one policy, the first of them active."""
    server.publish(version(ONE), version(TWO))
    activate(server, "swap", ONE)
    yield server
    server.http.delete("/policy-alias/swap:stable")


def test_requests_to_an_alias_or_its_bare_name_get_the_active_version(swap):
    for name in ("swap", "swap:stable"):
        reply = swap.ask(name)
        assert (reply["data"]["says"], reply["policy_rule_uri"]) == (ONE, ONE)
    activate(swap, "swap:stable", TWO)
    assert swap.ask("swap")["data"]["says"] == TWO
    held = swap.ask("swap", lease={"ttl_seconds": 5}, resources={"cpu_milli": 1})
    assert held["lease"]["policy_rule_uri"] == TWO
    swap.leases = [held["lease"]]
    assert "policy_rule_uri" not in swap.ask(ONE), "the request named the version"
    twin = swap.http.post("/allocate", json=ask_message("swap")).json()
    assert (twin["success"], twin["policy_rule_uri"]) == (True, TWO)


def test_rollback_activates_the_former_version_and_is_in_the_history(swap):
    activate(swap, "swap", TWO)
    for expected in (ONE, TWO, ONE):
        answer = swap.http.post("/policy-alias/swap/rollback")
        assert answer.json()["data"]["policy_rule_uri"] == expected
        assert swap.ask("swap")["data"]["says"] == expected
    history = swap.http.get("/policy-alias/swap").json()["data"]["history"]
    assert [change["what"] for change in history[-3:]] == ["rolled_back"] * 3
    assert {change["who"] for change in history} == {"local"}
    times = [change["at"] for change in history]
    assert times == sorted(times)


def test_deleting_an_alias_as_a_policy_is_refused_with_the_right_call(swap):
    error = swap.http.delete("/policy/swap").json()["error"]
    assert error["code"] == "unknown_policy"
    assert "DELETE /policy-alias/swap:stable" in error["reason"]


def test_a_repeated_request_is_answered_by_the_version_that_answered_first(swap):
    ask = ask_message("swap", lease={"ttl_seconds": 30, "idempotency_key": "k1"}) | {"id": 1}
    (first,) = swap.say(ask)
    activate(swap, "swap", TWO)
    (again,) = swap.say(ask)
    swap.leases = [first["lease"]]
    assert again["lease"]["id"] == first["lease"]["id"], again
    assert again["policy_rule_uri"] == ONE


@pytest.mark.parametrize(
    ("alias", "uri", "code", "says"),
    [
        ("swap", "swap:9-none", "unknown_policy", "did you mean swap:2-b"),
        ("swap", "first_fit:1.0-stable", "bad_message", "a version of swap"),
        ("swap:1-a", ONE, "bad_message", "the word without a dash"),
        ("a b", ONE, "bad_message", "alias: expected"),
    ],
)
def test_a_refused_activation_gives_its_reason(swap, alias, uri, code, says):
    answer = swap.http.post(f"/policy-alias/{alias}/activate", json={"policy_rule_uri": uri})
    error = answer.json()["error"]
    assert (error["code"], says in error["reason"]) == (code, True), error
    assert swap.ask("swap")["data"]["says"] == ONE
    assert swap.http.get("/policy-alias/none").status_code == 404
    assert swap.http.post("/policy-alias/none/rollback").status_code == 404


def test_a_version_to_which_an_alias_may_point_is_deleted_only_by_force(swap):
    assert swap.ask("swap")["success"]
    path = f"/policy/{ONE}"
    refused = swap.http.delete(path)
    assert (refused.status_code, refused.json()["error"]["aliases"]) == (409, ["swap:stable"])
    activate(swap, "swap", TWO)
    refused = swap.http.delete(path)
    error = refused.json()["error"]
    assert (refused.status_code, error["aliases"]) == (409, ["swap:stable"])
    assert "force" in error["expected"]
    assert swap.http.delete(path, params={"force": "maybe"}).status_code == 400
    assert swap.http.delete(f"/policy/{TWO}", params={"force": "true"}).status_code == 409
    assert swap.http.delete(path, params={"force": "true"}).status_code == 200
    # Other code may be registered under the URI, and a rollback must not activate that code.
    swap.publish(policy("return {'says': 'something else'}", ONE))
    back = swap.http.post("/policy-alias/swap/rollback")
    assert (back.status_code, back.json()["error"]["code"]) == (409, "conflict")
    assert "registered with other content" in back.json()["message"]
    assert swap.ask("swap")["data"]["says"] == TWO
    run(swap, "policy", "delete", ONE)
    swap.publish(version(ONE))  # The same content as before, so a rollback may activate it.
    run(swap, "policy", "delete", ONE, code=3)
    assert run(swap, "policy", "rollback", "swap") == f"swap:stable -> {ONE}\n"
    run(swap, "policy", "delete", TWO, "--force")


def test_either_the_activation_or_the_deletion_of_a_version_succeeds(swap):
    """The first call wins; no alias is left with a deleted version."""
    third = "swap:3-short"
    body = {"json": {"policy_rule_uri": third}}
    for turn in range(8):
        swap.publish(version(third))
        activating = threading.Thread(
            target=swap.http.post, args=("/policy-alias/swap:race/activate",), kwargs=body
        )
        activating.start()
        time.sleep(turn * 0.006)  # Moments before and after the check in the jail.
        swap.http.delete(f"/policy/{third}")
        activating.join()
        found = swap.http.get("/policy-alias/swap:race").json()
        there = swap.http.get(f"/policy/{third}").status_code == 200
        assert found["success"] == there, found
        swap.http.delete("/policy-alias/swap:race")
        swap.http.delete(f"/policy/{third}")


def test_activations_of_versions_disturb_no_requests_on_four_sockets(swap):
    stop = threading.Event()
    answers: Counter[str] = Counter()
    wrong: list[dict] = []

    def ask(number: int) -> None:
        with swap.socket() as socket:
            sent = 0
            while not stop.is_set():
                sent += 1
                reply = tell(socket, ask_message("swap") | {"id": f"{number}-{sent}"})
                same = reply.get("data", {}).get("says") == reply.get("policy_rule_uri")
                if not reply["success"] or not same or reply["id"] != f"{number}-{sent}":
                    wrong.append(reply)
                answers[reply.get("policy_rule_uri", "")] += 1

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    try:
        with swap.socket() as witness:
            for turn in range(20):
                uri = (TWO, ONE)[turn % 2]
                activate(swap, "swap", uri)
                reply = tell(witness, ask_message("swap"))
                assert reply["policy_rule_uri"] == uri, "a confirmed activation applies"
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert wrong == []
    assert set(answers) == {ONE, TWO}
    assert sum(answers.values()) > 20


def test_a_canary_gets_its_share_and_repeated_requests_agree(swap):
    body = {"policy_rule_uri": TWO, "percent": 25, "seed": 7}
    assert swap.http.post("/policy-alias/swap/canary", json=body).status_code == 200
    keys = ({"ttl_seconds": 30, "idempotency_key": f"c{n}"} for n in range(200))
    asks = [ask_message("swap", lease=key, resources={}, id=n) for n, key in enumerate(keys)]
    first = {reply["id"]: reply for reply in swap.say(*asks)}
    swap.leases = [reply["lease"] for reply in first.values()]
    share = sum(reply["policy_rule_uri"] == TWO for reply in first.values())
    assert 30 <= share <= 70, "25 % of 200, five standard deviations each way"
    report = swap.http.get("/policy-alias/swap/canary").json()["data"]
    assert report["candidate"]["granted"] == share
    assert report["active"]["granted"] == 200 - share
    assert report["candidate"]["latency_ms"]["p50"] > 0
    again = {reply["id"]: reply["policy_rule_uri"] for reply in swap.say(*asks)}
    assert again == {number: reply["policy_rule_uri"] for number, reply in first.items()}
    by_tenant = {**body, "by": "tenant"}
    assert swap.http.post("/policy-alias/swap/canary", json=by_tenant).status_code == 200
    assert len({reply["policy_rule_uri"] for reply in swap.say(*[ask_message("swap")] * 20)}) == 1
    assert swap.http.delete("/policy-alias/swap/canary").status_code == 200
    assert {r["policy_rule_uri"] for r in swap.say(*[ask_message("swap")] * 20)} == {ONE}
    assert swap.http.delete("/policy-alias/swap/canary").status_code == 404


@pytest.mark.parametrize(
    ("body", "field", "says"),
    [
        ({"policy_rule_uri": TWO, "percent": 0}, "percent", "above 0"),
        ({"policy_rule_uri": TWO, "percent": 101}, "percent", "up to 100"),
        ({"policy_rule_uri": TWO}, "percent", "a number"),
        ({"policy_rule_uri": TWO, "percent": "5"}, "percent", "a number"),
        ({"policy_rule_uri": TWO, "percent": 5, "by": "moon"}, "by", "`request` or `tenant`"),
        ({"policy_rule_uri": TWO, "percent": 5, "seed": "x"}, "seed", "a whole number"),
        ({"policy_rule_uri": TWO, "percent": 5, "bye": "tenant"}, "bye", "one of policy_rule_uri"),
        ({"policy_rule_uri": ONE, "percent": 5}, "policy_rule_uri", "the active version"),
        ({"percent": 5}, "policy_rule_uri", "expected"),
    ],
)
def test_an_impossible_canary_is_refused(swap, body, field, says):
    answer = swap.http.post("/policy-alias/swap/canary", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["field"] == field
    assert says in answer.json()["message"]


def run(server: Server, *arguments: str, code: int = 0) -> str:
    ran = server.moorage(*arguments)
    assert ran.returncode == code, ran.stdout + ran.stderr
    return ran.stdout


def test_the_command_line_activates_and_rolls_back_policies(swap):
    assert run(swap, "policy", "activate", "--no-test", TWO) == f"swap:stable -> {TWO}\n"
    assert run(swap, "policy", "rollback", "swap") == f"swap:stable -> {ONE}\n"
    assert run(swap, "policy", "canary", "swap", TWO, "--percent", "50", "--no-test")
    assert f"{TWO} 50 % by request" in run(swap, "policy", "aliases")
    swap.say(*[ask_message("swap")] * 10)
    report = json.loads(run(swap, "policy", "canary", "swap", "--report", "--json"))
    assert report["active"]["advised"] + report["candidate"]["advised"] == 10
    assert ONE in run(swap, "policy", "canary", "swap", "--report")
    run(swap, "policy", "canary", "swap", "--stop")
    run(swap, "policy", "canary", "swap", code=2)
    assert "rolled_back" in run(swap, "policy", "aliases", "swap")
    beta = run(swap, "policy", "activate", "--no-test", TWO, "--alias", "beta")
    assert beta == f"swap:beta -> {TWO}\n"
    gone = run(swap, "policy", "aliases", "swap:beta", "--delete")
    assert gone == f"swap:beta is deleted; it meant {TWO}\n"
    for share in ("0", "nan", "101"):
        run(swap, "policy", "canary", "swap", TWO, "--percent", share, code=2)
    run(swap, "policy", "aliases", "swap:beta", code=5)
    run(swap, "policy", "activate", "swap:9-none", code=5)
    run(swap, "policy", "shadow", "swap", "first_fit:1.0-stable")
    assert "first_fit:1.0-stable" in run(swap, "policy", "aliases", "swap"), (
        "in another name's alias"
    )
    run(swap, "policy", "shadow", "swap", "--stop")


MANAGED = """
class AIOSv1PolicyRule:
    def __init__(self, rule_id, settings, parameters): self.id = rule_id
    def eval(self, parameters, input_data, context): return {}
    def management(self, action, data): return {'id': self.id, action: data}
"""


def test_a_deleted_policy_may_be_published_with_other_code_and_managed(swap):
    gone = {"policy_rule_uri": "gone:1-x", "code": MANAGED}
    swap.publish(gone)
    assert run(swap, "policy", "delete", "gone:1-x") == "gone:1-x is removed\n"
    run(swap, "policy", "delete", "gone:1-x", code=5)
    swap.publish({**gone, "code": MANAGED.replace("'id'", "'di'")})
    swap.publish({"policy_rule_uri": "managed:1-x", "code": MANAGED})
    activate(swap, "managed", "managed:1-x")
    said = run(swap, "policy", "manage", "managed", "set", "--data", '{"a": 1}')
    assert json.loads(said) == {"id": "managed:1-x", "set": {"a": 1}}
    body = {"action": "get"}
    answer = swap.http.post("/policy/managed/manage", json=body).json()
    assert answer["data"] == {"id": "managed:1-x", "get": {}}
    listed = swap.http.post("/policy/managed/manage", json={**body, "data": []})
    assert (listed.status_code, listed.json()["error"]["field"]) == (400, "data")
    refused = swap.http.post("/policy/swap/manage", json=body).json()["error"]
    assert refused["code"] == "unsupported"
    (reply,) = swap.say({"op": "manage", "policy_rule_uri": "managed", "action": "x"})
    assert reply["data"] == {"id": "managed:1-x", "x": {}}


def test_logs_show_policy_output_of_the_callers_requests(swap):
    says = "print(input_data['inputs'])\nreturn {}"
    swap.publish(policy(says, "prints:1-x"))
    assert json.loads(run(swap, "policy", "logs", "prints:1-x", "--json"))["printed"] == {}
    swap.ask("prints:1-x", inputs={"a": 1})
    assert run(swap, "policy", "logs", "prints:1-x") == "{'a': 1}\n"
    assert swap.http.get("/policy/prints:1-x/logs").json()["data"] == {
        "policy_rule_uri": "prints:1-x",
        "printed": {"requests": "{'a': 1}\n"},
        "changed": {},
        "rests": None,
    }
    assert swap.http.get("/policy/prints:9-x/logs").status_code == 404


def test_blocks_and_searches_accept_aliases(swap):
    ranks = "return sorted((each['id'] for each in input_data), reverse=True)"
    swap.publish(policy(ranks, "ranks:1-x"))
    activate(swap, "ranks", "ranks:1-x")
    body = {"matchType": "cluster", "rankingPolicyRule": {"policyRuleURI": "ranks"}}
    found = swap.http.post("/api/similarity-search", json=body).json()
    assert [each["id"] for each in found["data"]] == ["west", "east"]


def test_the_deadline_of_a_policy_is_set_in_its_document_or_in_the_request(server):
    sleeps = "import time\ntime.sleep(input_data['inputs']['for'])\nreturn {'n': 1}"
    server.publish(policy(sleeps, "sleeps:1-x", deadline_seconds=0.5, code_file="sleeps.py"))
    no = server.ask("sleeps:1-x", inputs={"for": 20})["error"]
    assert (no["code"], no["seconds"]) == ("policy_timeout", 0.5)
    assert "(sleeps.py, line 6)" in no["reason"]
    assert (no["file"], no["line"]) == ("sleeps.py", 6)
    assert server.ask("sleeps:1-x", inputs={"for": 0.8}, deadline_seconds=20)["success"]
    no = server.ask("sleeps:1-x", inputs={"for": 20}, deadline_seconds=0.2)["error"]
    assert no["seconds"] == 0.2
    no = server.ask("sleeps:1-x", inputs={"for": 0}, deadline_seconds=61)["error"]
    assert (no["field"], no["expected"]) == ("deadline_seconds", "at most 60")
    longer = server.http.put("/policy/sleeps:1-x", json={"$set": {"deadline_seconds": 2}})
    assert longer.status_code == 200
    assert server.ask("sleeps:1-x", inputs={"for": 0.7})["success"]
    for wrong in (61, 0, -1, True, "2"):
        document = policy(sleeps, "sleeps:2-x", deadline_seconds=wrong)
        changed = server.http.put("/policy/sleeps:1-x", json={"deadline_seconds": wrong})
        for answer in (server.http.post("/policy", json=document), changed):
            assert answer.status_code == 400, wrong
            assert answer.json()["error"]["field"] == "deadline_seconds"


KNOBS = """
class AIOSv1PolicyRule:
    def __init__(self, rule_id, settings, parameters):
        self.settings, self.parameters = settings, parameters
    def eval(self, parameters, input_data, context):
        import time
        time.sleep(input_data["inputs"].get("for", 0))
        return {"weight": parameters["weight"], "own": self.parameters["weight"],
                "mode": self.settings.get("mode")}
    def management(self, action, data):
        if action == "fail":
            self.parameters["weight"] = 66
            raise ValueError("no")
        if action == "odd":
            self.parameters["weight"] = object()
        self.parameters.update(data.get("parameters", {}))
        self.settings.update(data.get("settings", {}))
        return {"weight": self.parameters["weight"] if action != "odd" else 0}
"""


def test_changes_by_management_persist_and_can_be_undone(tmp_path):
    document = {
        "policy_rule_uri": "knobs:1-x",
        "code": KNOBS,
        "policy_parameters": {"weight": 1, "other": 1},
        "policy_parameters_schema": {"weight": {"type": "number", "max": 9}},
    }
    tokens = {"environment": {"MOORAGE_TOKENS": "ann:sesame,bob:mellon"}, "bearer": "sesame"}
    first, changed = ({"weight": n, "own": n, "mode": mode} for n, mode in ((1, None), (5, "fast")))
    stored = {"parameters": {"weight": 5, "other": 7}, "settings": {"mode": "fast"}}

    def ask(bearer="sesame", **more):
        body = {"policy_rule_uri": "knobs:1-x", "inputs": {}, **more}
        answer = server.http.post("/allocate", json=body, headers=bearing(bearer))
        return answer.json()["data"]

    def manage(action, **data):
        return server.http.post("/policy/knobs:1-x/manage", json={"action": action, "data": data})

    with serve_and_kill(tmp_path, **tokens) as server:
        server.register(cluster("c"))
        server.publish(document)
        assert ask() == first
        done = manage("set", parameters={"weight": 5}, settings={"mode": "fast"})
        assert done.json()["data"] == {"weight": 5}
        assert ask() == changed
        assert ask("mellon")["weight"] == 1, "the change applies to one tenant"
        assert ask(parameters={"weight": 2})["weight"] == 2, "the request's own value wins"
        for action, data in (("fail", {}), ("odd", {}), ("set", {"parameters": {"weight": 10}})):
            assert manage(action, **data).status_code >= 400, action
            assert ask() == changed, action
        assert manage("set", parameters={"other": 7}).json()["data"] == {"weight": 5}
        kill(server)
    with serving(tmp_path, **tokens) as server:
        slow = [ask_message("knobs:1-x", inputs={"for": 0.3}, id=n) for n in range(6)]
        assert all(reply["data"] == changed for reply in server.say(*slow)), "in several cells"
        logs = server.http.get("/policy/knobs:1-x/logs").json()["data"]
        assert logs["changed"] == stored
        shown = server.moorage("policy", "show", "knobs:1-x").stdout
        assert json.loads(shown)["changed_by_management"] == stored
        assert manage("moorage:undo").json()["data"] == {"undone": stored}
        assert ask() == first
    with serving(tmp_path, **tokens) as server:
        assert ask()["weight"] == 1
