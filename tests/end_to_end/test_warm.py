"""What is kept warm after its release: taken over, evicted, found again after a crash."""

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
from served import Server, ask_message, heard, here, kill, killed, marked, serving, until

from moorage_client import BlockingClient

pytestmark = pytest.mark.heavy  # Many daemons.

SLEEP = ["sleep", "100000"]
STUBBORN = ["sh", "-c", "trap '' TERM; exec sleep 100000"]


def provision(command: list[str] = SLEEP, keep: float = 600, **spec) -> dict:
    return {
        "backend": "local",
        "spec": {"command": command, **spec},
        "keep_warm_seconds": keep,
    }


def run(server: Server, gpus: int = 1, ttl: float = 3_600, **more) -> dict:
    reply = server.ask(
        resources={"gpus": gpus}, lease={"ttl_seconds": ttl}, **{"provision": provision(), **more}
    )
    assert reply["success"], reply
    server.leases.append(reply["lease"])
    return reply["lease"]


def warm(server: Server, **more) -> tuple[dict, int]:
    """Start something and release it; return its lease, warm, and its process."""
    lease = run(server, **more)
    server.in_state(lease, "active")
    (pid,) = marked(server.data)[lease["id"]]
    server.release(lease)
    server.in_state(lease, "warm")
    return lease, pid


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("data")) as server:
        server.fill(here(2))
        yield server
        assert server.log() == "", "the daemon had something to complain about"


@pytest.fixture(autouse=True)
def _nothing_warm(request) -> Iterator[None]:
    """End what a test leaves behind on the shared daemon."""
    yield
    if "server" in request.fixturenames:
        server = request.getfixturevalue("server")
        for lease in server.leases:
            server.release(lease)
        until(lambda: not any(server.held(state=each) for each in ("active", "ending")))
        server.say({"op": "flush"})
        until(lambda: not server.held())


def test_the_next_request_like_it_takes_the_same_process_over(server):
    first, pid = warm(server)
    assert server.metric("moorage_leases_warm") == 1
    assert server.metric("moorage_gpu_milli_warm") == 1000
    assert [each["id"] for each in server.held(state="warm")] == [first["id"]]
    second = run(server)
    assert second["workload"]["warm"]
    assert second["placement"] == first["placement"]
    assert second["fencing"] > first["fencing"]
    server.in_state(second, "active")
    assert marked(server.data) == {first["id"]: {pid}}, "the same process, and no other"
    ended = server.status(first)
    assert (ended["state"], ended["reason"]) == (
        "ended",
        f"lease {second['id']} took its workload over",
    )
    for message in ({"op": "logs"}, {"op": "exec", "command": ["true"]}, {"op": "renew"}):
        token = {"lease": first["id"], "token": first["token"]}
        assert server.say({**message, **token})[0]["error"]["code"] == "lease_ended"
    done = {"op": "exec", "lease": second["id"], "token": second["token"]}
    reply = server.say({**done, "command": ["sh", "-c", "echo $MOORAGE_WORKLOAD"]})[0]
    assert reply["data"]["output"].strip().endswith(first["id"]), "it is in the same workload"
    server.release(second)
    server.in_state(second, "warm")


def test_who_takes_it_over_is_answered_before_the_news_that_it_is_ready(server):
    """Although both are one commit: the workload is looked at while that is written."""
    warm(server)
    with server.socket() as watching:
        watching.send(json.dumps({"op": "watch", "topics": ["leases"], "id": "watch"}))
        terms = {"lease": {"ttl_seconds": 60}, "resources": {"gpus": 1}, "provision": provision()}
        watching.send(json.dumps({**ask_message(**terms), "id": "ask"}))
        said = []
        while not said or said[-1].get("event") != "started":
            said.append(heard(watching))
    lease = next(each["lease"] for each in said if each.get("id") == "ask")
    server.leases.append(lease)
    assert lease["workload"]["warm"]
    about = [each.get("event") or each["id"] for each in said]
    assert about.index("ask") < about.index("granted") < about.index("started")
    assert said[-1]["data"]["id"] == lease["id"]


def test_why_something_was_not_kept_warm_is_told_to_all_who_ask(server):
    given = provision(reset_command=["sh", "-c", "echo no such table >&2; exit 3"])
    lease = run(server, provision=given)
    server.in_state(lease, "active")
    with server.watching("leases") as watching:
        server.release(lease)
        news = {"event": ""}
        while news["event"] != "ended":
            news = heard(watching)
    assert "not kept warm: its reset ended with 3: no such table" in news["data"]["reason"]
    assert server.status(lease)["reason"] == news["data"]["reason"]
    why = server.say({"op": "why", "lease": lease["id"]})[0]["data"]
    assert "no such table" in json.dumps(why)


