"""Gangs over agents: members find each other, and start and end together."""

import os
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from fleets import MOORED, Fleet, served
from served import Server, until

from moorage.testing.daemon_process import Running, child, serve_variables
from moorage_policies import catalog

pytestmark = pytest.mark.heavy

MEET = """
import os, socket
rank, place = int(os.environ["RANK"]), (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
if rank == 0:
    with socket.create_server(place) as server:
        words = []
        for _ in range(int(os.environ["WORLD_SIZE"]) - 1):
            connection, _ = server.accept()
            words.append(connection.makefile().readline().strip())
            connection.close()
    print("rank 0 met", *sorted(words))
else:
    while True:
        try:
            connection = socket.create_connection(place)
            break
        except ConnectionRefusedError:
            pass
    connection.sendall(f"{rank}={os.environ['MOORAGE_NODE_ID']}\\n".encode())
"""
STAYS = "echo $MOORAGE_NODE_ID >>{seen}; exec sleep 1000"


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with served(tmp_path) as fleet:
        for name in ("a", "b", "c"):
            fleet.agent(name, fleet.token())
        yield fleet


def nodes_of(lease: dict) -> list[str]:
    return [each["node_id"] for each in lease["placement"]]


def pid_of(folder: Path, node: str) -> int | None:
    """Return the process that runs on a node."""
    for found in (folder / node / "local" / "running").glob("*/process.json"):
        return int(found.read_text().partition('"pid": ')[2].partition(",")[0].strip("} "))
    return None


def test_members_of_a_gang_meet(fleet: Fleet) -> None:
    lease = fleet.ask(f"cat >meet.py <<'END'\n{MEET}\nEND\npython3 meet.py", nodes=3)
    text, code = fleet.output(lease)
    _, second, third = nodes_of(lease)
    assert (text, code) == (f"rank 0 met 1={second} 2={third}\n", 0)


def test_a_gang_knows_its_shape(fleet: Fleet) -> None:
    lease = fleet.ask("env | sort; sleep 1000", nodes=2)
    until(lambda: fleet.state(lease) == "active")
    message = {"op": "exec", "lease": lease["id"], "token": lease["token"]}
    (done,) = fleet.server.say(message | {"command": ["env"]})
    known = dict(line.partition("=")[::2] for line in done["data"]["output"].splitlines())
    assert known["MOORAGE_NODES"].split(",") == nodes_of(lease)
    assert known["MOORAGE_ADDRESSES"] == "127.0.0.1,127.0.0.1"
    assert known["MOORAGE_NODE_ID"] == nodes_of(lease)[0]
    shape = [known[each] for each in ("RANK", "WORLD_SIZE", "PET_NNODES", "PET_NODE_RANK")]
    assert shape == ["0", "2", "2", "0"]
    assert known["PET_MASTER_PORT"] == known["MASTER_PORT"]
    assert fleet.server.release(lease)["success"]
    until(lambda: fleet.state(lease) == "ended")
    assert [pid_of(fleet.folder, each) for each in "abc"] == [None] * 3


def test_a_gang_that_loses_a_member_ends_with_the_node_named(fleet: Fleet, tmp_path: Path) -> None:
    lease = fleet.ask(STAYS.format(seen=tmp_path / "seen"), nodes=2)
    until(lambda: fleet.state(lease) == "active")
    lost = nodes_of(lease)[1]
    until(lambda: pid_of(tmp_path, lost))
    os.kill(pid_of(tmp_path, lost) or 0, signal.SIGKILL)
    until(lambda: fleet.state(lease) == "ended")
    (answer,) = fleet.server.say({"op": "status", "lease": lease["id"]})
    assert f"node {lost}: it was killed by signal 9" in answer["lease"]["reason"]
    assert [pid_of(tmp_path, each) for each in "abc"] == [None] * 3


def test_a_gang_is_requeued_as_a_whole(fleet: Fleet, tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    lease = fleet.ask(STAYS.format(seen=seen), nodes=2, on_failure="requeue", attempts_max=2)
    until(lambda: fleet.state(lease) == "active" and len(seen.read_text().split()) == 2)
    lost = nodes_of(lease)[0]
    os.kill(pid_of(tmp_path, lost) or 0, signal.SIGKILL)
    until(lambda: len(seen.read_text().split()) == 4)
    until(lambda: fleet.state(lease) == "active")
    assert sum(pid_of(tmp_path, each) is not None for each in "abc") == 2


def test_a_gang_whose_start_fails_on_one_node_leaves_nothing(fleet: Fleet, tmp_path: Path) -> None:
    spec = {"category": "service", "command": ["sh", "-c", "[ $RANK = 0 ] || exit 4; sleep 1000"]}
    answer = fleet.server.ask(
        clusters=["lab"],
        resources={"cpu_milli": 100, "nodes": 2},
        lease={"ttl_seconds": 600},
        provision={"backend": "local", "spec": spec},
    )
    lease = answer["lease"]
    until(lambda: fleet.state(lease) == "ended")
    assert [pid_of(tmp_path, each) for each in "abc"] == [None] * 3


def test_a_gang_outlives_its_killed_server_and_agents(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
    command = [*MOORED, "serve", "--port", port, "--http-port", "0", "--data"]
    command.append(str(tmp_path / "data"))
    seen = tmp_path / "seen"
    with ExitStack() as agents:
        with child(command, tmp_path / "1.log", serve_variables()) as (process, ready):
            server = Server(Running(ready["ws"], ready["http"], process.pid, tmp_path / "1.log"))
            server.publish(catalog.document("first_fit"))
            fleet = Fleet(tmp_path, server, agents)
            boxes = {each: fleet.agent(each, fleet.token()) for each in "ab"}
            lease = fleet.ask(STAYS.format(seen=seen), nodes=2)
            until(lambda: fleet.state(lease) == "active")
            for killed in (process, boxes["b"]):
                os.kill(killed.pid, signal.SIGKILL)
                killed.wait()
            server.close()
        pids = [pid_of(tmp_path, each) for each in "ab"]
        with served(tmp_path, "--port", port) as fleet:
            fleet.agent("b")
            until(lambda: fleet.state(lease) == "active")
            assert [pid_of(tmp_path, each) for each in "ab"] == pids
            os.kill(pids[1] or 0, signal.SIGKILL)
            until(lambda: fleet.state(lease) == "ended")
            assert [pid_of(tmp_path, each) for each in "ab"] == [None] * 2
    assert sorted(seen.read_text().split()) == ["a", "b"]
