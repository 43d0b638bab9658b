"""Several servers on one PostgreSQL: one leads, the others stand by and take over."""

import contextlib
import json
import os
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from served import Server, ask_message, cluster, kill, moored, policy, until
from websockets.exceptions import ConnectionClosed

from moorage.testing.daemon_process import Running, child, serve_command, serve_variables

pytestmark = [pytest.mark.heavy, pytest.mark.postgres]

HOUR = {"ttl_seconds": 3_600}


class One(NamedTuple):
    """One of several servers."""

    server: Server
    process: "subprocess.Popen[str]"
    ready: dict


@contextlib.contextmanager
def one(folder: Path, storage: str, **variables: str) -> Iterator[One]:
    """Run a server that may end as it likes."""
    log = folder.with_suffix(".log")
    environment = {**serve_variables(), "MOORAGE_STORAGE": storage, **variables}
    with child(serve_command(folder), log, environment) as (process, ready):
        server = Server(Running(ready["ws"], ready["http"], process.pid, log))
        try:
            yield One(server, process, ready)
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
            server.close()


@pytest.fixture
def storage(postgres) -> str:
    return postgres.database()


@pytest.fixture
def pair(storage: str, tmp_path: Path) -> Iterator[tuple[One, One]]:
    """The server that leads, with a fleet and a policy, and one that stands by."""
    with one(tmp_path / "a", storage) as first:
        first.server.fill(cluster("east", nodes=2, gpus=8))
        with one(tmp_path / "b", storage) as second:
            yield first, second


def grant(server: Server, **lease) -> dict:
    answer = server.ask(resources={"gpus": 1}, lease={**HOUR, **lease})
    assert answer["success"], answer
    return answer["lease"]


def leads(server: Server) -> bool:
    """Tell whether a server leads; one that just begins to closes the sockets it had."""
    return server.http.get("/readyz").status_code == 200


def ended(process: "subprocess.Popen[str]") -> int:
    return process.wait(60)


def test_a_standby_says_who_leads(pair: tuple[One, One]):
    (first, _, ready), (second, _, standing) = pair
    assert "role" not in ready
    assert standing["role"] == "standby"
    reply = second.ask(resources={"gpus": 1}, lease=HOUR)
    expected = {"leader": ready["ws"], "leader_http": ready["http"]}
    assert not reply["success"]
    assert reply["error"] | expected | {"code": "not_leader"} == reply["error"]
    refused = second.http.post("/policy", json={})
    assert refused.status_code == 421
    assert refused.json()["error"] | expected | {"code": "not_leader"} == refused.json()["error"]
    assert second.http.get("/healthz").status_code == 200
    readiness = second.http.get("/readyz")
    assert readiness.status_code == 503
    details = readiness.json()["details"]
    assert details | {"role": "standby", **expected} == details
    assert 'moorage_server_role{role="standby"} 1.0' in second.http.get("/metrics").text
    assert 'moorage_server_role{role="writer"} 1.0' in first.http.get("/metrics").text


def test_a_standby_takes_over_after_a_kill(pair: tuple[One, One]):
    (first, killed, _), (second, *_) = pair
    held = [grant(first, idempotency_key=f"k{number}") for number in range(5)]
    with second.socket() as idle:
        os.kill(killed.pid, signal.SIGKILL)
        until(lambda: leads(second))
        with pytest.raises(ConnectionClosed) as closed:
            idle.recv(10)
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1012
    there = second.held()
    assert {each["id"]: each["fencing"] for each in held} == {
        each["id"]: each["fencing"] for each in there
    }
    assert grant(second, idempotency_key="k3")["id"] == held[3]["id"]
    assert grant(second)["fencing"] > max(each["fencing"] for each in held)
    assert second.release(held[0])["success"]
    assert 'moorage_server_role{role="writer"} 1.0' in second.http.get("/metrics").text


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_the_audit_log_goes_on_over_a_takeover(
    pair: tuple[One, One], storage: str, tmp_path: Path, number: signal.Signals
):
    (first, process, _), (second, *_) = pair
    held = grant(first)
    granted = [held["id"], *(grant(first)["id"] for _ in range(4))]
    os.kill(process.pid, number)
    until(lambda: leads(second))
    granted += [grant(second)["id"] for _ in range(3)]
    if number == signal.SIGSTOP:
        os.kill(process.pid, signal.SIGCONT)
        assert ended(process) == 75
    assert second.release(held)["success"]
    second.publish(policy("return None", "mine:1.0-stable"))
    kill(second)
    with one(tmp_path / "c", storage):
        pass
    listed = moored("audit", "--json", MOORAGE_STORAGE=storage).stdout.splitlines()
    entries = [json.loads(line) for line in listed]
    whats = Counter(each["what"] for each in entries)
    noted = [each["about"]["lease"] for each in entries if each["what"] == "lease.granted"]
    assert sorted(noted) == sorted(granted)
    assert whats["lease.ended"] == 1
    assert whats["server.started"] == 3
    assert whats["POST /policy"] >= 1
    verified = moored("audit", "verify", MOORAGE_STORAGE=storage)
    assert f"entries 1 to {len(entries)} are as written" in verified.stdout, verified.stderr
    made = moored(
        "token", "create", "ci", "--role", "client", "--tenant", "ann", MOORAGE_STORAGE=storage
    )
    assert made.returncode == 0, made.stderr
    last = moored("audit", "--what", "token.*", MOORAGE_STORAGE=storage).stdout
    assert "token.created" in last


