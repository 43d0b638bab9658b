"""Leases that give way: their processes stop, and who holds them is told by whom and why."""

import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from served import FIRST_FIT, Server, cluster, until
from test_backends import in_state, marked, status

from moorage.benchmarks.daemon_process import daemon
from moorage_policies import catalog

WAITS = {"ttl_seconds": 3600, "wait_seconds": 300}
SLEEP = ["sh", "-c", 'echo "$$ runs"; exec sleep 1000']


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="module")
def server(data: Path) -> Iterator[Server]:
    pauses = {"MOORAGE_REQUEUE_PAUSE_SECONDS": "0.02", "MOORAGE_BACKENDS": "local"}
    with daemon(data, environment=pauses) as running:
        server = Server(running)
        document = cluster("here", nodes=1, gpus=2)
        document["nodes"]["nodeData"][0]["id"] = platform.node()
        server.register(document)
        server.publish(catalog.document("first_fit"))
        yield server
        server.close()


def run(server: Server, on_failure: str, **terms: object) -> dict:
    reply = server.ask(
        resources={"gpus": 2},
        lease=WAITS | {"preemptible": True} | terms,
        provision={
            "backend": "local",
            "spec": {"command": SLEEP},
            "on_failure": on_failure,
        },
    )
    assert reply["success"], reply
    in_state(server, reply["lease"], "active")
    return reply["lease"]


def release(server: Server, lease: dict) -> None:
    told = {"op": "release", "lease": lease["id"], "token": lease["token"]}
    assert server.say(told)[0]["success"]
    until(lambda: status(server, lease)["state"] == "ended")


def heard(watching, lease: dict, last: str) -> list[dict]:
    """Return the news about a lease, up to an event."""
    news: list[dict] = []
    while not news or news[-1]["event"] != last:
        said = json.loads(watching.recv(60))
        if said.get("data", {}).get("id") == lease["id"] and said["event"] != "workload":
            news.append(said)
    return news


def test_a_victim_is_told_by_whom_and_why_and_starts_again_after_it(server, data):
    victim = run(server, "requeue", notice_seconds=0.5)
    (first,) = marked(data).values()
    with server.socket() as watching:
        watching.send(json.dumps({"op": "watch", "topics": ["leases"], "id": 1}))
        assert json.loads(watching.recv(30))["success"]
        winner = server.ask(resources={"gpus": 2}, lease=WAITS | {"priority": 5})["lease"]
        news = heard(watching, victim, "requeued")
        names = [each["event"] for each in news]
        assert names[0] == "preempted", "the notice comes before the end"
        told = news[0]["data"]
        assert told["by"] == winner["id"]
        assert news[1]["data"]["at"] >= told["until"] > told["at"], "it runs on until then"
        why = f"preempted by request {winner['id']} of tenant local, of priority 5"
        assert told["reason"] == why
        assert why in news[-1]["data"]["reason"]
        assert status(server, victim)["state"] == "queued"
        until(lambda: not marked(data))  # Its processes are gone, not only its lease.
        release(server, winner)
        heard(watching, victim, "started")
    again = in_state(server, victim, "active")
    assert again["workload"]["attempt"] == 2
    assert again["fencing"] > winner["fencing"]
    (second,) = marked(data).values()
    assert not first & second
    release(server, victim)


def test_a_victim_that_is_not_to_start_again_ends_and_says_for_whom(server, data):
    victim = run(server, "end")
    winner = server.ask(resources={"gpus": 1}, lease=WAITS | {"priority": 5})["lease"]
    ended = in_state(server, victim, "ended")
    assert ended["reason"] == f"preempted by request {winner['id']} of tenant local, of priority 5"
    until(lambda: not marked(data))
    (why,) = server.say({"op": "why", "lease": victim["id"]})
    assert winner["id"] in why["data"]["reason"]
    release(server, winner)


def test_none_gives_way_in_vain_before_its_minimum_or_to_its_equals(server):
    victim = run(server, "end", runtime_seconds_min=3600, priority=1)
    for priority in (1, 5):  # Its equal; and one that would give up long before.
        reply = server.ask(
            resources={"gpus": 2},
            lease={"ttl_seconds": 60, "wait_seconds": 0.3, "priority": priority},
        )
        assert not reply["success"]
    assert status(server, victim)["state"] == "active"
    release(server, victim)


def test_a_quota_that_changes_while_it_runs_holds_for_who_waits(server):
    def set_quota(**change: object) -> None:
        assert server.say({"op": "set_quota", "tenant": "local", **change})[0]["success"]

    held = run(server, "end")
    set_quota(nominal={"gpu_milli": 2000})
    with server.socket() as waiting:
        request = {"adhoc": True, "policy_rule_uri": FIRST_FIT, "inputs": {}, "id": "w"}
        asked = {"resources": {"gpus": 2}, "lease": WAITS}
        waiting.send(json.dumps(request | asked))
        until(lambda: server.say({"op": "queue"})[0]["data"]["waiting"])
        release(server, held)
        granted = json.loads(waiting.recv(60))["lease"]
        waiting.send(json.dumps(request | asked))
        until(lambda: server.say({"op": "queue"})[0]["data"]["waiting"])
        set_quota(nominal={"gpu_milli": 1000})  # Ends nothing, and the waiter waits on.
        assert status(server, granted)["state"] == "granted"
        release(server, granted)
        assert server.say({"op": "queue"})[0]["data"]["waiting"], "it has no room for two"
        set_quota(nominal={"gpu_milli": 2000})  # Wakes it.
        again = json.loads(waiting.recv(60))
        assert again["success"], again
        release(server, again["lease"])
    assert server.say({"op": "remove_quota", "tenant": "local"})[0]["success"]


def test_the_command_line_says_it_too(server, tmp_path):
    binaries = Path(sys.executable).parent
    variables = {
        **os.environ,
        "MOORAGE_URL": server.running.ws,
        "MOORAGE_STATE": str(tmp_path / "leases.json"),
        "NO_COLOR": "1",
    }
    command = [binaries / "moorage", "run", "--policy", FIRST_FIT, "-g", "2", "--preemptible"]
    running = subprocess.Popen(
        [*command, "--", "sleep", "1000"],
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        until(lambda: server.say({"op": "leases"})[0]["data"]["leases"])
        winner = server.ask(resources={"gpus": 2}, lease=WAITS | {"priority": 5})["lease"]
        _, complaint = running.communicate(timeout=60)
    finally:
        running.kill()
        running.wait()
    assert running.returncode not in {0, -9}
    assert re.search(f"preempted by request {winner['id']}", complaint), complaint
    release(server, winner)
    wrong = [binaries / "moorage", "ask", FIRST_FIT, "--ttl", "9", "--notice", "3"]
    refused = subprocess.run(
        wrong, check=False, env=variables, capture_output=True, text=True, timeout=60
    )
    assert refused.returncode == 2
    assert "add --preemptible" in refused.stderr
