"""What is kept warm after its release: taken over, evicted, found again after a crash."""

import contextlib
import json
import os
import platform
import random
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from served import Server, ask_message, cluster, until
from test_backends import dead, killed, marked, status

from moorage.testing.daemon_process import daemon
from moorage_client import BlockingClient
from moorage_policies import catalog

pytestmark = pytest.mark.heavy  # Many daemons.

SLEEP = ["sleep", "100000"]
STUBBORN = ["sh", "-c", "trap '' TERM; exec sleep 100000"]


def here(gpus: int = 2) -> dict:
    document = cluster("here", nodes=1, gpus=gpus)
    document["nodes"]["nodeData"][0]["id"] = platform.node()
    return document


def fill(server: Server, gpus: int = 2) -> None:
    server.register(here(gpus))
    server.publish(catalog.document("first_fit"))


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
    server.started.append(reply["lease"])  # type: ignore[attr-defined]  # As in `data_of`.
    return reply["lease"]


def in_state(server: Server, lease: dict, state: str) -> dict:
    until(lambda: status(server, lease)["state"] == state)
    return status(server, lease)


def release(server: Server, lease: dict) -> dict:
    reply = server.say({"op": "release", "lease": lease["id"], "token": lease["token"]})[0]
    assert reply["success"], reply
    return reply["lease"]


def warm(server: Server, **more) -> tuple[dict, int]:
    """Start something and release it; return its lease, warm, and its process."""
    lease = run(server, **more)
    in_state(server, lease, "active")
    (pid,) = marked(data_of(server))[lease["id"]]
    release(server, lease)
    in_state(server, lease, "warm")
    return lease, pid


def data_of(server: Server) -> Path:
    return server.data  # type: ignore[attr-defined]  # Set by `serving`.


def kill(server: Server) -> None:
    os.kill(server.running.pid, signal.SIGKILL)
    dead(server.running.pid)
    server.close()


@contextlib.contextmanager
def serving(data: Path, *, to_be_killed: bool = False, **settings) -> Iterator[Server]:
    with (killed if to_be_killed else daemon)(data, **settings) as running:
        server = Server(running)
        server.data = data  # type: ignore[attr-defined]  # What `marked` looks for.
        server.started = []  # type: ignore[attr-defined]  # What the next test must not find.
        yield server
        server.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("data")) as server:
        fill(server)
        yield server
        assert server.running.log.read_text() == "", "the daemon had something to complain about"


@pytest.fixture(autouse=True)
def _nothing_warm(request) -> Iterator[None]:
    """End what a test leaves behind on the shared daemon."""
    yield
    if "server" in request.fixturenames:
        server = request.getfixturevalue("server")
        for lease in server.started:
            release(server, lease)
        server.started.clear()
        until(lambda: not any(leases(server, state=each) for each in ("active", "ending")))
        server.say({"op": "flush"})
        until(lambda: not leases(server))


def leases(server: Server, **filters) -> list[dict]:
    return server.say({"op": "leases", **filters})[0]["data"]["leases"]


def metric(server: Server, name: str) -> float:
    lines = server.http.get("/metrics").text.splitlines()
    return float(next(line.split()[1] for line in lines if line.startswith(f"{name} ")))


def test_the_next_request_like_it_takes_the_same_process_over(server):
    first, pid = warm(server)
    assert metric(server, "moorage_leases_warm") == 1
    assert metric(server, "moorage_gpu_milli_warm") == 1000
    assert [each["id"] for each in leases(server, state="warm")] == [first["id"]]
    second = run(server)
    assert second["workload"]["warm"]
    assert second["placement"] == first["placement"]
    assert second["fencing"] > first["fencing"]
    in_state(server, second, "active")
    assert marked(server.data) == {first["id"]: {pid}}, "the same process, and no other"
    ended = status(server, first)
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
    release(server, second)
    in_state(server, second, "warm")


def test_who_takes_it_over_is_answered_before_the_news_that_it_is_ready(server):
    """Although both are one commit: the workload is looked at while that is written."""
    warm(server)
    with server.socket() as watching:
        watching.send(json.dumps({"op": "watch", "topics": ["leases"], "id": "watch"}))
        terms = {"lease": {"ttl_seconds": 60}, "resources": {"gpus": 1}, "provision": provision()}
        watching.send(json.dumps({**ask_message(**terms), "id": "ask"}))
        said = []
        while not said or said[-1].get("event") != "started":
            said.append(json.loads(watching.recv(30)))
    lease = next(each["lease"] for each in said if each.get("id") == "ask")
    server.started.append(lease)
    assert lease["workload"]["warm"]
    about = [each.get("event") or each["id"] for each in said]
    assert about.index("ask") < about.index("granted") < about.index("started")
    assert said[-1]["data"]["id"] == lease["id"]


