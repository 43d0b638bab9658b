"""Tests of contexts of policies: isolation, injected clients, and precedence."""

import itertools
import json
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from served import Server, ask_message, cluster, kill, policy, read_message, serve_and_kill, serving

pytestmark = pytest.mark.heavy  # Daemons, restarts and a kill.

COUNTS = """
context["n"] = context.get("n", 0) + 1
return {"n": context["n"]}
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
        if action == "swap":  # As a client of it does: from a version that it read earlier.
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
SWAPS_RULE = {
    "policy_rule_uri": "swaps:1-x",
    "type": "python_class_v1",
    "code": SWAPS,
    "deadline_seconds": 60,
}


def data_of(reply: dict):
    assert reply["success"], reply
    return reply["data"]


def test_contexts_of_policies_outlive_restarts_and_are_deleted_with_their_policy(tmp_path):
    """A context version from before a kill is valid only while the context has not changed."""
    with serving(tmp_path) as server:
        server.register(cluster("east"))
        server.publish(policy(COUNTS, "counts:1-x"), SWAPS_RULE)
        assert [data_of(server.ask("counts:1-x"))["n"] for _ in range(2)] == [1, 2]
    with serve_and_kill(tmp_path) as server:
        assert data_of(server.ask("counts:1-x"))["n"] == 3
        server.http.delete("/policy/counts:1-x").raise_for_status()
        versions = [manage(server, "set", {"n": n})["version"] for n in range(6)]
        assert versions == sorted(set(versions))
        time.sleep(2.5)  # Contexts are stored once a second.
        versions += [manage(server, "set", {"n": n})["version"] for n in range(6, 12)]
        kill(server)
    with serving(tmp_path) as server:
        server.publish(policy(COUNTS, "counts:1-x"))
        assert data_of(server.ask("counts:1-x"))["n"] == 1
        now = manage(server, "version")["version"]
        assert now in versions[5:], "later versions may or may not be stored"
        assert not swap(server, versions[0])["success"]
        assert data_of(swap(server, now))["version"] > max(versions)
        for version in versions:
            assert not swap(server, version)["success"]


def swap(server: Server, version: int) -> dict:
    data = {"context": {"by": version}, "version": version}
    message = {"op": "manage", "policy_rule_uri": "swaps:1-x", "action": "swap", "data": data}
    return server.say(message)[0]


def test_swaps_of_a_context_lose_no_change_and_management_shares_the_context(server):
    """Evaluations are slow, so several cells evaluate at the same time and conflict."""
    server.publish(SWAPS_RULE)
    manage(server, "set", {"n": 0})

    def send_ten(_: int) -> list[dict]:
        with server.socket() as socket:
            for number in range(10):
                message = ask_message("swaps:1-x", inputs={"spin": 200_000}, id=number)
                socket.send(json.dumps(message))
            return [read_message(socket) for _ in range(10)]

    with ThreadPoolExecutor(4) as pool:
        replies = itertools.chain(*pool.map(send_ten, range(4)))
    assert sorted(data_of(reply)["n"] for reply in replies) == list(range(1, 41))
    assert manage(server, "get") == {"n": 40}
    manage(server, "set", {"n": 100})
    assert data_of(server.ask("swaps:1-x"))["n"] == 101
    assert manage(server, "get") == {"n": 101}


def manage(server: Server, action: str, data: dict | None = None):
    message = {"op": "manage", "policy_rule_uri": "swaps:1-x", "action": action}
    return data_of(server.say(message | {"data": data or {}})[0])


BAD_SWAPS = [
    ("old", "ContextConflict", "changed meanwhile"),
    ("big", "ValueError", "at most"),
    ("odd", "TypeError", "not plain JSON"),
    ("list", "TypeError", "must be a dict"),
    ("text", "TypeError", "that read() returned, not str"),
]


def test_an_invalid_swap_is_a_typed_error(server):
    server.publish(SWAPS_RULE)
    manage(server, "set", {"n": 1})
    for action, exception, reason in BAD_SWAPS:
        message = {"op": "manage", "policy_rule_uri": "swaps:1-x", "action": action}
        error = server.say(message)[0]["error"]
        assert (error["code"], error["exception"]) == ("policy_error", exception)
        assert reason in error["reason"]
    assert manage(server, "get") == {"n": 1}


def test_the_caller_never_overrides_the_injected_clients(server):
    body = "return [self.settings['a'], type(self.settings['cluster_client']).__name__]"
    server.publish(policy(body, "precedence:1-x", policy_settings={"a": "default"}))
    given = {"a": "mine", "cluster_client": "evil"}
    assert data_of(server.ask("precedence:1-x", settings=given)) == ["mine", "ClusterClient"]
