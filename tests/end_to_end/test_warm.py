"""Warm workloads are reused, evicted, and found again after a crash."""

import contextlib
import json
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from served import (
    Server,
    ask_message,
    here,
    kill,
    read_message,
    serve_and_kill,
    serving,
    until,
    workload_processes,
)

from moorage_client import BlockingClient

pytestmark = pytest.mark.heavy  # Many daemons.

SLEEP = ["sleep", "100000"]


def provision(command: list[str] = SLEEP, keep: float = 600, **spec) -> dict:
    spec = {"command": command, **spec}
    return {"backend": "local", "spec": spec, "keep_warm_seconds": keep}


def run(server: Server, gpus: int = 1, **more) -> dict:
    more = {"provision": provision(), "lease": {"ttl_seconds": 3_600}, **more}
    reply = server.ask(resources={"gpus": gpus}, **more)
    assert reply["success"], reply
    server.leases.append(reply["lease"])
    return reply["lease"]


def warm(server: Server, **more) -> tuple[dict, int]:
    """Start a workload and release it; return its warm lease and its process."""
    lease = run(server, **more)
    server.in_state(lease, "active")
    (pid,) = workload_processes(server.data)[lease["id"]]
    server.release(lease)
    server.in_state(lease, "warm")
    return lease, pid


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("data")) as server:
        server.fill(here(2))
        yield server
        assert server.log() == "", "the daemon logged a warning or an error"


@pytest.fixture(autouse=True)
def _nothing_warm(request) -> Iterator[None]:
    """End leases that a test leaves behind on the shared daemon."""
    yield
    if "server" in request.fixturenames:
        server = request.getfixturevalue("server")
        for lease in server.leases:
            server.release(lease)
        until(lambda: not any(server.held(state=each) for each in ("active", "ending")))
        server.say({"op": "flush"})
        until(lambda: not server.held())


def test_the_next_equal_request_gets_the_same_process(server):
    first, pid = warm(server)
    assert server.metric("moorage_leases_warm") == 1
    assert server.metric("moorage_gpu_milli_warm") == 1000
    assert [each["id"] for each in server.held(state="warm")] == [first["id"]]
    terms = {"lease": {"ttl_seconds": 60}, "resources": {"gpus": 1}, "provision": provision()}
    with server.socket() as watching:
        watching.send(json.dumps({"op": "watch", "topics": ["leases"], "id": "watch"}))
        watching.send(json.dumps(ask_message(id="reply", **terms)))
        came = [read_message(watching)]
        while came[-1].get("event") != "started":
            came.append(read_message(watching))
    # The reply comes first, although both facts are in one commit.
    order = [each.get("event") or each["id"] for each in came]
    assert order.index("reply") < order.index("granted") < order.index("started")
    second = next(each["lease"] for each in came if each.get("id") == "reply")
    server.leases.append(second)
    assert came[-1]["data"]["id"] == second["id"]
    assert second["workload"]["warm"]
    assert second["placement"] == first["placement"]
    assert second["fencing"] > first["fencing"]
    server.in_state(second, "active")
    assert workload_processes(server.data) == {first["id"]: {pid}}, "the same process, and no other"
    ended = server.status(first)
    assert ended["state"] == "ended"
    assert ended["reason"] == f"lease {second['id']} took its workload over"
    for message in ({"op": "logs"}, {"op": "exec", "command": ["true"]}, {"op": "renew"}):
        token = {"lease": first["id"], "token": first["token"]}
        assert server.say({**message, **token})[0]["error"]["code"] == "lease_ended"
    done = {"op": "exec", "lease": second["id"], "token": second["token"]}
    reply = server.say({**done, "command": ["sh", "-c", "echo $MOORAGE_WORKLOAD"]})[0]
    assert reply["data"]["output"].strip().endswith(first["id"]), "in the same workload"
    server.release(second)
    server.in_state(second, "warm")
    with server.watching("leases") as watching:
        server.say({"op": "flush"})
        news = [read_message(watching)]
        while news[-1]["event"] != "ended":
            news.append(read_message(watching))
    (stopped,) = [each["data"] for each in news if each["event"] == "workload"]
    assert (stopped["id"], stopped["phase"]) == (second["id"], "stopped")


