"""Of several servers on one PostgreSQL, one leads, and the others stand by and take over."""

import contextlib
import json
import os
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from served import Server, ask_message, cluster, invoke, kill, policy, until
from websockets.exceptions import ConnectionClosed

from moorage.testing.daemon_process import Running, child, serve_command, serve_variables

pytestmark = [pytest.mark.heavy, pytest.mark.postgres]

HOUR = {"ttl_seconds": 3_600}


class One(NamedTuple):
    """One of several servers on the same database."""

    server: Server
    process: "subprocess.Popen[str]"
    ready: dict


@contextlib.contextmanager
def one(folder: Path, storage: str, **variables: str) -> Iterator[One]:
    """Run a server that may end with any exit code."""
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


@contextlib.contextmanager
def two(folder: Path, storage: str, **variables: str) -> Iterator[tuple[One, One]]:
    """Run a leading server, with a fleet and a policy, and a standby."""
    with one(folder / "a", storage, **variables) as first:
        first.server.fill(cluster("east", nodes=2, gpus=8))
        with one(folder / "b", storage, **variables) as second:
            yield first, second


@pytest.fixture
def storage(postgres) -> str:
    return postgres.database()


@pytest.fixture
def pair(storage: str, tmp_path: Path) -> Iterator[tuple[One, One]]:
    with two(tmp_path, storage) as servers:
        yield servers


def grant(server: Server, **lease) -> dict:
    answer = server.ask(resources={"gpus": 1}, lease={**HOUR, **lease})
    assert answer["success"], answer
    server.leases.append(answer["lease"])
    return answer["lease"]


def leads(server: Server) -> bool:
    """Return whether a server leads; a new leader first closes old sockets."""
    return server.http.get("/readyz").status_code == 200


def wait_exit(process: "subprocess.Popen[str]") -> int:
    return process.wait(60)


def read(server: Server, **message: Any) -> dict:
    return server.say(message)[0]


def wait_sync(pair: tuple[One, One]) -> int:
    """Wait until the standby has all facts of the leader; return the revision."""
    (first, *_), (second, *_) = pair
    revision = read(first, op="quotas")["revision"]
    until(lambda: read(second, op="quotas").get("revision") == revision)
    return revision


