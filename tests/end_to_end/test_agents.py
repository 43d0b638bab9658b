"""Machines with agents: how they join, run what leases are for, and are lost and found.

Agents and server are processes, over sockets of loopback. All agents are on one machine, which is
why they have names and no machine id.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from http import HTTPStatus
from pathlib import Path

import pytest
from fleets import MOORED, Fleet, moored, served
from served import Server, until
from websockets.exceptions import InvalidStatus
from websockets.http11 import Request, Response
from websockets.sync.client import connect
from websockets.sync.server import ServerConnection, serve

from moorage.backends.agents import wire
from moorage.protocol.agent_socket import AGENT_PATH
from moorage.testing.daemon_process import Running, child, serve_variables
from moorage_policies import catalog

pytestmark = pytest.mark.heavy

LOST = {"MOORAGE_AGENT_LOST_SECONDS": "3"}
COUNTING = "for i in $(seq 40); do echo $i; sleep 0.1; done; echo whole; exit 3"


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with served(tmp_path) as fleet:
        yield fleet


def test_a_cluster_of_agents_is_changed_by_operators_and_the_server(fleet: Fleet) -> None:
    fleet.agent("box", fleet.token())
    joining, data = fleet.token(), fleet.folder / "data"
    made = moored("token", "create", "a", "--role", "author", "--tenant", "ann", "--data", data)
    ann = {"Authorization": f"Bearer {made.stdout.strip()}"}
    answer = fleet.server.http.put("/clusters/lab", json={"reputation": 3}, headers=ann)
    assert (answer.status_code, "the server maintains" in answer.text) == (403, True), answer.text
    fleet.agent("more", joining)
    document = fleet.server.http.get("/clusters/lab", headers=ann).json()
    assert {node["id"] for node in document["nodes"]["nodeData"]} == {"box", "more"}


def test_a_machine_joins_and_runs_what_a_lease_is_for(fleet: Fleet, tmp_path: Path) -> None:
    token = fleet.token()
    fleet.agent("box", token)
    assert fleet.listed()["box"]["connected"]
    lease = fleet.ask("echo $MOORAGE_NODE_ID; sleep 1000")
    assert lease["placement"][0]["node_id"] == "box"
    until(lambda: fleet.state(lease) == "active")
    message = {"op": "exec", "lease": lease["id"], "token": lease["token"]}
    (answer,) = fleet.server.say(message | {"command": ["sh", "-c", "echo $$; exit 4"]})
    assert answer["data"]["exit_code"] == 4, answer
    assert fleet.server.release(lease)["success"]
    assert fleet.output(lease)[0] == "box\n"
    done = fleet.ask("seq 100000; exit 3")
    text, code = fleet.output(done)
    assert (text, code) == ("".join(f"{number}\n" for number in range(1, 100_001)), 3)
    assert "used by another agent" in fleet.refused(fleet.command("other", "--token", token))


class Standbys:
    """Servers that are not the writer: one says so at the door, the other hangs up."""

    def __init__(self, leader: str | None) -> None:
        body = json.dumps({"success": False, "error": {"code": "not_leader", "leader": leader}})
        self.doors: list[str] = []

        def door(connection: ServerConnection, request: Request) -> Response:
            self.doors.append(request.headers["Authorization"])
            return connection.respond(HTTPStatus.MISDIRECTED_REQUEST, body)

        def hang_up(connection: ServerConnection) -> None:
            connection.close(1012)

        self.servers = [
            serve(hang_up, "127.0.0.1", 0, process_request=door),
            serve(hang_up, "127.0.0.1", 0),
        ]
        for each in self.servers:
            threading.Thread(target=each.serve_forever, daemon=True).start()
        self.urls = [f"ws://127.0.0.1:{e.socket.getsockname()[1]}" for e in self.servers]

    def close(self) -> None:
        for each in self.servers:
            each.shutdown()


@pytest.mark.parametrize("named", [True, False])
def test_an_agent_goes_to_the_writer_and_ends_no_workload(fleet: Fleet, named: bool) -> None:
    standbys = Standbys(None if named else fleet.server.running.ws)
    fleet.stack.callback(standbys.close)
    urls = ["ws://127.0.0.1:9", *reversed(standbys.urls)]
    urls += [fleet.server.running.ws] if named else []
    token = fleet.token()
    box = fleet.agent("box", token, "--server", ",".join(urls))
    assert standbys.doors == [f"Bearer {token}"]
    lease = fleet.ask(COUNTING)
    os.kill(box.pid, signal.SIGKILL)
    box.wait()
    fleet.agent("box", None, "--server", ",".join(urls))
    text, code = fleet.output(lease)
    assert (text.split()[-1], code) == ("whole", 3)


def test_strangers_are_not_let_in(fleet: Fleet) -> None:
    assert "does not know this machine's" in fleet.refused(fleet.command("a", "--token", "no"))
    assert "has not joined" in fleet.refused(fleet.command("a"))
    with pytest.raises(InvalidStatus, match="401"):
        connect(fleet.server.running.ws + AGENT_PATH)
    token = fleet.token()
    headers = {"Authorization": f"Bearer {token}"}
    with connect(fleet.server.running.ws + AGENT_PATH, additional_headers=headers) as raw:
        raw.send(wire.encode(wire.AgentHello(99, "9.9", "x", {"id": "box"}, 0.0, {})))
        farewell = wire.decode_instruction(raw.recv(10))
    assert isinstance(farewell, wire.AgentFarewell)
    assert "release 9.9) speaks version 99" in farewell.reason


def test_a_copied_disk_and_a_taken_name_are_refused(fleet: Fleet, tmp_path: Path) -> None:
    fleet.agent("box", fleet.token())
    assert "another agent runs over" in fleet.refused(fleet.command("box"))
    shutil.copytree(tmp_path / "box", tmp_path / "copy")
    copy = fleet.stack.enter_context(
        subprocess.Popen(fleet.command("box", data="copy"), stderr=subprocess.PIPE, text=True)
    )
    assert copy.stderr is not None
    line = copy.stderr.readline()
    copy.kill()
    assert "an agent is connected as lab/box from 127.0.0.1" in line
    with subprocess.Popen(
        fleet.command("box", "--token", fleet.token(), data="new"),
        stderr=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stderr is not None
        assert "lab/box is another machine already" in other.stderr.readline()
        other.kill()
    assert fleet.listed()["box"]["connected"]


def test_a_command_outlives_its_killed_agent_and_its_output_is_whole(fleet: Fleet) -> None:
    agent = fleet.agent("box", fleet.token())
    lease = fleet.ask(COUNTING)
    until(lambda: fleet.state(lease) == "active")
    os.kill(agent.pid, signal.SIGKILL)
    agent.wait()
    until(lambda: not fleet.listed()["box"]["connected"])
    fleet.agent("box")
    expected = "".join(f"{number}\n" for number in range(1, 41)) + "whole\n"
    assert fleet.output(lease) == (expected, 3)


def test_a_command_outlives_its_killed_server_and_its_output_is_whole(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
    command = [*MOORED, "serve", "--port", port, "--http-port", "0", "--data"]
    command.append(str(tmp_path / "data"))
    with ExitStack() as agents:
        with child(command, tmp_path / "1.log", serve_variables()) as (process, ready):
            server = Server(Running(ready["ws"], ready["http"], process.pid, tmp_path / "1.log"))
            server.publish(catalog.document("first_fit"))
            fleet = Fleet(tmp_path, server, agents)
            fleet.agent("box", fleet.token())
            lease, stays = fleet.ask(COUNTING), fleet.ask("sleep 1000")
            until(lambda: fleet.state(lease) == fleet.state(stays) == "active")
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            server.close()
        with served(tmp_path, "--port", port) as fleet:
            expected = "".join(f"{number}\n" for number in range(1, 41)) + "whole\n"
            assert fleet.output(lease) == (expected, 3)
            assert fleet.state(stays) == "active"
            assert fleet.server.release(stays)["success"]
            until(lambda: fleet.state(stays) == "ended")


def test_a_machine_is_lost_and_found_while_its_command_runs_on(tmp_path: Path) -> None:
    with served(tmp_path, **LOST) as fleet:
        agent = fleet.agent("box", fleet.token())
        lease = fleet.ask(COUNTING.replace("40", "150"))
        until(lambda: fleet.state(lease) == "active")
        agent.send_signal(signal.SIGSTOP)
        until(lambda: "unavailable" in fleet.node("box"))
        assert fleet.node("box")["unavailable"].startswith(
            "lost: the machine box is not heard of since 20"
        )
        refused = fleet.server.ask(resources={"cpu_milli": 1}, lease={"ttl_seconds": 9})
        assert refused["error"]["code"] == "no_capacity"
        assert "not heard of since" in fleet.server.moorage("fleet", "lab").stderr
        assert fleet.state(lease) == "active"
        until(lambda: fleet.now()["agents"]["lost"] == 1)
        now = fleet.now()
        assert [each["node_id"] for each in now["agents"]["first"]] == ["box"]
        assert [each["cluster_id"] for each in now["clusters_out"]] == ["lab"]
        (dry,) = fleet.server.say({"op": "release", "lease": lease["id"], "dry_run": True})
        assert dry["reasons"]["stop_seconds"] == 10.0
        agent.send_signal(signal.SIGCONT)
        until(lambda: "unavailable" not in fleet.node("box"))
        text, code = fleet.output(lease)
        assert (text.splitlines()[-1], len(text.splitlines()), code) == ("whole", 151, 3)


@pytest.mark.parametrize("signaled", [signal.SIGSTOP, signal.SIGKILL])
def test_a_lease_moves_once_its_lost_machine_has_ended_it(
    tmp_path: Path, signaled: signal.Signals
) -> None:
    """The agent is stuck, or dead for good: its word holds, so that nothing runs twice."""
    seen = tmp_path / "seen"
    command = f"while :; do echo $MOORAGE_NODE_ID >>{seen}; sleep 0.05; done"
    with served(tmp_path, MOORAGE_AGENT_LOST_SECONDS="12") as fleet:
        boxes = {each: fleet.agent(each, fleet.token(), "--unheard-seconds", "2") for each in "ab"}
        lease = fleet.ask(command, on_failure="requeue", attempts_max=2)
        until(lambda: fleet.state(lease) == "active" and seen.exists())
        there = lease["placement"][0]["node_id"]
        other = "b" if there == "a" else "a"
        boxes[there].send_signal(signaled)
        until(lambda: seen.read_text().endswith(f"{other}\n"))
        boxes[there].send_signal(signal.SIGCONT)
        if signaled == signal.SIGKILL:
            boxes[there].wait()
            fleet.agent(there, None, "--unheard-seconds", "2")
        until(lambda: "unavailable" not in fleet.node(there))
        assert fleet.server.release(lease)["success"]
        until(lambda: fleet.state(lease) == "ended")
    nodes = seen.read_text().split()
    assert nodes == sorted(nodes, reverse=there == "b"), "one after the other"


def test_a_lease_without_another_place_runs_again_where_it_was(tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    with served(tmp_path, MOORAGE_AGENT_LOST_SECONDS="12") as fleet:
        agent = fleet.agent("box", fleet.token(), "--unheard-seconds", "2")
        command = f"echo $$ >>{seen}; sleep 1000"
        lease = fleet.ask(command, on_failure="requeue", attempts_max=2)
        until(lambda: fleet.state(lease) == "active" and seen.exists())
        agent.send_signal(signal.SIGSTOP)
        message = {"op": "status", "request": lease["id"]}
        until(lambda: fleet.state(lease) not in {"active", "failing"})
        assert len(seen.read_text().split()) == 1
        agent.send_signal(signal.SIGCONT)
        until(lambda: len(seen.read_text().split()) == 2)
        until(lambda: fleet.state(lease) == "active")
        assert fleet.server.say(message)[0]["lease"]["workload"]["attempt"] == 2
        first, _ = map(int, seen.read_text().split())
        assert not Path(f"/proc/{first}").exists()


def test_an_agent_that_ends_what_it_runs_too_late_is_refused(fleet: Fleet) -> None:
    command = fleet.command("box", "--token", fleet.token(), "--unheard-seconds", "51")
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as agent:
        assert agent.stderr is not None
        assert "agent_lost_seconds, 60, is not longer by 10 s" in agent.stderr.readline()
        agent.kill()


def test_a_lost_machine_is_forgotten_and_may_join_again(tmp_path: Path) -> None:
    with served(tmp_path, **LOST) as fleet:
        data = tmp_path / "data"
        agent = fleet.agent("box", fleet.token())
        lease, fails = fleet.ask("exec sleep 1000"), fleet.ask("exec sleep 1000")
        until(lambda: fleet.state(lease) == fleet.state(fails) == "active")
        connected = moored("agent", "forget", "lab/box", "--data", data)
        assert "lab/box is connected" in connected.stderr
        by_operator = {"op": "forget", "cluster": "lab", "node": "box"}
        (refused,) = fleet.server.say(by_operator)
        assert refused["error"]["code"] == "conflict"
        (unknown,) = fleet.server.say(by_operator | {"node": "bo"})
        assert unknown["error"]["code"] == "not_found"
        os.kill(agent.pid, signal.SIGKILL)
        agent.wait()
        assert fleet.server.release(lease)["success"]
        until(lambda: not fleet.listed()["box"]["connected"])
        assert fleet.state(lease) == "ending"  # It may still run.
        assert fleet.state(fails) == "active"
        done = fleet.server.moorage("fleet", "forget", "lab/box")
        there = f"{lease['id']}, {fails['id']}"
        assert done.stdout == f"lab/box is forgotten; 2 leases there: {there}\n"
        until(lambda: fleet.state(lease) == fleet.state(fails) == "ended")
        why = {"op": "status", "lease": fails["id"]}
        assert "forgotten by an operator" in fleet.server.say(why)[0]["lease"]["reason"]
        nodes = fleet.server.http.get("/clusters/lab").json()["nodes"]["nodeData"]
        assert nodes == []
        again = fleet.command("box")
        assert "does not know this machine's" in fleet.refused(again)
        agent = fleet.agent("box", fleet.token())
        folder = tmp_path / "box" / "local" / "running"
        until(lambda: not any(folder.iterdir()))  # No lease stands for it.
        agent.terminate()
        until(lambda: not fleet.listed()["box"]["connected"])
        assert moored("agent", "forget", "lab/box", "--data", data).returncode == 0
    lines = moored("audit", "--what", "agent.*", "--json", "--data", data).stdout.splitlines()
    entries = [(each["what"], each["who"]) for each in map(json.loads, lines)]
    me = f"uid {os.getuid()}"
    once = [("agent.token_created", me), ("agent.joined", "moored")]
    assert entries == [*once, ("agent.forgotten", "local"), *once, ("agent.forgotten", me)]


def test_a_revoked_agent_is_cut_off(fleet: Fleet, tmp_path: Path) -> None:
    agent = fleet.agent("box", fleet.token())
    assert moored("agent", "revoke", "lab/box", "--data", tmp_path / "data").returncode == 0
    assert agent.wait(60) == 3
    assert fleet.listed()["box"]["revoked"]


def test_an_agent_takes_no_orders_of_an_earlier_epoch(fleet: Fleet, tmp_path: Path) -> None:
    fleet.agent("box", fleet.token()).terminate()
    file = tmp_path / "box" / "agent.json"
    until(lambda: not fleet.listed()["box"]["connected"])
    file.write_text(json.dumps(json.loads(file.read_text()) | {"epoch": 7}))
    with subprocess.Popen(fleet.command("box"), stderr=subprocess.PIPE, text=True) as agent:
        assert agent.stderr is not None
        assert "the server's epoch, 0, is older than 7" in agent.stderr.readline()
        agent.kill()
