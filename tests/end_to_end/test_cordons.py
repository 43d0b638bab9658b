"""Operators take nodes and clusters out of service: over the wire, and across kill -9."""

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from served import Server, ask_message, cluster

from moorage.benchmarks.daemon_process import child, daemon, serve_command, serve_variables
from moorage_client import BlockingClient, NotFound, RequestRefused
from moorage_policies import catalog

pytestmark = pytest.mark.heavy  # Many daemons.


@contextlib.contextmanager
def served(data: Path) -> Iterator[Server]:
    with daemon(data) as running:
        server = Server(running)
        try:
            yield server
        finally:
            server.close()


@pytest.fixture
def data(tmp_path: Path) -> Path:
    with served(tmp_path) as server:
        server.register(cluster("east", nodes=2, gpus=1))
        server.publish(catalog.document("first_fit"))
    return tmp_path


def test_a_drain_empties_a_node_while_others_go_on(data: Path) -> None:
    with served(data) as server, BlockingClient(server.running.ws) as client:
        held = server.ask(resources={"gpus": 1}, lease={"ttl_seconds": 600})["lease"]
        node = held["placement"][0]["node_id"]
        with server.socket() as watching:
            watching.send(json.dumps({"op": "watch", "topics": ["fleet"]}))
            watching.recv(30)
            told = client.drain("east", node, "new fans", seconds=300)
            news = json.loads(watching.recv(30))
        assert told["leases"] == [held["id"]]
        assert (news["event"], news["data"]["node_id"]) == ("draining", node)
        assert "new fans" in told["unavailable"]
        (row,) = [each for each in client.fleet("east") if each["node_id"] == node]
        assert "new fans" in row["unavailable"]
        drift = client.status(held["id"])
        assert drift["expires_at"] <= held["expires_at"] - 250
        other = server.ask(resources={"gpus": 1}, lease={"ttl_seconds": 600})["lease"]
        assert other["placement"][0]["node_id"] != node
        refused = server.ask(resources={"gpus": 1}, lease={"ttl_seconds": 600})
        assert refused["error"]["code"] == "no_capacity"
        server.say({"op": "release", "lease": held["id"], "token": held["token"]})
        assert client.drain("east", node)["leases"] == []
        refused = server.ask(resources={"gpus": 1}, lease={"ttl_seconds": 600})
        assert not refused["success"], "what left a drained node is not given away again"
        assert client.uncordon("east", node)["unavailable"] is None
        assert server.ask(resources={"gpus": 1}, lease={"ttl_seconds": 600})["success"]


@pytest.mark.heavy
def test_it_survives_a_kill_and_a_new_document(data: Path, tmp_path: Path) -> None:
    command, log = serve_command(data), tmp_path / "stderr.log"
    with child(command, log, serve_variables()) as (process, ready):
        with BlockingClient(ready["ws"]) as client:
            client.cordon("east", reason="power")
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    with served(data) as server, BlockingClient(server.running.ws) as client:
        server.http.put("/clusters/east", json=cluster("east", nodes=3, gpus=1)).raise_for_status()
        refused = server.ask(resources={"gpus": 1}, lease={"ttl_seconds": 60})
        assert not refused["success"]
        assert client.uncordon("east")["unavailable"] is None
        assert server.ask(resources={"gpus": 1}, lease={"ttl_seconds": 60})["success"]


def test_what_is_asked_wrongly_is_told(data: Path) -> None:
    with served(data) as server, BlockingClient(server.running.ws) as client:
        with pytest.raises(RequestRefused) as refused:
            client.drain("west")
        assert (refused.value.code, refused.value.field) == ("unknown_clusters", "cluster")
        with pytest.raises(NotFound):
            client.cordon("east", "no-such-node")
        (reply,) = server.say({"op": "drain", "cluster": "east", "seconds": -1})
        assert reply["error"]["field"] == "seconds"
        (reply,) = server.say({"op": "cordon", "node": "x"})
        assert reply["error"]["field"] == "cluster"
        (waits,) = server.say(ask_message(resources={"gpus": 1}))
        assert waits["success"], "advice is given as ever"