def test_what_says_the_same_in_other_words_is_like_it(server):
    first, pid = warm(server, provision=provision(stop_seconds=10.0, mem_limit="2g"))
    for words in (
        {"category": "process"},
        {"workdir": None, "max_global_num": None, "reset_command": None, "extra": {}},
        {"stop_seconds": 10, "environment": {}},
    ):
        again = run(
            server, provision=provision(**{"stop_seconds": 10, "mem_limit": 2**31, **words})
        )
        assert again["workload"]["warm"], words
        in_state(server, again, "active")
        release(server, again)
        in_state(server, again, "warm")
    assert marked(server.data) == {first["id"]: {pid}}
    other = run(server, provision=provision(["sleep", "200000"]))
    assert "warm" not in other["workload"]
    in_state(server, other, "active")
    assert marked(server.data).keys() == {first["id"], other["id"]}


def test_why_something_was_not_kept_warm_is_told_to_all_who_ask(server):
    given = provision(reset_command=["sh", "-c", "echo no such table >&2; exit 3"])
    lease = run(server, provision=given)
    in_state(server, lease, "active")
    with server.socket() as watching:
        watching.send(json.dumps({"op": "watch", "topics": ["leases"], "id": 1}))
        assert json.loads(watching.recv(30))["success"]
        release(server, lease)
        news = {"event": ""}
        while news["event"] != "ended":
            news = json.loads(watching.recv(30))
    assert "not kept warm: its reset ended with 3: no such table" in news["data"]["reason"]
    assert status(server, lease)["reason"] == news["data"]["reason"]
    why = server.say({"op": "why", "lease": lease["id"]})[0]["data"]
    assert "no such table" in json.dumps(why)


def test_a_reset_that_hangs_holds_up_no_other(server):
    """Who needs its place has it at once; so does a flush."""
    hangs = provision(reset_command=["sleep", "1000"])
    first = run(server, gpus=2, provision=hangs)
    in_state(server, first, "active")
    release(server, first)
    assert status(server, first)["state"] == "ending"
    other = run(server, gpus=1, provision=None)
    ended = in_state(server, first, "ended")
    assert ended["reason"].startswith("evicted"), "not that its reset took too long"
    release(server, other)
    second = run(server, provision=hangs)
    in_state(server, second, "active")
    release(server, second)
    assert server.say({"op": "flush"})[0]["data"] == {"flushed": [second["id"]]}
    assert in_state(server, second, "ended")["reason"] == "flushed"
    assert marked(server.data) == {}


def test_what_is_asked_for_while_it_is_reset_is_waited_for(server):
    given = provision(reset_command=["sleep", "0.5"])
    first = run(server, gpus=2, provision=given)
    in_state(server, first, "active")
    (pid,) = marked(server.data)[first["id"]]
    release(server, first)
    second = run(server, gpus=2, provision=given)
    assert second["workload"]["warm"]
    in_state(server, second, "active")
    assert marked(server.data) == {first["id"]: {pid}}


def test_who_watches_the_lease_that_took_over_hears_how_its_workload_stops(server):
    first, _ = warm(server)
    second = run(server)
    in_state(server, second, "active")
    release(server, second)
    in_state(server, second, "warm")
    with server.socket() as watching:
        watching.send(json.dumps({"op": "watch", "topics": ["leases"], "id": 1}))
        assert json.loads(watching.recv(30))["success"]
        server.say({"op": "flush"})
        news = [{"event": ""}]
        while news[-1]["event"] != "ended":
            news.append(json.loads(watching.recv(30)))
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
    endpoint = in_state(server, first, "active")["workload"]["endpoint"]
    pid = int((tmp_path / "pid").read_text())
    if when == "before its release":
        os.kill(pid, how)
        release(server, first)
        reason = in_state(server, first, "ended")["reason"]
        assert reason == "released; not kept warm: it runs, and does not answer any more"
    else:
        release(server, first)
        in_state(server, first, "warm")
        os.kill(pid, how)
    second = run(server, gpus=2, provision=given)
    active = in_state(server, second, "active")
    assert server.http.get(active["workload"]["endpoint"]).status_code == 200
    assert endpoint
    assert not Path(f"/proc/{pid}").exists()
    release(server, second)
    in_state(server, second, "warm")
    third = run(server, gpus=2, provision=given)
    assert third["workload"]["warm"], "one that answers is handed on"
    again = in_state(server, third, "active")["workload"]["endpoint"]
    assert again == active["workload"]["endpoint"]