def test_all_reports_name_a_failed_reset_as_the_reason_of_the_end(server):
    given = provision(reset_command=["sh", "-c", "echo no such table >&2; exit 3"])
    lease = run(server, provision=given)
    server.in_state(lease, "active")
    with server.watching("leases") as watching:
        server.release(lease)
        news = {"event": ""}
        while news["event"] != "ended":
            news = read_message(watching)
    said = "not kept warm: the reset command ended with code 3: no such table"
    assert said in news["data"]["reason"]
    assert server.status(lease)["reason"] == news["data"]["reason"]
    why = server.say({"op": "why", "lease": lease["id"]})[0]["data"]
    assert "no such table" in json.dumps(why)


def test_a_hanging_reset_delays_no_other_workload(server):
    hangs = provision(reset_command=["sleep", "1000"])
    first = run(server, gpus=2, provision=hangs)
    server.in_state(first, "active")
    server.release(first)
    assert server.status(first)["state"] == "ending"
    other = run(server, gpus=1, provision=None)
    ended = server.in_state(first, "ended")
    assert ended["reason"].startswith("evicted"), "the reason is the eviction, not a slow reset"
    server.release(other)
    second = run(server, provision=hangs)
    server.in_state(second, "active")
    server.release(second)
    assert server.say({"op": "flush"})[0]["data"] == {"flushed": [second["id"]]}
    assert server.in_state(second, "ended")["reason"] == "flushed"
    assert workload_processes(server.data) == {}


SERVE = "import http.server as h, os; "
SERVE += "h.test(h.SimpleHTTPRequestHandler, port=int(os.environ['PORT']), bind='127.0.0.1')"


def test_a_service_that_stopped_answering_is_not_reused(server, tmp_path):
    """The service's shell still runs, so no end is noticed."""
    script = f"""{sys.executable} -c "{SERVE}" & echo $! > pid; wait; exec sleep 1000"""
    probe = {"path": "/", "timeout_seconds": 0.3}
    spec = {"category": "service", "readiness": probe, "workdir": str(tmp_path)}
    given = provision(["sh", "-c", script], stop_seconds=0, **spec)

    def start() -> tuple[dict, int, str]:
        lease = run(server, gpus=2, provision=given)
        endpoint = server.in_state(lease, "active")["workload"]["endpoint"]
        assert server.http.get(endpoint).status_code == 200
        return lease, int((tmp_path / "pid").read_text()), endpoint

    first, pid, _ = start()
    os.kill(pid, signal.SIGKILL)
    server.release(first)
    reason = server.in_state(first, "ended")["reason"]
    assert reason == "released; not kept warm: it runs, but no longer answers"
    second, pid, endpoint = start()
    server.release(second)
    server.in_state(second, "warm")
    third, *same = start()
    assert (third["workload"]["warm"], *same) == (True, pid, endpoint), "an answering one is reused"
    server.release(third)
    server.in_state(third, "warm")
    os.kill(pid, signal.SIGSTOP)
    start()
    assert not Path(f"/proc/{pid}").exists()


def test_the_message_flush_ends_warm_leases(server):
    lease, _ = warm(server)
    held = run(server, provision=provision(["sleep", "200000"]))
    server.in_state(held, "active")
    nothing = server.say({"op": "flush", "cluster": "there"})[0]
    assert (nothing["data"], len(nothing["warnings"])) == ({"flushed": []}, 1)
    with BlockingClient(server.running.ws) as client:
        assert client.flush("here") == [lease["id"]]
    server.in_state(lease, "ended")
    until(lambda: workload_processes(server.data).keys() == {held["id"]})
    done = server.moorage("flush")
    assert "0 ended" in done.stdout + done.stderr
    missed = server.moorage("flush", "--cluster", "hre")
    assert (missed.returncode, "did you mean here?" in missed.stderr) == (5, True)


