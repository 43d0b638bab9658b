"""Agents that misbehave, over raw sockets: the server refuses them in one sentence, and goes on."""

import json
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from disks import fill
from fleets import Fleet, served
from served import until
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from moorage.backends.agents import wire
from moorage.backends.base import Phase, WorkloadReport
from moorage.protocol.agent_socket import AGENT_PATH

pytestmark = pytest.mark.heavy

NODE = {"vcpus": {"count": 1}, "memory": 1024}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with served(tmp_path_factory.mktemp("attacks")) as fleet:
        yield fleet


@contextmanager
def dialled(fleet: Fleet, secret: str) -> Iterator[ClientConnection]:
    headers = {"Authorization": f"Bearer {secret}"}
    url = fleet.server.running.ws + AGENT_PATH
    with connect(url, additional_headers=headers, max_size=None) as raw:
        yield raw


def hello(node: dict, agent: str = "x", version: int = wire.VERSION) -> bytes:
    return wire.encode(wire.AgentHello(version, "9.9", agent, node, 0.0, {}))


def answer(raw: ClientConnection) -> wire.Instruction:
    return wire.decode_instruction(raw.recv(30))


def join(fleet: Fleet, raw: ClientConnection, name: str) -> None:
    """Come in as an agent that has nothing running."""
    raw.send(hello({**NODE, "id": name}, name))
    welcome = answer(raw)
    assert isinstance(welcome, wire.AgentWelcome), welcome
    call = answer(raw)
    assert isinstance(call, wire.AgentCall)
    assert isinstance(call.order, wire.DiscoverOrder)
    raw.send(wire.encode(wire.AgentDone(call.id, msgspec.Raw(wire.encode([])))))


@pytest.mark.parametrize("name", [None, "", " ", "a/b", "a\nb", 7, ["x"], "n" * 2000])
def test_a_machine_without_a_good_name_is_refused(fleet: Fleet, name: object) -> None:
    with dialled(fleet, fleet.token()) as raw:
        raw.send(hello({**NODE, "id": name}))
        farewell = answer(raw)
    assert isinstance(farewell, wire.AgentFarewell), farewell
    assert "name" in farewell.reason or "characters" in farewell.reason


def test_an_agent_of_another_protocol_is_refused_by_its_version(fleet: Fleet) -> None:
    other = {"type": "AgentHello", "version": 99, "release": "9.9", "more": [1]}
    with dialled(fleet, fleet.token()) as raw:
        raw.send(msgspec.msgpack.encode(other))
        farewell = answer(raw)
    assert isinstance(farewell, wire.AgentFarewell)
    assert "release 9.9) speaks version 99" in farewell.reason


@pytest.mark.parametrize("frame", [b"", b"\xff\xff", "text", b"\0" * (9 << 20)])
def test_a_first_frame_that_is_none_is_refused(fleet: Fleet, frame: bytes | str) -> None:
    with dialled(fleet, fleet.token()) as raw:
        try:
            raw.send(frame)
            farewell = answer(raw)
        except ConnectionClosed:
            assert len(frame) > 8 << 20
            return
    assert isinstance(farewell, wire.AgentFarewell)
    assert "first frame" in farewell.reason


def test_frames_that_are_none_cut_a_connection_and_nothing_else(fleet: Fleet) -> None:
    with dialled(fleet, fleet.token()) as raw:
        join(fleet, raw, "liar")
        until(lambda: fleet.listed()["liar"]["connected"])
        raw.send(wire.encode(wire.AgentDone(10**6, msgspec.Raw(wire.encode(1)))))
        raw.send(wire.encode(wire.AgentNews(WorkloadReport("no-such", Phase.FAILED))))
        raw.send(b"\x93\x01")
        with pytest.raises(ConnectionClosed):
            deque(raw, 0)
    until(lambda: not fleet.listed()["liar"]["connected"])
    assert fleet.server.http.get("/healthz").status_code == 200