def test_a_reset_that_hangs_holds_up_no_other(server):
    """Who needs its place has it at once; so does a flush."""
    hangs = provision(reset_command=["sleep", "1000"])
    first = run(server, gpus=2, provision=hangs)
    server.in_state(first, "active")
    server.release(first)
    assert server.status(first)["state"] == "ending"
    other = run(server, gpus=1, provision=None)
    ended = server.in_state(first, "ended")
    assert ended["reason"].startswith("evicted"), "not that its reset took too long"
    server.release(other)
    second = run(server, provision=hangs)
    server.in_state(second, "active")
    server.release(second)
    assert server.say({"op": "flush"})[0]["data"] == {"flushed": [second["id"]]}
    assert server.in_state(second, "ended")["reason"] == "flushed"
    assert marked(server.data) == {}


def test_what_is_asked_for_while_it_is_reset_is_waited_for(server):
    given = provision(reset_command=["sleep", "0.5"])
    first = run(server, gpus=2, provision=given)
    server.in_state(first, "active")
    (pid,) = marked(server.data)[first["id"]]
    server.release(first)
    second = run(server, gpus=2, provision=given)
    assert second["workload"]["warm"]
    server.in_state(second, "active")
    assert marked(server.data) == {first["id"]: {pid}}


def test_who_watches_the_lease_that_took_over_hears_how_its_workload_stops(server):
    first, _ = warm(server)
    second = run(server)
    server.in_state(second, "active")
    server.release(second)
    server.in_state(second, "warm")
    with server.watching("leases") as watching:
        server.say({"op": "flush"})
        news = [{"event": ""}]
        while news[-1]["event"] != "ended":
            news.append(heard(watching))
    told = [each["data"] for each in news if each["event"] == "workload"]
    assert [(each["id"], each["phase"]) for each in told] == [(second["id"], "stopped")]
    assert first["id"] != second["id"]


SERVE = "import http.server as h, os; "
SERVE += "h.test(h.SimpleHTTPRequestHandler, port=int(os.environ['PORT']), bind='127.0.0.1')"


@pytest.mark.parametrize(
    ("when", "how"),
    [("before its release", signal.SIGKILL), ("while it is warm", signal.SIGSTOP)],
)
def test_a_service_that_answers_no_more_is_not_handed_on(server, when, how, tmp_path):
    """Its shell lives on, so its end is not seen."""
    script = f"""{sys.executable} -c "{SERVE}" & echo $! > pid; wait; exec sleep 1000"""
    probe = {"path": "/", "timeout_seconds": 0.3}
    spec = {"category": "service", "readiness": probe, "workdir": str(tmp_path)}
    given = provision(["sh", "-c", script], stop_seconds=0, **spec)
    first = run(server, gpus=2, provision=given)
    endpoint = server.in_state(first, "active")["workload"]["endpoint"]
    pid = int((tmp_path / "pid").read_text())
    if when == "before its release":
        os.kill(pid, how)
        server.release(first)
        reason = server.in_state(first, "ended")["reason"]
        assert reason == "released; not kept warm: it runs, and does not answer any more"
    else:
        server.release(first)
        server.in_state(first, "warm")
        os.kill(pid, how)
    second = run(server, gpus=2, provision=given)
    active = server.in_state(second, "active")
    assert server.http.get(active["workload"]["endpoint"]).status_code == 200
    assert endpoint
    assert not Path(f"/proc/{pid}").exists()
    server.release(second)
    server.in_state(second, "warm")
    third = run(server, gpus=2, provision=given)
    assert third["workload"]["warm"], "one that answers is handed on"
    again = server.in_state(third, "active")["workload"]["endpoint"]
    assert again == active["workload"]["endpoint"]


def test_flush_ends_what_is_warm(server):
    lease, _ = warm(server)
    held = run(server, provision=provision(["sleep", "200000"]))
    server.in_state(held, "active")
    nothing = server.say({"op": "flush", "cluster": "there"})[0]
    assert nothing["data"] == {"flushed": []}
    assert "No live cluster “there”" in nothing["warnings"][0]
    with BlockingClient(server.running.ws) as client:
        assert client.flush("here") == [lease["id"]]
    server.in_state(lease, "ended")
    until(lambda: marked(server.data).keys() == {held["id"]})
    said = server.moorage("flush")
    assert "0 ended" in said.stdout + said.stderr
    missed = server.moorage("flush", "--cluster", "hre")
    assert (missed.returncode, "did you mean here?" in missed.stderr) == (5, True)