def test_the_longest_warm_time_is_a_setting(server):
    error = server.ask(
        resources={"gpus": 1}, lease={"ttl_seconds": 60}, provision=provision(keep=3_601)
    )["error"]
    assert error["field"] == "provision.keep_warm_seconds"
    assert error["expected"] == "at most 3600"


def test_kill_9_loses_no_warm_lease_and_starts_nothing_twice(tmp_path):
    """One workload is warm, one is taken over, and one dies while the daemon is down."""
    commands = [["sleep", f"{number}00000"] for number in (1, 2, 3)]
    with serve_and_kill(tmp_path) as server:
        server.fill(here(3))
        (idle, idle_pid), (taken, taken_pid), (dies, dies_pid) = (
            warm(server, provision=provision(command)) for command in commands
        )
        holder = run(server, provision=provision(commands[1]))
        server.in_state(holder, "active")
        kill(server)
    os.kill(dies_pid, signal.SIGKILL)
    found = {idle["id"]: {idle_pid}, taken["id"]: {taken_pid}}
    until(lambda: workload_processes(tmp_path) == found)
    with serving(tmp_path) as server:
        server.in_state(dies, "ended")
        assert server.status(idle)["state"] == "warm"
        assert server.status(holder)["state"] == "active"
        assert workload_processes(tmp_path) == found, "nothing is started twice, or without a lease"
        again = run(server, provision=provision(commands[0]))
        assert again["workload"]["warm"]
        server.in_state(again, "active")
        assert workload_processes(tmp_path) == found
        os.kill(taken_pid, signal.SIGKILL)
        assert "signal 9" in server.in_state(holder, "ended")["reason"]
        server.release(again)
        server.in_state(again, "warm")


FAILS_TWICE = """echo $MOORAGE_FENCING >>"$0/$MOORAGE_LEASE_ID"; sleep 0.0$(($$ % 10))
test $(wc -l <"$0/$MOORAGE_LEASE_ID") -lt 3 && exit 7
exec sleep 1000"""


def test_random_kills_leave_no_orphan_and_start_nothing_twice(tmp_path, monkeypatch):
    """Some workloads stay warm, others fail twice and are started again."""
    monkeypatch.setenv("MOORAGE_REQUEUE_PAUSE_SECONDS", "0.02")
    starts, data = tmp_path / "starts", tmp_path / "data"
    starts.mkdir()
    fails = provision(["sh", "-c", FAILS_TWICE, str(starts)], keep=0)
    fails |= {"on_failure": "requeue", "attempts_max": 3}
    draw = random.Random(7)
    held: dict[str, dict] = {}
    for number in range(4):
        with serve_and_kill(data) as server:
            if not number:
                server.fill(here(4))
            stop_at = time.monotonic() + draw.random() / 2
            with contextlib.suppress(Exception):  # The daemon may be killed in any call.
                while time.monotonic() < stop_at:
                    chance = draw.random()
                    if len(held) < 3 and chance < 0.6:
                        again = provision(["sleep", f"{draw.randint(1, 2)}00000"])
                        lease = run(server, provision=fails if chance < 0.3 else again)
                        held[lease["id"]] = lease
                    elif held and chance < 0.9:
                        server.release(held.pop(draw.choice(sorted(held))))
                    else:
                        reply = server.ask(resources={"gpus": 1}, lease={"ttl_seconds": 1})
                        assert reply["success"] or reply["error"]["code"] == "no_capacity"
            kill(server)
    with serving(data) as server:
        for lease in held.values():
            if (starts / lease["id"]).exists():
                until(lambda lease=lease: server.status(lease)["workload"]["attempt"] == 3)
            server.in_state(lease, "active")
        until(lambda: not server.held(state="ending") and not server.held(state="starting"))
        server.say({"op": "flush"})
        until(lambda: not server.held(state="warm") and not server.held(state="ending"))
        # Including leases whose answer was lost with a daemon: each has one process in the end.
        until(
            lambda: (
                [len(pids) for pids in workload_processes(data).values()]
                == [1] * len(server.held(state="active"))
            )
        )
    assert list(starts.iterdir())
    for each in starts.iterdir():
        fencings = each.read_text().split()
        assert len(fencings) == len(set(fencings)) <= 3, "a grant is started once"
