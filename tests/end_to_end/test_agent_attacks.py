"""Agents that misbehave, over raw sockets: the server refuses them in one sentence, and goes on."""

import json
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
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


def call(raw: ClientConnection, order: type) -> wire.AgentCall:
    """Return the next call with such an order."""
    while True:
        found = answer(raw)
        if isinstance(found, wire.AgentCall) and isinstance(found.order, order):
            return found


def done(call: wire.AgentCall, value: object) -> bytes:
    return wire.encode(wire.AgentDone(call.id, msgspec.Raw(wire.encode(value))))


def join(fleet: Fleet, raw: ClientConnection, name: str) -> None:
    """Come in as an agent that has nothing running."""
    raw.send(hello({**NODE, "id": name}, name))
    welcome = answer(raw)
    assert isinstance(welcome, wire.AgentWelcome), welcome
    raw.send(done(call(raw, wire.DiscoverOrder), []))
    until(lambda: fleet.listed().get(name, {}).get("connected"))


OTHER = {"type": "AgentHello", "version": 99, "release": "9.9", "more": [1]}
FIRST_FRAMES = [
    *((hello({**NODE, "id": name}), "name") for name in (None, "", " ", "a/b", "a\nb", 7, ["x"])),
    (hello({**NODE, "id": "n" * 2000}), "characters"),
    (msgspec.msgpack.encode(OTHER), "release 9.9) speaks version 99"),
    (msgspec.msgpack.encode(OTHER | {"version": 2}), "release 9.9) speaks version 2"),
    *((frame, "first frame") for frame in (b"", b"\xff\xff", "text")),
]


@pytest.mark.parametrize(("frame", "reason"), FIRST_FRAMES, ids=lambda value: repr(value)[:40])
def test_a_bad_first_frame_is_refused_in_a_sentence(fleet: Fleet, frame: bytes | str, reason: str):
    with dialled(fleet, fleet.token()) as raw:
        raw.send(frame)
        farewell = answer(raw)
    assert isinstance(farewell, wire.AgentFarewell), farewell
    assert reason in farewell.reason


def test_a_first_frame_that_is_too_large_cuts_the_connection(fleet: Fleet) -> None:
    with dialled(fleet, fleet.token()) as raw:
        with suppress(ConnectionClosed):
            raw.send(b"\0" * (9 << 20))
        with pytest.raises(ConnectionClosed):
            answer(raw)


def test_frames_that_are_none_cut_a_connection_and_nothing_else(fleet: Fleet) -> None:
    with dialled(fleet, fleet.token()) as raw:
        join(fleet, raw, "liar")
        raw.send(done(wire.AgentCall(10**6, wire.DiscoverOrder(), 0), 1))
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


def test_a_machine_that_has_joined_under_another_name_is_refused_with_what_to_do(fleet: Fleet):
    with dialled(fleet, fleet.token()) as first, dialled(fleet, fleet.token()) as second:
        first.send(hello({**NODE, "id": "m1", "machineId": "m"}, "m1"))
        assert isinstance(answer(first), wire.AgentWelcome)
        second.send(hello({**NODE, "id": "m2", "machineId": "m"}, "m2"))
        farewell = answer(second)
    assert isinstance(farewell, wire.AgentFarewell)
    assert farewell.reason.startswith("lab/m2 is the machine that is registered as lab/m1")
    assert "start this agent with --no-machine-id" in farewell.reason


def test_what_an_agent_says_of_a_workload_is_bounded(fleet: Fleet) -> None:
    with dialled(fleet, fleet.token()) as raw:
        join(fleet, raw, "talker")
        where = [{"key": "moorage/node", "operator": "In", "values": ["talker"]}]
        lease = fleet.server.ask(
            clusters=["lab"],
            resources={"cpu_milli": 1, "where": where},
            lease={"ttl_seconds": 600},
            provision={"backend": "local", "spec": {"category": "process", "command": ["true"]}},
        )["lease"]
        start = call(raw, wire.StartOrder)
        lines = ("y" * 100_000,) * 50
        long = WorkloadReport(lease["id"], Phase.FAILED, detail="x" * 1_000_000, log_tail=lines)
        raw.send(wire.encode(wire.AgentNews(long)))
        raw.send(done(start, long))
        raw.send(done(call(raw, wire.StatusOrder), long))
        raw.send(done(call(raw, wire.StopOrder), None))
        until(lambda: fleet.state(lease) == "ended")
        assert len(json.dumps(fleet.server.status(lease))) < 60_000


def test_a_command_that_writes_a_lot_is_bounded_and_holds_up_none(fleet: Fleet, tmp_path: Path):
    with fleet.apart(tmp_path) as wordy:
        wordy.agent("box", wordy.token())
        lease = wordy.ask("head -c 104857600 /dev/zero | tr '\\0' x; echo end; sleep 1000")
        until(lambda: wordy.state(lease) == "active")
        mine = {"lease": lease["id"], "token": lease["token"]}
        big = ["sh", "-c", "head -c 104857600 /dev/zero | tr '\\0' y"]
        (lot,) = wordy.server.say({"op": "exec", **mine, "command": big})
        assert len(lot["data"]["output"]) == 1024 * 1024
        (little,) = wordy.server.say({"op": "exec", **mine, "command": ["echo", "well"]})
        assert little["data"]["output"] == "well\n"
        read = {"op": "logs", **mine, "offset": -5}
        until(lambda: wordy.server.say(read)[0]["data"]["text"] == "xend\n")
        assert wordy.server.release(lease)["success"]
        until(lambda: wordy.state(lease) == "ended")


def test_an_agent_on_a_full_disk_stays_and_says_what_is_wrong(fleet, tmp_path, disk):
    data = str(disk)
    with fleet.apart(tmp_path) as full:
        agent = full.agent("box", full.token(), "--data", data)
        lease = full.ask("echo here; sleep 1000")
        until(lambda: full.state(lease) == "active")
        fill(disk / "filler")
        agent.terminate()
        agent.wait(60)
        until(lambda: not full.listed()["box"]["connected"])
        full.agent("box", None, "--data", data)
        assert full.state(lease) == "active"
        failed = full.ask("echo never")
        until(lambda: full.state(failed) == "ended")
        assert "No space left on device" in full.server.status(failed)["reason"]
        assert full.server.release(lease)["success"]
        until(lambda: full.state(lease) == "ended")
        (disk / "filler").unlink()
        assert full.output(full.ask("echo again"))[0] == "again\n"