def leadership(storage: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(invoke("lead", "--json", MOORAGE_STORAGE=storage).stdout)
    return found


def audit_entries(storage: str) -> list[dict]:
    """Return the entries of the audit log, whose chain must be complete."""
    listed = invoke("audit", "--json", MOORAGE_STORAGE=storage).stdout.splitlines()
    verified = invoke("audit", "verify", MOORAGE_STORAGE=storage)
    assert f"entries 1 to {len(listed)} are unchanged" in verified.stdout, verified.stderr
    return [json.loads(line) for line in listed]


def granted_leases(entries: list[dict]) -> list[str]:
    return sorted(each["about"]["lease"] for each in entries if each["what"] == "lease.granted")


def test_a_standby_is_ready_while_a_server_of_another_rollout_leads(
    storage: str, tmp_path: Path
) -> None:
    with (
        one(tmp_path / "a", storage, MOORAGE_ROLLOUT="old"),
        one(tmp_path / "b", storage, MOORAGE_ROLLOUT="old") as like,
        one(tmp_path / "c", storage, MOORAGE_ROLLOUT="new") as other,
    ):
        until(lambda: other.server.http.get("/readyz").is_success)
        assert other.server.http.get("/readyz").json()["details"]["role"] == "standby"
        assert leadership(storage)["leader"]["name"].endswith(" old")
        read(like.server, op="quotas")
        assert like.server.http.get("/readyz").status_code == 503


def test_a_standby_takes_over_after_a_kill(
    pair: tuple[One, One], storage: str, tmp_path: Path
) -> None:
    (first, killed, _), (second, *_) = pair
    held = [grant(first, idempotency_key=f"k{number}") for number in range(5)]
    wait_sync(pair)
    with second.watching("leases") as watching:
        os.kill(killed.pid, signal.SIGKILL)
        with pytest.raises(ConnectionClosed) as closed:
            watching.recv(30)
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1012
    until(lambda: leads(second))
    fencings = {each["id"]: each["fencing"] for each in held}
    assert {each["id"]: each["fencing"] for each in second.held()} == fencings
    assert "as_of" not in read(second, op="fleet")
    assert grant(second, idempotency_key="k3")["id"] == held[3]["id"]
    new = grant(second)
    assert new["fencing"] > max(fencings.values())
    assert second.release(held[0])["success"]
    metrics = second.http.get("/metrics").text
    assert 'moorage_server_role{role="writer"} 1.0' in metrics
    assert "moorage_standby_revision" not in metrics
    assert "\nmoorage_takeover_seconds_count 1.0" in metrics
    assert "\nmoorage_standby_behind_seconds " not in metrics
    assert second.http.put("/clusters/east", json={"tags": ["big"]}).status_code == 200
    second.publish(policy("return None", "mine:1.0-stable"))
    kill(second)
    with one(tmp_path / "c", storage):
        pass
    entries = audit_entries(storage)
    whats = Counter(each["what"] for each in entries)
    assert granted_leases(entries) == sorted([*fencings, new["id"]])
    assert (whats["lease.ended"], whats["server.started"]) == (1, 3)
    assert whats["POST /policy"] >= 1
    words = ("token", "create", "ci", "--role", "client", "--tenant", "ann")
    assert invoke(*words, MOORAGE_STORAGE=storage).returncode == 0
    last = invoke("audit", "--what", "token.*", MOORAGE_STORAGE=storage).stdout
    assert "token.created" in last


def test_a_server_frozen_in_a_takeover_answers_and_stores_nothing(
    pair: tuple[One, One], storage: str
):
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
    assert wait_exit(frozen) == 75
    assert "another server leads" in first.log()
    granted = sorted(each["id"] for each in (held, new))
    assert sorted(each["id"] for each in second.held()) == granted
    until(lambda: granted_leases(audit_entries(storage)) == granted)


def test_a_stopping_server_hands_over_to_a_standby(pair: tuple[One, One], storage: str, postgres):
    (first, stopped, _), (second, *_) = pair
    held = grant(first, idempotency_key="k")
    until(lambda: leadership(storage)["standbys"])
    with second.socket() as asking, first.socket() as idle:
        stopped.send_signal(signal.SIGTERM)
        with pytest.raises(ConnectionClosed) as closed:
            idle.recv(10)
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1012

        def answer() -> dict:
            lease = {**HOUR, "idempotency_key": "k"}
            asking.send(json.dumps(ask_message(resources={"gpus": 1}, lease=lease)))
            return json.loads(asking.recv(30))

        # Over the same socket; on a busy machine, the takeover may take longer than the wait.
        until(lambda: answer().get("lease", {}).get("id") == held["id"])
    until(lambda: leads(second))
    assert wait_exit(stopped) == 0
    assert [each["id"] for each in second.held()] == [held["id"]]
    assert grant(second)["fencing"] > held["fencing"]
    # It left the one that stood by little to read.
    database = storage.rpartition("/")[2]
    assert postgres.execute("SELECT count(*) FROM moorage.checkpoint", database) == [(1,)]


def test_a_login_to_the_console_outlasts_its_server(storage: str, tmp_path: Path):
    token = "secret-of-ann"  # noqa: S105  # A test's value.
    variables = {"MOORAGE_TOKENS": f"ann:{token}"}
    with (
        one(tmp_path / "a", storage, **variables) as (first, killed, ready),
        one(tmp_path / "b", storage, **variables) as (second, *_),
    ):
        page = {"origin": ready["http"]}
        entered = first.http.post("/console/session", json={"token": token}, headers=page)
        cookie = {"cookie": entered.headers["set-cookie"].partition(";")[0]}
        os.kill(killed.pid, signal.SIGKILL)
        until(lambda: leads(second))
        session = second.http.get("/console/session", headers=cookie).json()["data"]
        assert (session["tenant"], session["csrf"]) == ("ann", entered.json()["data"]["csrf"])
        other = second.http.get("/console/session", headers={"cookie": f"{cookie['cookie']}x"})
        assert other.status_code == 401


def test_an_operator_makes_another_server_lead(pair: tuple[One, One], storage: str):
    (first, resigned, ready), (second, _, standing) = pair
    shown = leadership(storage)
    assert (shown["leader"]["ws"], shown["leader"]["epoch"]) == (ready["ws"], 1)
    assert [each["ws"] for each in shown["standbys"]] == [standing["ws"]]
    done = invoke("lead", "--resign", MOORAGE_STORAGE=storage)
    assert (done.returncode, "and resigns" in done.stdout) == (0, True)
    assert wait_exit(resigned) == 75
    assert "resigned" in first.log()
    until(lambda: leads(second))
    assert f"{standing['ws']} " in invoke("lead", MOORAGE_STORAGE=storage).stdout
    alone = invoke("lead", "--resign", MOORAGE_STORAGE=storage)
    assert (alone.returncode, "no server stands by" in alone.stderr) == (1, True)