def test_a_token_used_by_two_at_the_same_time_lets_one_in(fleet: Fleet) -> None:
    token = fleet.token()
    with dialled(fleet, token) as first, dialled(fleet, token) as second:
        first.send(hello({**NODE, "id": "one"}, "one"))
        second.send(hello({**NODE, "id": "two"}, "two"))
        kinds = {type(answer(first)), type(answer(second))}
    assert kinds == {wire.AgentWelcome, wire.AgentFarewell}
    nodes = fleet.server.http.get("/clusters/lab").json()["nodes"]["nodeData"]
    until(lambda: len({each["id"] for each in nodes} & {"one", "two"}) == 1)


def test_what_an_agent_says_of_a_workload_is_bounded(fleet: Fleet) -> None:
    with dialled(fleet, fleet.token()) as raw:
        join(fleet, raw, "talker")
        until(lambda: any(each == "talker" for each in fleet.listed()))
        until(lambda: fleet.listed()["talker"]["connected"])
        lease = fleet.server.ask(
            clusters=["lab"],
            resources={
                "cpu_milli": 1,
                "where": [{"key": "moorage/node", "operator": "In", "values": ["talker"]}],
            },
            lease={"ttl_seconds": 600},
            provision={"backend": "local", "spec": {"category": "process", "command": ["true"]}},
        )["lease"]
        order = answer(raw)
        while not (isinstance(order, wire.AgentCall) and isinstance(order.order, wire.StartOrder)):
            order = answer(raw)
        lines = ("y" * 100_000,) * 50
        long = WorkloadReport(lease["id"], Phase.FAILED, detail="x" * 1_000_000, log_tail=lines)
        raw.send(wire.encode(wire.AgentNews(long)))
        raw.send(wire.encode(wire.AgentDone(order.id, msgspec.Raw(wire.encode(long)))))
        why = {"op": "status", "lease": lease["id"]}
        until(lambda: fleet.state(lease) not in {"starting", "active"})
        assert len(json.dumps(fleet.server.say(why)[0])) < 60_000


def test_a_command_that_writes_a_lot_is_bounded_and_holds_up_none(tmp_path: Path) -> None:
    with served(tmp_path) as fleet:
        check_bounds_of_output(fleet)


def check_bounds_of_output(fleet: Fleet) -> None:
    fleet.agent("wordy", fleet.token())
    lease = fleet.ask("head -c 104857600 /dev/zero | tr '\\0' x; echo end; sleep 1000")
    until(lambda: fleet.state(lease) == "active")
    message = {"op": "exec", "lease": lease["id"], "token": lease["token"]}
    big = ["sh", "-c", "head -c 104857600 /dev/zero | tr '\\0' y"]
    (done,) = fleet.server.say(message | {"command": big})
    size = len(done["data"]["output"])
    assert size == 1024 * 1024
    (done,) = fleet.server.say(message | {"command": ["echo", "well"]})
    assert done["data"]["output"] == "well\n"
    read = {"op": "logs", "lease": lease["id"], "token": lease["token"], "offset": -5}
    until(lambda: fleet.server.say(read)[0]["data"]["text"] == "xend\n")
    assert fleet.server.release(lease)["success"]


def test_an_agent_on_a_full_disk_stays_and_says_what_is_wrong(tmp_path: Path, disk: Path) -> None:
    with served(tmp_path) as fleet:
        data = str(disk)
        token = fleet.token()
        agent = fleet.agent("box", token, "--data", data)
        lease = fleet.ask("echo here; sleep 1000")
        until(lambda: fleet.state(lease) == "active")
        fill(disk / "filler")
        agent.terminate()
        until(lambda: not fleet.listed()["box"]["connected"])
        fleet.agent("box", None, "--data", data)
        assert fleet.state(lease) == "active"
        failed = fleet.ask("echo never")
        until(lambda: fleet.state(failed) == "ended")
        why = fleet.server.say({"op": "status", "lease": failed["id"]})[0]["lease"]["reason"]
        assert "No space left on device" in why
        assert fleet.server.release(lease)["success"]
        until(lambda: fleet.state(lease) == "ended")
        (disk / "filler").unlink()
        assert fleet.output(fleet.ask("echo again"))[0] == "again\n"
