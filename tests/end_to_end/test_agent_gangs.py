"""Members of a gang on agents find each other, start together and end together."""

import json
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from fleets import COUNTED, COUNTING, Fleet, serve_doomed_fleet, serve_fleet
from served import kill, until

pytestmark = pytest.mark.heavy

MEET = """
import contextlib, os, socket
rank, place = int(os.environ["RANK"]), (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
if rank == 0:
    with socket.create_server(place) as server:
        came = [server.accept()[0] for _ in range(int(os.environ["WORLD_SIZE"]) - 1)]
    print("rank 0 met", *sorted(each.makefile().readline().strip() for each in came))
while rank:
    with contextlib.suppress(ConnectionRefusedError), socket.create_connection(place) as connection:
        connection.sendall(f"{rank}={os.environ['MOORAGE_NODE_ID']}\\n".encode())
        break
"""
STAYS = "echo $MOORAGE_NODE_ID >>{seen}; exec sleep 1000"


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with serve_fleet(tmp_path_factory.mktemp("gangs")) as fleet:
        for name in "abc":
            fleet.agent(name, fleet.token())
        yield fleet


def nodes_of(lease: dict) -> list[str]:
    return [each["node_id"] for each in lease["placement"]]


def pids(fleet: Fleet, lease: dict) -> dict[str, int]:
    """Return the processes of a lease's workload by their nodes."""
    return {
        found.parents[3].name: json.loads(found.read_text())["pid"]
        for found in fleet.folder.glob(f"?/local/running/{lease['id']}/process.json")
    }


def wait_end(fleet: Fleet, lease: dict) -> str:
    """Wait until a lease has ended; check that no process remains; return the reason."""
    until(lambda: fleet.state(lease) == "ended")
    assert pids(fleet, lease) == {}
    return fleet.server.status(lease)["reason"]


def test_members_of_a_gang_reach_each_other(fleet: Fleet) -> None:
    lease = fleet.ask(f"cat >meet.py <<'END'\n{MEET}\nEND\npython3 meet.py", nodes=3)
    text, code = fleet.output(lease)
    _, second, third = nodes_of(lease)
    assert (text, code) == (f"rank 0 met 1={second} 2={third}\n", 0)
    wait_end(fleet, lease)


def test_each_member_knows_the_size_of_its_gang_and_its_rank(fleet: Fleet) -> None:
    lease = fleet.ask("env | sort; sleep 1000", nodes=2)
    until(lambda: fleet.state(lease) == "active")
    message = {"op": "exec", "lease": lease["id"], "token": lease["token"]}
    (done,) = fleet.server.say(message | {"command": ["env"]})
    assert done["success"], done
    known = dict(line.partition("=")[::2] for line in done["data"]["output"].splitlines())
    assert known["MOORAGE_NODES"].split(",") == nodes_of(lease)
    assert known["MOORAGE_ADDRESSES"] == "127.0.0.1,127.0.0.1"
    assert known["MOORAGE_NODE_ID"] == nodes_of(lease)[0]
    shape = [known[each] for each in ("RANK", "WORLD_SIZE", "PET_NNODES", "PET_NODE_RANK")]
    assert shape == ["0", "2", "2", "0"]
    assert known["PET_MASTER_PORT"] == known["MASTER_PORT"]
    assert fleet.server.release(lease)["success"]
    wait_end(fleet, lease)