def test_flush_ends_what_is_warm(server):
    lease, _ = warm(server)
    held = run(server, provision=provision(["sleep", "200000"]))
    in_state(server, held, "active")
    nothing = server.say({"op": "flush", "cluster": "there"})[0]
    assert nothing["data"] == {"flushed": []}
    assert "No live cluster “there”" in nothing["warnings"][0]
    with BlockingClient(server.running.ws) as client:
        assert client.flush("here") == [lease["id"]]
    in_state(server, lease, "ended")
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
    in_state(server, plain, "active")
    release(server, plain)
    in_state(server, plain, "ended")
    assert marked(server.data) == {}


def test_kill_9_loses_no_warm_lease_and_starts_nothing_twice(tmp_path):
    """One is warm, one was taken over, and one dies while the daemon is away."""
    commands = [["sleep", f"{number}00000"] for number in (1, 2, 3)]
    with serving(tmp_path, to_be_killed=True) as server:
        fill(server, gpus=3)
        (kept, kept_pid), (taken, taken_pid), (dies, dies_pid) = (
            warm(server, provision=provision(command)) for command in commands
        )
        holder = run(server, provision=provision(commands[1]))
        in_state(server, holder, "active")
        kill(server)
    os.kill(dies_pid, signal.SIGKILL)
    found = {kept["id"]: {kept_pid}, taken["id"]: {taken_pid}}
    until(lambda: marked(tmp_path) == found)
    with serving(tmp_path) as server:
        in_state(server, dies, "ended")
        assert status(server, kept)["state"] == "warm"
        assert status(server, holder)["state"] == "active"
        assert marked(tmp_path) == found, "nothing is started twice, or without a lease"
        again = run(server, provision=provision(commands[0]))
        assert again["workload"]["warm"]
        in_state(server, again, "active")
        assert marked(tmp_path) == found
        os.kill(taken_pid, signal.SIGKILL)
        assert "signal 9" in in_state(server, holder, "ended")["reason"]
        release(server, again)
        in_state(server, again, "warm")


def test_kill_9_in_the_middle_of_an_eviction(tmp_path):
    with serving(tmp_path, to_be_killed=True) as server:
        fill(server)
        first, pid = warm(server, provision=provision(STUBBORN, stop_seconds=3))
        second, _ = warm(server, provision=provision(["sleep", "200000"]))
        patient = ask_message(resources={"gpus": 1}, lease={"ttl_seconds": 60, "wait_seconds": 60})
        with server.socket() as socket:
            socket.send(json.dumps({**patient, "id": 1}))
            in_state(server, first, "ending")
            assert Path(f"/proc/{pid}").exists()
            kill(server)
    with serving(tmp_path) as server:
        in_state(server, first, "ended")
        assert not Path(f"/proc/{pid}").exists()
        until(lambda: leases(server, state="granted"))
        (granted,) = leases(server, state="granted")
        assert granted["placement"][0]["gpus"] == first["placement"][0]["gpus"]
        assert status(server, second)["state"] == "warm", "one was enough, before and after"


def test_random_kills_with_warm_ones_leave_no_orphan_and_start_nothing_twice(tmp_path):
    draw = random.Random(7)
    held: dict[str, dict] = {}
    for number in range(12):
        with serving(tmp_path, to_be_killed=True) as server:
            if not number:
                fill(server, gpus=4)
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
                        release(server, held.pop(draw.choice(sorted(held))))
                    else:
                        reply = server.ask(resources={"gpus": 1}, lease={"ttl_seconds": 1})
                        assert reply["success"] or reply["error"]["code"] == "no_capacity"
            kill(server)
    with serving(tmp_path) as server:
        for lease in held.values():
            in_state(server, lease, "active")
        until(lambda: not leases(server, state="ending") and not leases(server, state="starting"))
        server.say({"op": "flush"})
        until(lambda: not leases(server, state="warm") and not leases(server, state="ending"))
        for lease in leases(server):
            if lease["id"] not in held and lease["state"] == "active":
                held[lease["id"]] = lease  # Its answer was lost with the daemon.
        until(lambda: len(marked(tmp_path)) == len(leases(server, state="active")))
        assert all(len(pids) == 1 for pids in marked(tmp_path).values()), "nothing started twice"
