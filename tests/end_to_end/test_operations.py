"""Tests of a success of each operation, from socket to ledger; `tests/core` has the rest."""

import json
import os
import platform
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from served import (
    FIRST_FIT,
    MOORAGE,
    Server,
    ask_message,
    cluster,
    here,
    read_message,
    serving,
    until,
    workload_processes,
)

from moorage_client import BlockingClient, LeaseLost, NotFound, RequestRefused

pytestmark = pytest.mark.heavy

SETTINGS = {
    "MOORAGE_TOKENS": "ann:a1,bob:b1,ops:o1",
    "MOORAGE_OPERATORS": "ops",
    "MOORAGE_BACKENDS": "local",
    "MOORAGE_REQUEUE_PAUSE_SECONDS": "0.02",
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A daemon of three tenants, as its operator sees it; each test uses its own GPU model."""
    data = tmp_path_factory.mktemp("data")
    with serving(data, environment=SETTINGS, bearer="o1") as server:
        server.fill(
            here(2, model="T4"),
            cluster("drained", nodes=2, gpus=1, model="A10"),
            cluster("reserved", nodes=1, gpus=8, model="B200"),
            cluster("pair", nodes=2, gpus=4, model="L40"),
        )
        yield server
        assert server.log() == ""


def ask(server: Server, model: str, ttl: float = 60.0, **resources: object) -> dict:
    resources = {"gpus": 1, "models": [model], **resources}
    return server.ask(resources=resources, lease={"ttl_seconds": ttl})


def test_a_drain_empties_a_node_while_other_nodes_serve(server: Server) -> None:
    with BlockingClient(server.running.ws, "o1") as client, server.watching("fleet") as watching:
        held = ask(server, "A10", 600)["lease"]
        node = held["placement"][0]["node_id"]
        drained = client.drain("drained", node, "new fans", seconds=300)
        news = read_message(watching)
        assert drained["leases"] == [held["id"]]
        assert (news["event"], news["data"]["node_id"]) == ("draining", node)
        (row,) = [each for each in client.fleet("drained") if each["node_id"] == node]
        assert "new fans" in row["unavailable"]
        assert client.status(held["id"])["expires_at"] <= held["expires_at"] - 250
        other = ask(server, "A10")["lease"]
        server.release(held)
        assert not ask(server, "A10")["success"], "a drained node gets no new lease"
        assert client.uncordon("drained", node)["unavailable"] is None
        again = ask(server, "A10")["lease"]
        with pytest.raises(NotFound):
            client.cordon("drained", "no-such-node")
        for lease in (other, again):
            server.release(lease)


def test_only_the_tenant_of_a_reservation_gets_the_reserved_nodes(server: Server) -> None:
    now, url = time.time(), server.running.ws
    two, seven = ({"resources": {"gpus": gpus, "models": ["B200"]}} for gpus in (2, 7))
    reserve = {"op": "reserve", **two, "starts_at": now, "ends_at": now + 3600, "tenant": "bob"}
    with (
        BlockingClient(url, "a1") as ann,
        BlockingClient(url, "b1") as bob,
        BlockingClient(url, "o1") as ops,
    ):
        with pytest.raises(RequestRefused) as caught:
            bob.call(reserve)
        assert caught.value.code == "unauthorized"
        held = ops.call(reserve)
        (node,) = held["nodes"]
        assert (node["node_id"], node["gpus"], node["whole"]) == ("reserved-0", ["0", "1"], False)
        assert bob.call({"op": "reservations"})["reservations"] == [held]
        assert ann.call({"op": "reservations"})["reservations"] == []
        with pytest.raises(RequestRefused) as caught:
            ann.ask(FIRST_FIT, **seven, lease={"ttl_seconds": 1})
        assert caught.value.details["reserved_in_advance"] == 1
        mine = bob.ask(FIRST_FIT, **seven, lease={"ttl_seconds": 60}).lease
        bob.release(mine.id, mine.token)
        ops.call({"op": "unreserve", "reservation": held["reservation"]})


def test_leases_of_other_tenants_end_before_a_reservation_starts(server: Server) -> None:
    def hold(ann: BlockingClient, ops: BlockingClient) -> None:
        eight = {"resources": {"gpus": 8, "models": ["B200"]}}
        with ann.lease(FIRST_FIT, **eight, ttl_seconds=1.5) as held:
            times = {"starts_at": held.expires_at + 0.5, "ends_at": held.expires_at + 2.0}
            ops.call({"op": "reserve", **eight, **times, "tenant": "bob"})
            assert held.wait_lost(60)
            assert held.expires_at == times["starts_at"]

    url = server.running.ws
    with (
        BlockingClient(url, "a1") as ann,
        BlockingClient(url, "o1") as ops,
        pytest.raises(LeaseLost, match="reserved for other tenants"),
    ):
        hold(ann, ops)


def test_the_command_line_makes_and_ends_reservations(server: Server) -> None:
    def run(*words: str, code: int = 0) -> str:
        model = ("--model", "A10") if words[0] == "add" else ()
        done = server.moorage("reservation", *words, *model, TZ="UTC")
        assert done.returncode == code, done.stderr
        return done.stdout + done.stderr

    until(lambda: "No node is reserved" in run("list"))  # The previous test's one ends by itself.
    times = ["--from", "2036-01-31T08:00Z", "--to", "2036-01-31T10:00+01:00"]
    name, _, rest = run("add", *times, "--tenant", "bob", "--lapse", "600").partition("  ")
    span = "2036-01-31 08:00:00+00:00 to 2036-01-31 09:00:00+00:00"
    assert rest == f"bob: drained/drained-0[0], {span}\n"
    assert name in run("list")
    (row,) = json.loads(run("list", "--json"))
    assert (row["tenant"], row["lapse_seconds"]) == ("bob", 600.0)
    assert "never" in run("add", *times, "--gpus", "9", code=3)
    wrong = run("add", "--from", "tomorrow", "--to", "+1h", code=2)
    assert "--from: expected 2027-01-31T08:00" in wrong
    dry = run("add", "--from", "+2d", "--to", "+3d", "--dry-run")
    assert dry.startswith("not reserved  ops: drained/drained-0[0], ")
    assert len(json.loads(run("list", "--json"))) == 1
    assert "bob: drained/drained-0[0]" in run("cancel", name)
    assert "No node is reserved" in run("list")


def test_alternatives_work_over_socket_http_and_command_line(
    server: Server, tmp_path: Path
) -> None:
    def elastic(*sizes: int) -> dict:
        first, *others = ({"gpus": number, "models": ["L40"]} for number in sizes)
        lease = {"ttl_seconds": 60}
        return ask_message(resources=first, alternatives=others, lease=lease)

    first = server.say(elastic(8, 4, 3))[0]["lease"]
    words = ["ask", FIRST_FIT, "--lease", "--gpus", "8", "--model", "L40"]
    state = {"MOORAGE_STATE": str(tmp_path / "leases.json")}
    done = server.moorage(*words, "--or", '{"gpus": 3, "models": ["L40"]}', **state)
    assert "pair/pair-1 gpus 0,1,2" in done.stdout, done.stderr
    assert "alternative 1 of --or" in done.stderr
    wrong = server.moorage(*words, "--or", "4", **state)
    assert (wrong.returncode, "--or: expected a JSON object" in wrong.stderr) == (2, True)
    second = server.http.post("/allocate", json=elastic(8, 4, 1)).json()["lease"]
    assert (first["choice"], second["choice"]) == (1, 2)
    error = server.say(elastic(8, 4, 3))[0]["error"]
    assert error["reason"].startswith("None of 3 alternatives will do: It does not fit now")
    for lease in (first, second):
        assert server.status(lease)["choice"] == lease["choice"]
        server.release(lease)


WAITS = {"ttl_seconds": 3600, "wait_seconds": 300, "priority": 5}
TWO = {"gpus": 2, "models": ["T4"]}


def news_of(watching, lease: dict, last: str) -> list[dict]:
    """Return the news about a lease up to a given event."""
    news: list[dict] = []
    while not news or news[-1]["event"] != last:
        said = read_message(watching)
        if said.get("data", {}).get("id") == lease["id"] and said["event"] != "workload":
            news.append(said)
    return news


def test_a_preempted_lease_gets_notice_and_stops_and_starts_again(server: Server) -> None:
    spec = {"command": ["sh", "-c", 'echo "$$ runs"; exec sleep 1000']}
    victim = server.ask(
        resources=TWO,
        lease={"ttl_seconds": 3600, "preemptible": True, "notice_seconds": 0.5},
        provision={"backend": "local", "spec": spec, "on_failure": "requeue"},
    )["lease"]
    server.in_state(victim, "active")
    (first,) = workload_processes(server.data).values()
    with server.watching("leases") as watching:
        winner = server.ask(resources=TWO, lease=WAITS)["lease"]
        news = news_of(watching, victim, "requeued")
        assert news[0]["event"] == "preempted", "the notice comes before the end"
        notice = news[0]["data"]
        assert notice["by"] == winner["id"]
        assert news[1]["data"]["at"] >= notice["until"] > notice["at"], "it runs until then"
        why = f"preempted by request {winner['id']} of tenant ops, of priority 5"
        assert notice["reason"] == why
        assert why in news[-1]["data"]["reason"]
        assert server.status(victim)["state"] == "queued"
        until(lambda: not workload_processes(server.data))  # The processes have ended, too.
        server.release(winner)
        news_of(watching, victim, "started")
    again = server.in_state(victim, "active")
    assert again["workload"]["attempt"] == 2
    assert again["fencing"] > winner["fencing"]
    (second,) = workload_processes(server.data).values()
    assert not first & second
    server.release(victim)
    server.in_state(victim, "ended")


def test_a_failed_workload_starts_again_and_watchers_get_news_of_the_failure(
    server: Server, tmp_path: Path
) -> None:
    """The command fails the first time; a file records the attempts."""
    once = 'test -e "$0" && exec sleep 1000; touch "$0"; echo no such model; exit 7'
    spec = {"command": ["sh", "-c", once, str(tmp_path / "once")]}
    again = {"on_failure": "requeue", "attempts_max": 3}
    with server.watching("leases") as watching:
        lease = server.ask(
            resources=TWO,
            lease={"ttl_seconds": 3600},
            provision={"backend": "local", "spec": spec, **again},
        )["lease"]
        assert (lease["workload"]["attempt"], lease["workload"]["attempts_max"]) == (1, 3)
        news = news_of(watching, lease, "requeued") + news_of(watching, lease, "started")
    names = [each["event"] for each in news]
    tried = ["finished", "requeued", "paused", "resumed", "granted", "started"]
    assert names[: -len(tried)] in (["granted"], ["granted", "started"])  # It ends at once.
    assert names[-len(tried) :] == tried
    data = {each["event"]: each["data"] for each in news}
    finished, requeued = data["finished"]["outcome"], data["requeued"]
    assert requeued["state"] == "queued"
    assert "attempt 1 of 3 failed: it ended by itself with exit status 7" in requeued["reason"]
    assert (finished["log_tail"], finished["exit_code"]) == (["no such model"], 7)
    assert finished["nodes"] == [{"cluster_id": "here", "node_id": platform.node()}]
    held = server.status(lease)
    assert held["fencing"] > lease["fencing"]
    assert (held["state"], held["workload"]["phase"]) == ("active", "ready")
    assert (held["workload"]["attempt"], held["workload"]["outcome"]["attempt"]) == (2, 1)
    renewal = {"op": "renew", "lease": lease["id"], "token": lease["token"]}
    assert server.say(renewal)[0]["lease"]["workload"]["attempt"] == 2
    server.release(lease)
    assert server.in_state(lease, "ended")["workload"]["phase"] == "stopped"


def test_moorage_run_names_the_tenant_whose_request_preempted_the_lease(
    server: Server, tmp_path: Path
) -> None:
    urls = {"MOORAGE_URL": server.running.ws, "MOORAGE_TOKEN": "o1"}
    variables = {**os.environ, **urls, "MOORAGE_STATE": str(tmp_path / "leases.json")}
    words = ["run", "--policy", FIRST_FIT, "-g", "2", "--model", "T4", "--preemptible"]
    running = subprocess.Popen(
        [MOORAGE, *words, "--", "sleep", "1000"], env=variables, stderr=subprocess.PIPE, text=True
    )
    try:
        until(lambda: server.held(cluster="here"))
        winner = server.ask(resources=TWO, lease=WAITS)["lease"]
        _, complaint = running.communicate(timeout=60)
    finally:
        running.kill()
        running.wait()
    assert running.returncode not in {0, -9}
    assert re.search(f"preempted by request {winner['id']}", complaint), complaint
    server.release(winner)
    wrong = server.moorage("ask", FIRST_FIT, "--ttl", "9", "--notice", "3")
    assert (wrong.returncode, "needs --preemptible" in wrong.stderr) == (2, True)
