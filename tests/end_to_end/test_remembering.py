"""What policies remember, share and may ask: contexts, isolation, injected clients, precedence."""

import json
import threading
import time

import pytest
from served import Server, ask_message, cluster, heard, kill, killed, policy, serving

pytestmark = pytest.mark.heavy  # Many daemons, restarts and kills: minutes in all.

COUNTS = """
context["n"] = context.get("n", 0) + 1
return {"n": context["n"]}
"""
SHARED = """
import function
function.SEEN = getattr(function, "SEEN", 0) + 1
return {"seen": function.SEEN}
"""
SWAPS = """
class AIOSv1PolicyRule:
    def __init__(self, rule_id, settings, parameters):
        self.contexts = settings["context_client"]

    def eval(self, parameters, input_data, context):
        for attempt in range(1000):
            known, version = self.contexts.read()
            known["n"] = known.get("n", 0) + 1
            until = attempt  # Other processes get their turn between reading and swapping.
            for _ in range(input_data["inputs"].get("spin", 0)):
                until += 1
            try:
                self.contexts.swap(known, version)
                return {"n": known["n"], "attempt": attempt}
            except self.contexts.Conflict as conflict:
                assert conflict.version != version
        raise RuntimeError("never got it")

    def management(self, action, data):
        known, version = self.contexts.read()
        if action == "set":
            return {"version": self.contexts.swap(data, version)}
        if action == "swap":  # As a client of it does: from a version that it was told earlier.
            return {"version": self.contexts.swap(data["context"], data["version"])}
        if action == "version":
            return {"version": version}
        if action == "old":
            self.contexts.swap(data, version - 1)
        if action == "big":
            self.contexts.swap({"x": "x" * 300_000}, version)
        if action == "odd":
            self.contexts.swap({"x": object()}, version)
        if action == "list":
            self.contexts.swap([], version)
        if action == "text":
            self.contexts.swap({}, str(version))
        return known
"""


def told(reply: dict):
    assert reply["success"], reply
    return reply["data"]


def test_a_context_outlives_a_restart_and_goes_with_its_policy(tmp_path):
    for start in range(2):
        with serving(tmp_path) as server:
            if not start:
                server.register(cluster("east"))
                server.publish(policy(COUNTS, "counts:1-x"))
            for turn in range(2):
                assert told(server.ask("counts:1-x"))["n"] == start * 2 + turn + 1
            if start:
                server.http.delete("/policy/counts:1-x").raise_for_status()
    with serving(tmp_path) as server:
        server.publish(policy(COUNTS, "counts:1-x"))
        assert told(server.ask("counts:1-x"))["n"] == 1


@pytest.mark.parametrize(
    ("isolation", "expected"),
    [
        ("per_policy_version", {"one": [1, 3], "two": [2, 4], "other": [1]}),
        ("per_tenant", {"one": [1, 2], "two": [1, 2], "other": [1]}),
        ("per_eval", {"one": [1, 1], "two": [1, 1], "other": [1]}),
    ],
)
def test_who_shares_a_process_is_a_setting_and_contexts_never_mix(tmp_path, isolation, expected):
    settings = {"MOORAGE_TOKENS": "one:aa,two:bb", "MOORAGE_ISOLATION": isolation}
    with serving(tmp_path, environment=settings) as server:
        server.http.headers["Authorization"] = "Bearer aa"
        server.register(cluster("east"))
        server.publish(
            policy(SHARED, "s:1-x"), policy(SHARED, "s:2-x"), policy(COUNTS, "counts:1-x")
        )

        def ask(token: str, uri: str) -> dict:
            header = {"Authorization": f"Bearer {token}"}
            return told(server.http.post("/allocate", json=ask_message(uri), headers=header).json())

        seen: dict[str, list[int]] = {"one": [], "two": [], "other": []}
        for _ in range(2):
            seen["one"].append(ask("aa", "s:1-x")["seen"])
            seen["two"].append(ask("bb", "s:1-x")["seen"])
        seen["other"].append(ask("aa", "s:2-x")["seen"])
        assert seen == expected
        counts = [ask(token, "counts:1-x")["n"] for token in ("aa", "aa", "bb", "aa", "bb")]
        assert counts == [1, 2, 1, 3, 2], "a context is its tenant's, in every process"