def test_a_frozen_server_answers_and_stores_nothing_afterwards(pair: tuple[One, One], postgres):
    (first, frozen, _), (second, *_) = pair
    held = grant(first)
    with first.socket() as asking, first.socket() as reading:
        os.kill(frozen.pid, signal.SIGSTOP)
        asking.send(json.dumps(ask_message(resources={"gpus": 1}, lease=HOUR)))
        reading.send(json.dumps({"op": "leases"}))
        until(lambda: leads(second))
        new = grant(second)
        assert new["fencing"] > held["fencing"]
        os.kill(frozen.pid, signal.SIGCONT)
        for each in (asking, reading):
            with pytest.raises(ConnectionClosed):
                each.recv(30)
    assert ended(frozen) == 75
    assert "another server leads" in first.log()
    assert {each["id"] for each in second.held()} == {held["id"], new["id"]}


def test_a_server_that_stops_hands_over(pair: tuple[One, One], storage: str, postgres):
    (first, stopped, _), (second, *_) = pair
    held = grant(first)
    until(lambda: json.loads(moored("lead", "--json", MOORAGE_STORAGE=storage).stdout)["standbys"])
    with first.socket() as idle:
        stopped.send_signal(signal.SIGTERM)
        with pytest.raises(ConnectionClosed) as closed:
            idle.recv(10)
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1012
    until(lambda: leads(second))
    assert ended(stopped) == 0
    assert [each["id"] for each in second.held()] == [held["id"]]
    assert grant(second)["fencing"] > held["fencing"]
    # It left the one that stood by little to read.
    database = storage.rpartition("/")[2]
    assert postgres.execute("SELECT count(*) FROM moorage.checkpoint", database) == [(1,)]


def test_an_operator_has_another_server_lead(pair: tuple[One, One], storage: str):
    (first, resigned, ready), (second, _, standing) = pair
    shown = json.loads(moored("lead", "--json", MOORAGE_STORAGE=storage).stdout)
    assert (shown["leader"]["ws"], shown["leader"]["epoch"]) == (ready["ws"], 1)
    assert [each["ws"] for each in shown["standbys"]] == [standing["ws"]]
    told = moored("lead", "--resign", MOORAGE_STORAGE=storage)
    assert (told.returncode, "and resigns" in told.stdout) == (0, True)
    assert ended(resigned) == 75
    assert "resigned" in first.log()
    until(lambda: leads(second))
    assert f"{standing['ws']} " in moored("lead", MOORAGE_STORAGE=storage).stdout
    alone = moored("lead", "--resign", MOORAGE_STORAGE=storage)
    assert (alone.returncode, "no server stands by" in alone.stderr) == (1, True)


def test_a_standby_stops_at_once(pair: tuple[One, One], storage: str):
    (first, *_), (_, standing, _) = pair
    standing.send_signal(signal.SIGTERM)
    assert ended(standing) == 0
    assert json.loads(moored("lead", "--json", MOORAGE_STORAGE=storage).stdout)["standbys"] == []
    grant(first)
