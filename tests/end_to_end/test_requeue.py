"""A workload that fails and is started again, as its request said: real processes and kills."""

import contextlib
import json
import os
import platform
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace
from served import Server, cluster, policy, until
from test_backends import dead, in_state, killed, marked, release, status

from moorage.model import LeaseTerms, Provision
from moorage.testing.daemon_process import daemon
from moorage_client import BlockingClient
from moorage_policies import catalog

pytestmark = pytest.mark.heavy

ONCE = 'test -e "$0" && exec sleep 1000; touch "$0"; echo no such model; exit 7'
"""Fails the first time, and works the second; it is told where to remember that."""
PAUSE = "MOORAGE_REQUEUE_PAUSE_SECONDS"


def fill(server: Server, gpus: int = 2) -> None:
    document = cluster("here", nodes=1, gpus=gpus)
    document["nodes"]["nodeData"][0]["id"] = platform.node()
    server.register(document)
    server.publish(catalog.document("first_fit"))


def wanted(command: list[str], attempts: int = 3, **more) -> dict:
    spec = {"command": command, **more}
    provision = {"backend": "local", "spec": spec, "on_failure": "requeue"}
    return {"provision": provision | {"attempts_max": attempts}, "resources": {"gpus": 1}}


def run(server: Server, command: list[str], attempts: int = 3, ttl: float = 3600, **more) -> dict:
    reply = server.ask(lease={"ttl_seconds": ttl}, **wanted(command, attempts, **more))
    assert reply["success"], reply
    return reply["lease"]


def renew(server: Server, lease: dict) -> dict:
    message = {"op": "renew", "lease": lease["id"], "token": lease["token"]}
    return server.say(message)[0]["lease"]