def test_swaps_lose_no_change_and_management_shares_the_context(tmp_path):
    """Evaluations long enough that several processes work at it, and conflict."""
    with serving(tmp_path, environment={"MOORAGE_POLICY_DEADLINE_SECONDS": "60"}) as server:
        server.register(cluster("east"))
        server.publish({"policy_rule_uri": "swaps:1-x", "type": "python_class_v1", "code": SWAPS})
        replies: list[dict] = []

        def ask() -> None:
            with server.socket() as socket:
                for number in range(10):
                    inputs = {"spin": 200_000}
                    socket.send(json.dumps(ask_message("swaps:1-x", inputs=inputs, id=number)))
                replies.extend(heard(socket) for _ in range(10))

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(told(reply)["n"] for reply in replies) == list(range(1, 41))
        assert manage(server, "get") == {"n": 40}
        manage(server, "set", {"n": 100})
        assert told(server.ask("swaps:1-x"))["n"] == 101
        assert manage(server, "get") == {"n": 101}


def test_a_version_from_before_a_kill_is_good_while_nothing_changed_and_never_again(tmp_path):
    def swap(server: Server, version: int) -> dict:
        data = {"context": {"by": version}, "version": version}
        message = {"op": "manage", "policy_rule_uri": "swaps:1-x", "action": "swap", "data": data}
        return server.say(message)[0]

    with killed(tmp_path) as server:
        server.publish({"policy_rule_uri": "swaps:1-x", "type": "python_class_v1", "code": SWAPS})
        versions = [manage(server, "set", {"n": n})["version"] for n in range(6)]
        assert versions == sorted(set(versions))
        time.sleep(2.5)  # Contexts are kept once a second.
        versions += [manage(server, "set", {"n": n})["version"] for n in range(6, 12)]
        kill(server)
    with serving(tmp_path) as server:
        now = manage(server, "version")["version"]
        assert now in versions[5:], "of the later ones it may have kept some"
        assert not swap(server, versions[0])["success"]
        assert told(swap(server, now))["version"] > max(versions)
        for version in versions:
            assert not swap(server, version)["success"]


def manage(server: Server, action: str, data: dict | None = None):
    message = {"op": "manage", "policy_rule_uri": "swaps:1-x", "action": action}
    return told(server.say(message | {"data": data or {}})[0])


@pytest.mark.parametrize(
    ("action", "exception", "says"),
    [
        ("old", "ContextConflict", "changed meanwhile"),
        ("big", "ValueError", "at most"),
        ("odd", "TypeError", "not plain"),
        ("list", "TypeError", "must be a dict"),
        ("text", "TypeError", "that read() returned, not str"),
    ],
)
def test_a_swap_that_cannot_be_is_a_typed_error(server, action, exception, says):
    server.publish({"policy_rule_uri": "swaps:1-x", "type": "python_class_v1", "code": SWAPS})
    manage(server, "set", {"n": 1})
    message = {"op": "manage", "policy_rule_uri": "swaps:1-x", "action": action}
    error = server.say(message)[0]["error"]
    assert (error["code"], error["exception"]) == ("policy_error", exception)
    assert says in error["reason"]
    assert manage(server, "get") == {"n": 1}


def test_the_caller_overrides_defaults_and_never_the_injected_clients(server):
    body = (
        "kind = type(self.settings['cluster_client']).__name__\n"
        "return {'p': parameters, 'own': self.parameters, 's': self.settings['a'], 'kind': kind}"
    )
    defaults = {"policy_parameters": {"x": 1, "y": 2}, "policy_settings": {"a": "default"}}
    server.publish(policy(body, "precedence:1-x", **defaults))
    plain = told(server.ask("precedence:1-x"))
    assert (plain["p"], plain["s"]) == ({"x": 1, "y": 2}, "default")
    given = {"parameters": {"y": 3}, "settings": {"a": "mine", "cluster_client": "evil"}}
    asked = told(server.ask("precedence:1-x", **given))
    assert asked["p"] == asked["own"] == {"x": 1, "y": 3}
    assert (asked["s"], asked["kind"]) == ("mine", "ClusterClient")