def test_the_longest_time_is_a_setting_and_nothing_is_kept_by_default(server):
    reply = server.ask(
        resources={"gpus": 1}, lease={"ttl_seconds": 60}, provision=provision(keep=3_601)
    )
    assert reply["error"]["field"] == "provision.keep_warm_seconds"
    assert reply["error"]["expected"] == "at most 3600"
    plain = run(server, provision={"backend": "local", "spec": {"command": SLEEP}})
    server.in_state(plain, "active")
    server.release(plain)
    server.in_state(plain, "ended")
    assert marked(server.data) == {}


def test_kill_9_loses_no_warm_lease_and_starts_nothing_twice(tmp_path):
    """One is warm, one was taken over, and one dies while the daemon is away."""
    commands = [["sleep", f"{number}00000"] for number in (1, 2, 3)]
    with killed(tmp_path) as server:
        server.fill(here(3))
        (kept, kept_pid), (taken, taken_pid), (dies, dies_pid) = (
            warm(server, provision=provision(command)) for command in commands
        )
        holder = run(server, provision=provision(commands[1]))
        server.in_state(holder, "active")
        kill(server)
    os.kill(dies_pid, signal.SIGKILL)
    found = {kept["id"]: {kept_pid}, taken["id"]: {taken_pid}}
    until(lambda: marked(tmp_path) == found)
    with serving(tmp_path) as server:
        server.in_state(dies, "ended")
        assert server.status(kept)["state"] == "warm"
        assert server.status(holder)["state"] == "active"
        assert marked(tmp_path) == found, "nothing is started twice, or without a lease"
        again = run(server, provision=provision(commands[0]))
        assert again["workload"]["warm"]
        server.in_state(again, "active")
        assert marked(tmp_path) == found
        os.kill(taken_pid, signal.SIGKILL)
        assert "signal 9" in server.in_state(holder, "ended")["reason"]
        server.release(again)
        server.in_state(again, "warm")


def test_kill_9_in_the_middle_of_an_eviction(tmp_path):
    with killed(tmp_path) as server:
        server.fill(here(2))
        first, pid = warm(server, provision=provision(STUBBORN, stop_seconds=3))
        second, _ = warm(server, provision=provision(["sleep", "200000"]))
        patient = ask_message(resources={"gpus": 1}, lease={"ttl_seconds": 60, "wait_seconds": 60})
        with server.socket() as socket:
            socket.send(json.dumps({**patient, "id": 1}))
            server.in_state(first, "ending")
            assert Path(f"/proc/{pid}").exists()
            kill(server)
    with serving(tmp_path) as server:
        server.in_state(first, "ended")
        assert not Path(f"/proc/{pid}").exists()
        until(lambda: server.held(state="granted"))
        (granted,) = server.held(state="granted")
        assert granted["placement"][0]["gpus"] == first["placement"][0]["gpus"]
        assert server.status(second)["state"] == "warm", "one was enough, before and after"


def test_random_kills_with_warm_ones_leave_no_orphan_and_start_nothing_twice(tmp_path):
    draw = random.Random(7)
    held: dict[str, dict] = {}
    for number in range(12):
        with killed(tmp_path) as server:
            if not number:
                server.fill(here(4))
            stop_at = time.monotonic() + draw.random()
            with contextlib.suppress(Exception):  # The daemon may be killed in any call.
                while time.monotonic() < stop_at:
                    chance = draw.random()
                    if len(held) < 3 and chance < 0.6:
                        lease = run(
                            server, provision=provision(["sleep", f"{draw.randint(1, 2)}00000"])
                        )
                        held[lease["id"]] = lease
                    elif held and chance < 0.9:
                        server.release(held.pop(draw.choice(sorted(held))))
                    else:
                        reply = server.ask(resources={"gpus": 1}, lease={"ttl_seconds": 1})
                        assert reply["success"] or reply["error"]["code"] == "no_capacity"
            kill(server)
    with serving(tmp_path) as server:
        for lease in held.values():
            server.in_state(lease, "active")
        until(lambda: not server.held(state="ending") and not server.held(state="starting"))
        server.say({"op": "flush"})
        until(lambda: not server.held(state="warm") and not server.held(state="ending"))
        for lease in server.held():
            if lease["id"] not in held and lease["state"] == "active":
                held[lease["id"]] = lease  # Its answer was lost with the daemon.
        until(lambda: len(marked(tmp_path)) == len(server.held(state="active")))
        assert all(len(pids) == 1 for pids in marked(tmp_path).values()), "nothing started twice"