@pytest.fixture(scope="module", autouse=True)
def short_pauses() -> Iterator[None]:
    """Every daemon here tries again after hundredths of a second, unless a test says otherwise."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(PAUSE, "0.02")
        yield


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="module")
def server(data):
    with daemon(data) as running:
        server = Server(running)
        fill(server)
        yield server
        assert running.log.read_text() == ""
        server.close()


def test_what_fails_the_first_time_is_started_again_and_those_who_watch_see_it(server, tmp_path):
    tried = ["finished", "requeued", "paused", "resumed", "granted", "started"]
    with server.socket() as watching:
        watching.send(json.dumps({"op": "watch", "topics": ["leases"], "id": 1}))
        assert json.loads(watching.recv(30))["success"]
        lease = run(server, ["sh", "-c", ONCE, str(tmp_path / "once")])
        assert lease["workload"]["attempt"] == 1
        assert lease["workload"]["attempts_max"] == 3
        news = []
        while [each["event"] for each in news][-1:] != ["started"] or len(news) < len(tried):
            one = json.loads(watching.recv(30))
            news += [one] if one["event"] != "workload" else []
    names = [each["event"] for each in news]
    assert names[: -len(tried)] in (["granted"], ["granted", "started"])  # It ends at once.
    assert names[-len(tried) :] == tried
    mine = [each for each in news if each["data"]["id"] == lease["id"]]
    assert mine == news
    finished = next(each["data"]["outcome"] for each in mine if each["event"] == "finished")
    requeued = next(each["data"] for each in mine if each["event"] == "requeued")
    assert requeued["state"] == "queued"
    assert "attempt 1 of 3 failed: it ended by itself with exit status 7" in requeued["reason"]
    assert finished["log_tail"] == ["no such model"]
    assert finished["exit_code"] == 7
    assert finished["nodes"] == [{"cluster_id": "here", "node_id": platform.node()}]
    again = status(server, lease)
    assert again["state"] == "active"
    assert again["fencing"] > lease["fencing"]
    assert again["workload"]["phase"] == "ready"
    assert again["workload"]["attempt"] == 2
    assert again["workload"]["outcome"]["attempt"] == 1
    assert renew(server, lease)["workload"]["attempt"] == 2
    release(server, lease)
    ended = in_state(server, lease, "ended")
    assert ended["workload"]["phase"] == "stopped"


def test_a_status_says_where_a_service_is_reached_and_how_far_it_is(server, tmp_path):
    serve = "import http.server as h, os, time\nwhile not os.path.exists('go'): time.sleep(0.01)\n"
    serve += "h.test(h.SimpleHTTPRequestHandler, port=int(os.environ['PORT']), bind='127.0.0.1')"
    spec = {"category": "service", "readiness": {"path": "/"}, "workdir": str(tmp_path)}
    lease = run(server, ["python3", "-c", serve], **spec)
    assert (lease["state"], lease["workload"]["phase"]) == ("starting", "starting")
    until(lambda: "detail" in status(server, lease)["workload"])
    (tmp_path / "go").touch()
    active = in_state(server, lease, "active")
    assert active["workload"]["phase"] == "ready"
    assert server.http.get(active["workload"]["endpoint"]).status_code == 200
    release(server, lease)
    in_state(server, lease, "ended")


@pytest.mark.parametrize("provision", [{}, {"on_failure": "end"}])
def test_attempts_without_a_requeue_are_refused(server, provision):
    provision |= {"backend": "local", "spec": {"command": ["true"]}, "attempts_max": 2}
    asked = {"resources": {"gpus": 1}, "lease": {"ttl_seconds": 60}, "provision": provision}
    assert server.ask(**asked)["error"]["field"] == "provision.attempts_max"


def test_the_client_says_what_to_do_and_reads_what_became_of_it(server, tmp_path):
    plain = Provision("local", {"command": ["sh", "-c", "echo oh; exit 7"]})
    again = replace(plain, on_failure="requeue", attempts_max=2)
    with BlockingClient(server.running.ws) as client:
        for provision, attempts in ((plain, 1), (again, 2)):
            asked = {"resources": {"gpus": 1}, "lease": LeaseTerms(60.0), "provision": provision}
            lease = client.ask("first_fit:1.0-stable", **asked).lease
            assert lease is not None
            assert lease.workload is not None
            assert (lease.workload.backend, lease.workload.attempts_max) == ("local", attempts)
            until(lambda lease=lease: client.status(lease.id)["state"] == "ended")
            (ended,) = [each for each in client.leases(state="ended") if each.id == lease.id]
            assert ended.workload is not None
            assert ended.workload.phase == "failed"
            outcome = ended.workload.outcome
            assert outcome is not None
            assert (outcome.attempt, outcome.exit_code) == (attempts, 7)
            assert outcome.log_tail == ("oh",)
            assert outcome.nodes == (("here", platform.node()),)


def test_a_lease_in_the_queue_survives_kill_9_is_renewed_and_started_again(tmp_path, monkeypatch):
    """A request of higher priority takes its place; the daemon is killed before it has another."""
    monkeypatch.setenv(PAUSE, "1.5")
    go = tmp_path / "go"
    script = 'test -e "$0.once" && exec sleep 1000; touch "$0.once"; '
    script += 'until test -e "$0"; do sleep 0.02; done; echo broken; exit 7'
    with killed(tmp_path / "data") as running:
        server = Server(running)
        fill(server, gpus=1)
        lease = run(server, ["sh", "-c", script, str(go)], ttl=60)
        in_state(server, lease, "active")
        with server.socket() as waiting:
            terms = {"ttl_seconds": 3600, "wait_seconds": 3600, "priority": 1}
            ask_message = {"adhoc": True, "policy_rule_uri": "first_fit:1.0-stable", "inputs": {}}
            waiting.send(json.dumps(ask_message | {"lease": terms, "resources": {"gpus": 1}}))
            until(lambda: server.say({"op": "queue"})[0]["data"]["waiting"])
            go.touch()
            other = json.loads(waiting.recv(30))["lease"]
        queued = in_state(server, lease, "queued")
        assert queued["placement"] == []
        assert queued["workload"]["outcome"]["log_tail"] == ["broken"]
        pause = queued["retry_at"] - queued["workload"]["outcome"]["at"]
        assert 1.5 <= pause < 3.5
        with BlockingClient(running.ws) as client:
            (same,) = client.leases(state="queued")
            assert same.retry_at == queued["retry_at"]
        assert renew(server, lease)["state"] == "queued"
        os.kill(running.pid, signal.SIGKILL)
        dead(running.pid)
        server.close()
    assert marked(tmp_path / "data") == {}
    with daemon(tmp_path / "data") as running:
        server = Server(running)
        assert status(server, lease)["state"] == "queued"
        (row,) = server.say({"op": "queue"})[0]["data"]["waiting"]
        assert row["lease"]["workload"]["outcome"]["log_tail"] == ["broken"]
        assert renew(server, lease)["expires_at"] > queued["expires_at"]
        release(server, other)
        again = in_state(server, lease, "active")
        assert again["workload"]["attempt"] == 2
        assert again["granted_at"] >= queued["retry_at"]
        assert "retry_at" not in again
        assert len(again["placement"]) == 1
        assert marked(tmp_path / "data").keys() == {lease["id"]}
        release(server, lease)
        in_state(server, lease, "ended")
        server.close()


def test_a_policy_is_asked_at_the_start_about_what_waited(tmp_path):
    """There is room, and the policy declined: the daemon that comes back asks it again."""
    body = 'return {"declined": "not today"}'
    with daemon(tmp_path) as running:
        server = Server(running)
        fill(server)
        server.publish(policy(body, "never:1-x"))
        with server.socket() as waiting:
            terms = {"ttl_seconds": 60, "wait_seconds": 3600}
            ask_message = {
                "adhoc": True,
                "policy_rule_uri": "never:1-x",
                "inputs": {},
                "lease": terms,
            }
            waiting.send(json.dumps(ask_message | {"resources": {"gpus": 1}}))
            until(lambda: server.say({"op": "queue"})[0]["data"]["waiting"])
        server.close()
    with daemon(tmp_path) as running:
        server = Server(running)
        (row,) = server.say({"op": "queue"})[0]["data"]["waiting"]
        assert row["policy_rule_uri"] == "never:1-x"
        server.close()


def test_random_kills_while_workloads_fail_start_nothing_twice(tmp_path):
    """Each grant starts its workload once, however often the daemon dies, and each lease runs."""
    draw = random.Random(7)
    starts = tmp_path / "starts"
    starts.mkdir()
    script = 'echo $MOORAGE_FENCING >> "$0/$MOORAGE_LEASE_ID"; sleep 0.0$(($$ % 10)); '
    script += 'test $(wc -l < "$0/$MOORAGE_LEASE_ID") -lt 3 && exit 7; exec sleep 1000'
    command = ["sh", "-c", script, str(starts)]
    held: dict[str, dict] = {}
    for number in range(12):
        with killed(tmp_path / "data") as running:
            server = Server(running)
            if number == 0:
                fill(server, gpus=4)
            stop_at = time.monotonic() + draw.random() * 0.6
            with contextlib.suppress(Exception):  # The daemon may be killed in any call.
                while time.monotonic() < stop_at:
                    if len(held) < 4:
                        lease = run(server, command)
                        held[lease["id"]] = lease
                    else:
                        name = draw.choice(sorted(held))
                        if release(server, held[name])["success"]:
                            del held[name]
            os.kill(running.pid, signal.SIGKILL)
            dead(running.pid)
            server.close()
    with daemon(tmp_path / "data") as running:
        server = Server(running)
        for lease in held.values():
            until(lambda lease=lease: status(server, lease)["workload"]["attempt"] == 3)
            in_state(server, lease, "active")
            release(server, lease)
            in_state(server, lease, "ended")
        server.close()
    for each in starts.iterdir():
        fencings = each.read_text().split()
        assert len(fencings) == len(set(fencings)) <= 3, "a grant is started once"