def test_a_gang_is_requeued_as_a_whole(fleet: Fleet, tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    lease = fleet.ask(STAYS.format(seen=seen), nodes=2, on_failure="requeue", attempts_max=2)
    until(lambda: fleet.state(lease) == "active" and len(seen.read_text().split()) == 2)
    os.kill(pids(fleet, lease)[nodes_of(lease)[0]], signal.SIGKILL)
    until(lambda: len(seen.read_text().split()) == 4)
    until(lambda: fleet.state(lease) == "active")
    assert len(pids(fleet, lease)) == 2
    assert fleet.server.release(lease)["success"]
    wait_end(fleet, lease)


OWN = {"MOORAGE_LOCAL_NODES": "own"}


def register_own(fleet: Fleet) -> None:
    """Add the server's own machine to the cluster of machines with agents."""
    node = {"id": "own", "vcpus": {"count": 4}, "memory": 4096}
    document = {"id": "lab", "nodes": {"count": 1, "nodeData": [node]}}
    assert fleet.server.http.post("/clusters/lab/nodes", json=document).is_success


@pytest.fixture(scope="module")
def mixed_fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with serve_fleet(tmp_path_factory.mktemp("mixed"), **OWN) as fleet:
        fleet.agent("a", fleet.token())
        register_own(fleet)
        yield fleet


def own_pids(fleet: Fleet, lease: dict) -> dict[str, int]:
    note = fleet.data / "local" / "running" / lease["id"] / "process.json"
    own = {"own": json.loads(note.read_text())["pid"]} if note.exists() else {}
    return pids(fleet, lease) | own


def test_the_servers_own_machine_is_a_member_of_a_gang(mixed_fleet: Fleet) -> None:
    lease = mixed_fleet.ask(f"cat >meet.py <<'END'\n{MEET}\nEND\npython3 meet.py", nodes=2)
    text, code = mixed_fleet.output(lease)
    assert sorted(nodes_of(lease)) == ["a", "own"]
    assert (text, code) == (f"rank 0 met 1={nodes_of(lease)[1]}\n", 0)
    wait_end(mixed_fleet, lease)
    assert own_pids(mixed_fleet, lease) == {}


@pytest.mark.parametrize("lost", ["a", "own"])
def test_a_gang_that_includes_the_servers_own_machine_ends_as_a_whole(
    mixed_fleet: Fleet, lost: str
) -> None:
    lease = mixed_fleet.ask("exec sleep 1000", nodes=2)
    until(lambda: mixed_fleet.state(lease) == "active")
    os.kill(own_pids(mixed_fleet, lease)[lost], signal.SIGKILL)
    assert f"node {lost}: it was killed by signal 9" in wait_end(mixed_fleet, lease)
    assert own_pids(mixed_fleet, lease) == {}


def test_a_gang_that_fails_on_one_node_leaves_nothing_behind(fleet: Fleet) -> None:
    spec = {"category": "service", "command": ["sh", "-c", "[ $RANK = 0 ] || exit 4; sleep 1000"]}
    wait_end(fleet, fleet.ask("", nodes=2, spec=spec))


def port_of(fleet: Fleet) -> str:
    return fleet.server.running.ws.rpartition(":")[2]


def test_gangs_and_commands_outlive_the_kill_of_server_and_agents(tmp_path: Path) -> None:
    seen, go = tmp_path / "seen", tmp_path / "go"
    with ExitStack() as agents:
        with serve_doomed_fleet(tmp_path, agents) as fleet:
            boxes = {each: fleet.agent(each, fleet.token()) for each in "ab"}
            gang = fleet.ask(STAYS.format(seen=seen), nodes=2)
            alone = fleet.ask(COUNTING.format(go=go)), fleet.ask("exec sleep 1000")
            for each in (gang, *alone):
                until(lambda lease=each: fleet.state(lease) == "active")
            boxes["b"].kill()
            kill(fleet.server)
        go.touch()
        before = pids(fleet, gang)
        with serve_fleet(tmp_path, "--port", port_of(fleet)) as fleet:
            fleet.agent("b")
            assert fleet.output(alone[0]) == COUNTED
            for each in (gang, alone[1]):
                until(lambda lease=each: fleet.state(lease) == "active")
            assert pids(fleet, gang) == before
            assert before.keys() == {"a", "b"}
            os.kill(before["b"], signal.SIGKILL)
            wait_end(fleet, gang)
            assert fleet.server.release(alone[1])["success"]
            wait_end(fleet, alone[1])
    assert sorted(seen.read_text().split()) == ["a", "b"]


@pytest.mark.parametrize("here", ["true", "false"])
def test_a_gang_with_the_servers_own_machine_outlives_the_kill_of_the_server(
    tmp_path: Path, here: str
) -> None:
    with ExitStack() as agents:
        with serve_doomed_fleet(tmp_path, agents, **OWN) as fleet:
            fleet.agent("a", fleet.token())
            register_own(fleet)
            gang = fleet.ask("exec sleep 1000", nodes=2)
            until(lambda: fleet.state(gang) == "active")
            kill(fleet.server)
        before = own_pids(fleet, gang)
        assert before.keys() == {"a", "own"}
        options = ("--port", port_of(fleet))
        with serve_fleet(tmp_path, *options, **OWN, MOORAGE_LOCAL_HERE=here) as fleet:
            until(lambda: fleet.listed()["a"]["connected"])
            until(lambda: fleet.state(gang) == "active")
            assert own_pids(fleet, gang) == before
            os.kill(before["own"], signal.SIGKILL)
            assert "node own: " in wait_end(fleet, gang)
    assert own_pids(fleet, gang) == {}
