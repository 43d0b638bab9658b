"""Operators reserve nodes in advance: over the wire, and across kill -9."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
from served import Server, cluster

from moorage.benchmarks.daemon_process import child, daemon, serve_command, serve_variables
from moorage_client import BlockingClient, LeaseLost, NotFound, RequestRefused
from moorage_policies import catalog

pytestmark = pytest.mark.heavy  # Many daemons.

TOKENS = {"MOORAGE_TOKENS": "ann:a1,bob:b1,ops:o1", "MOORAGE_OPERATORS": "ops"}
POLICY = "first_fit:1.0-stable"
ONE = {"resources": {"gpus": 1}}
Serve = Callable[[], AbstractContextManager[Server]]


@pytest.fixture
def serve(tmp_path: Path) -> Serve:
    @contextmanager
    def served(**environment: str) -> Iterator[Server]:
        with daemon(tmp_path, environment=environment) as running:
            server = Server(running)
            try:
                yield server
            finally:
                server.close()

    with served() as server:
        server.register(cluster("east", nodes=1, gpus=1))
        server.publish(catalog.document("first_fit"))
    return lambda: served(**TOKENS)


@pytest.mark.heavy
def test_others_are_out_in_time_and_only_its_tenant_gets_in(serve: Serve) -> None:
    with serve() as server:
        url, now = server.running.ws, time.time()
        later = {"op": "reserve", **ONE, "starts_at": now + 3600, "ends_at": now + 7200}
        with (
            BlockingClient(url, "a1") as ann,
            BlockingClient(url, "b1") as bob,
            BlockingClient(url, "o1") as ops,
        ):
            with pytest.raises(RequestRefused) as caught:
                bob.call(later)
            assert caught.value.code == "unauthorized"
            held = ops.call({**later, "tenant": "bob"})
            (node,) = held["nodes"]
            assert (node["node_id"], node["gpus"], node["whole"]) == ("east-0", ["0"], False)
            assert bob.call({"op": "reservations"})["reservations"] == [held]
            assert ann.call({"op": "reservations"})["reservations"] == []
            with pytest.raises(RequestRefused) as caught:
                ann.ask(POLICY, **ONE, lease={"ttl_seconds": 5000})
            assert 3500 < caught.value.details["ttl_max_seconds"] <= 3600
            lease = ann.ask(POLICY, **ONE, lease={"ttl_seconds": 600}).lease
            assert lease is not None
            renewal = {"op": "renew", "lease": lease.id, "token": lease.token, "ttl_seconds": 5000}
            with server.socket({"Authorization": "Bearer a1"}) as socket:
                socket.send(json.dumps(renewal))
                told = json.loads(socket.recv(60))["lease"]
            assert told["expires_at"] == held["starts_at"]
            assert 3000 < told["ttl_max_seconds"] <= 3600
            ann.call({"op": "release", "lease": lease.id, "token": lease.token})
            ops.call({"op": "unreserve", "reservation": held["reservation"]})
            with pytest.raises(NotFound):
                ops.call({"op": "unreserve", "reservation": held["reservation"]})
            ops.call({**later, "tenant": "bob", "starts_at": now})
            with pytest.raises(RequestRefused) as caught:
                ann.ask(POLICY, **ONE, lease={"ttl_seconds": 1})
            assert caught.value.details["reserved_in_advance"] == 1
            assert bob.ask(POLICY, **ONE, lease={"ttl_seconds": 60}).lease is not None


def test_a_holder_knows_that_its_renewal_was_shortened(serve: Serve) -> None:
    def held_until_it_is_reserved(ann: BlockingClient, ops: BlockingClient) -> None:
        with ann.lease(POLICY, **ONE, ttl_seconds=3) as held:
            times = {"starts_at": held.expires_at + 1.5, "ends_at": held.expires_at + 60.0}
            ops.call({"op": "reserve", **ONE, **times, "tenant": "bob"})
            while held.expires_at < times["starts_at"]:
                assert not held.wait_lost(0.05)
            left = times["starts_at"] - time.time()
            assert held.seconds_left <= left
            assert held.wait_lost(60)

    with serve() as server:
        url = server.running.ws
        with (
            BlockingClient(url, "a1") as ann,
            BlockingClient(url, "o1") as ops,
            pytest.raises(LeaseLost, match="reserved for others"),
        ):
            held_until_it_is_reserved(ann, ops)


def test_others_share_the_node(serve: Serve) -> None:
    """Two of eight GPUs are reserved: jailed policies give the other six, and these to bob."""
    now, begins = time.time(), time.time() + 3600
    two, six = {"resources": {"gpus": 2}}, {"resources": {"gpus": 6}}
    with serve() as server:
        server.http.headers["Authorization"] = "Bearer o1"
        server.register(cluster("west", nodes=1, gpus=8))
        url = server.running.ws
        with (
            BlockingClient(url, "a1") as ann,
            BlockingClient(url, "b1") as bob,
            BlockingClient(url, "o1") as ops,
        ):
            times = {"starts_at": begins, "ends_at": begins + 3600}
            held = ops.call({"op": "reserve", **two, **times, "tenant": "bob"})
            assert [node["gpus"] for node in held["nodes"]] == [["0", "1"]]
            lease = ann.ask(POLICY, **six, lease={"ttl_seconds": 5000}).lease
            assert lease is not None
            assert [share.gpus for share in lease.placement] == [tuple("234567")]
            with pytest.raises(RequestRefused) as caught:
                ann.ask(POLICY, **two, lease={"ttl_seconds": 5000})
            assert caught.value.details["ttl_max_seconds"] <= 3600
            ops.call({"op": "unreserve", "reservation": held["reservation"]})
            ops.call({"op": "reserve", **two, **times, "starts_at": now, "tenant": "bob"})
            with pytest.raises(RequestRefused):
                ann.ask(POLICY, **two, lease={"ttl_seconds": 1})
            assert bob.ask(POLICY, **two, lease={"ttl_seconds": 60}).lease is not None


@pytest.mark.heavy
def test_it_survives_a_kill(serve: Serve, tmp_path: Path) -> None:
    now, log = time.time(), tmp_path / "stderr.log"
    wanted = {"op": "reserve", **ONE, "starts_at": now + 3600, "ends_at": now + 7200}
    with child(serve_command(tmp_path), log, serve_variables()) as (process, ready):
        with BlockingClient(ready["ws"]) as client:
            held = client.call({**wanted, "tenant": "bob"})
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    with serve() as server, BlockingClient(server.running.ws, "o1") as ops:
        assert ops.call({"op": "reservations"})["reservations"] == [held]
        with pytest.raises(RequestRefused) as caught:
            ops.ask(POLICY, **ONE, lease={"ttl_seconds": 5000})
        assert caught.value.details["ttl_max_seconds"] <= 3600


def test_the_command_line_reserves_lists_and_cancels(serve: Serve, tmp_path: Path) -> None:
    with serve() as server:
        variables = {
            **os.environ,
            "MOORAGE_URL": server.running.ws,
            "MOORAGE_TOKEN": "o1",
            "COLUMNS": "200",
            "TZ": "UTC",
        }
        program = [str(Path(sys.executable).with_name("moorage")), "reservation"]

        def run(*arguments: str, code: int = 0) -> str:
            done = subprocess.run(
                [*program, *arguments],
                check=False,
                env=variables,
                capture_output=True,
                text=True,
                timeout=60,
            )
            assert done.returncode == code, done.stderr
            return done.stdout + done.stderr

        assert "No node is reserved" in run("list")
        times = ["--from", "2036-01-31T08:00Z", "--to", "2036-01-31T10:00+01:00"]
        told = run("add", *times, "--tenant", "bob", "--lapse", "600")
        name, _, rest = told.partition("  ")
        assert (
            rest == "bob: east/east-0[0], 2036-01-31 08:00:00+00:00 to 2036-01-31 09:00:00+00:00\n"
        )
        assert name in run("list")
        (row,) = json.loads(run("list", "--json"))
        assert (row["tenant"], row["lapse_seconds"]) == ("bob", 600.0)
        assert "never" in run("add", *times, "--gpus", "9", code=3)
        wrong = run("add", "--from", "tomorrow", "--to", "+1h", code=2)
        assert "--from: expected 2027-01-31T08:00" in wrong
        assert "bob: east/east-0[0]" in run("cancel", name)
        later = json.loads(run("add", "--from", "+2h", "--to", "+1d", "--json"))
        assert later["ends_at"] - later["starts_at"] == pytest.approx(22 * 3600)
        assert later["tenant"] == "ops"
        dry = run("add", "--from", "+2d", "--to", "+3d", "--dry-run")
        assert dry.startswith("not reserved  ops: east/east-0[0], ")
        assert len(json.loads(run("list", "--json"))) == 1
        assert later["reservation"] in run(
            "add", "--from", "+3h", "--to", "+4h", "--dry-run", code=1
        )


def test_a_lease_is_shorter_by_agreement(serve: Serve) -> None:
    with serve() as server:
        url = server.running.ws
        with BlockingClient(url, "a1") as ann, BlockingClient(url, "o1") as ops:
            terms = {"ttl_seconds": 60, "ttl_seconds_min": 2}
            begins = time.time() + 20
            times = {"starts_at": begins, "ends_at": begins + 10}
            ops.call({"op": "reserve", **ONE, **times, "tenant": "bob"})
            shorter = ann.ask(POLICY, **ONE, lease=terms).lease
            assert shorter is not None
            assert 10 < shorter.lasts_seconds <= 20
            with pytest.raises(RequestRefused, match="ttl_seconds_min"):
                ann.ask(POLICY, **ONE, lease={"ttl_seconds": 2, "ttl_seconds_min": 3})
