"""Agents over raw sockets misbehave, or find their machine registered by a tenant.

The server refuses a misbehaving agent with one sentence, and continues.
"""

import json
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import pytest
from disks import fill
from fleets import Fleet, serve_fleet
from served import bearing, invoke, until
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from moorage.backends.agents import wire
from moorage.backends.base import Phase, WorkloadReport
from moorage.catalog.limits import NODES_PER_CLUSTER_MAX
from moorage.protocol.agent_socket import AGENT_PATH

pytestmark = pytest.mark.heavy

NODE = {"vcpus": {"count": 1}, "memory": 1024}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    tokens = {"MOORAGE_TOKENS": "ann:of-ann,ops:of-ops", "MOORAGE_OPERATORS": "ops"}
    with serve_fleet(tmp_path_factory.mktemp("attacks"), bearer="of-ops", **tokens) as fleet:
        yield fleet


@contextmanager
def dial(fleet: Fleet, secret: str) -> Iterator[ClientConnection]:
    headers = {"Authorization": f"Bearer {secret}"}
    url = fleet.server.running.ws + AGENT_PATH
    with connect(url, additional_headers=headers, max_size=None) as raw:
        yield raw


def hello(node: dict, agent: str = "x", folder: wire.AgentFolder | None = None) -> bytes:
    return wire.encode(wire.AgentHello(wire.VERSION, "9.9", agent, node, 0.0, {}, folder))


def answer(raw: ClientConnection) -> wire.Instruction:
    return wire.decode_instruction(raw.recv(30))


def call(raw: ClientConnection, order: type) -> wire.AgentCall:
    """Return the server's next call whose order has the given type; skip other calls."""
    while True:
        found = answer(raw)
        if isinstance(found, wire.AgentCall) and isinstance(found.order, order):
            return found


def done_frame(call: wire.AgentCall, value: object) -> bytes:
    return wire.encode(wire.AgentDone(call.id, msgspec.Raw(wire.encode(value))))


def join(fleet: Fleet, raw: ClientConnection, name: str, **node: object) -> str:
    """Join as an agent that runs no workloads; return its key."""
    raw.send(hello({**NODE, "id": name, **node}, name))
    welcome = answer(raw)
    assert isinstance(welcome, wire.AgentWelcome), welcome
    raw.send(done_frame(call(raw, wire.DiscoverOrder), []))
    until(lambda: fleet.listed().get(name, {}).get("connected"))
    return welcome.key


DEEP = msgspec.Raw(b"\x91" * 100_000 + b"\xc0")


def raw_hello(node: object, **fields: object) -> bytes:
    """Return a hello with values that no real agent sends."""
    own = {"release": "9.9", "agent": "x", "unheard_seconds": 0.0, "busy": {}}
    about = {"type": "AgentHello", "version": wire.VERSION, "node": node}
    return msgspec.msgpack.encode(about | own | fields)


def device_hello(*devices: object) -> bytes:
    node = {**NODE, "id": "d", "gpus": {"count": len(devices), "gpus": devices}}
    return raw_hello(node, busy={"a": "used", "": "used"})


OTHER = {"type": "AgentHello", "version": 99, "release": "9.9", "more": [1]}
FIRST_FRAMES = [
    *((hello({**NODE, "id": name}), "name") for name in (None, "", " ", "a/b", "a\nb", 7, ["x"])),
    (hello({**NODE, "id": "n" * 2000}), "characters"),
    (msgspec.msgpack.encode(OTHER), "release 9.9) speaks version 99"),
    (msgspec.msgpack.encode(OTHER | {"version": 2}), "release 9.9) speaks version 2"),
    *((frame, "first frame") for frame in (b"", b"\xff\xff", "text", b"\x81\xa1\xff\xa1x")),
    *((raw_hello(NODE, unheard_seconds=each), ">= 0") for each in (-5.0, float("-inf"))),
    *((raw_hello(NODE, agent=each), "$.agent") for each in ("x" * 9_000, "\x1b[2J")),
    (raw_hello(NODE, release="\x1b[2J"), "$.release"),
    (raw_hello({**NODE, "id": "deep", "more": DEEP}), "first frame"),
    (raw_hello({**NODE, "id": "d", "more": msgspec.Raw(b"\x91" * 500 + b"\xc0")}), "128 arrays"),
    (raw_hello({**NODE, "id": "\xff", "rack": msgspec.Raw(b"\xa1\xff")}), "utf-8"),
    (device_hello(5, {"uuid": "a"}), "gpus.gpus[0]"),
    (device_hello({"uuid": "a"}, {"uuid": "b", "memory": "much"}), "memory"),
]


@pytest.mark.parametrize(("frame", "reason"), FIRST_FRAMES, ids=lambda value: repr(value)[:40])
def test_a_bad_first_frame_of_an_agent_is_refused_with_an_error(
    fleet: Fleet, frame: bytes | str, reason: str
):
    with dial(fleet, fleet.token()) as raw:
        raw.send(frame)
        farewell = answer(raw)
    assert isinstance(farewell, wire.AgentFarewell), farewell
    assert reason in farewell.reason.lower()


def test_a_first_frame_that_is_too_large_cuts_the_connection_of_the_agent(fleet: Fleet) -> None:
    with dial(fleet, fleet.token()) as raw:
        with suppress(ConnectionClosed):
            raw.send(b"\0" * (9 << 20))
        with pytest.raises(ConnectionClosed):
            answer(raw)


def test_malformed_frames_of_an_agent_cut_only_the_connection_of_this_agent(fleet: Fleet) -> None:
    with dial(fleet, fleet.token()) as raw:
        join(fleet, raw, "liar")
        raw.send(done_frame(wire.AgentCall(10**6, wire.DiscoverOrder(), 0), 1))
        raw.send(wire.encode(wire.AgentNews(WorkloadReport("no-such", Phase.FAILED))))
        raw.send(b"\x93\x01")
        with pytest.raises(ConnectionClosed):
            deque(raw, 0)
    until(lambda: not fleet.listed()["liar"]["connected"])
    assert fleet.server.http.get("/healthz").status_code == 200


def test_a_deep_or_binary_frame_of_an_agent_cuts_only_the_connection_of_this_agent(
    fleet: Fleet,
) -> None:
    whole = {"type": "AgentDone", "id": 1}
    for name, value in (("depth", DEEP), ("letters", msgspec.Raw(b"\xa1\xff"))):
        with dial(fleet, fleet.token()) as raw:
            raw.send(hello({**NODE, "id": name}, name))
            assert call(raw, wire.DiscoverOrder).id == 1
            raw.send(msgspec.msgpack.encode(whole | {"value": value}))
            with pytest.raises(ConnectionClosed):
                deque(raw, 0)
    assert fleet.server.http.get("/healthz").status_code == 200


def test_huge_measurements_are_left_out_and_a_device_needs_no_uuid(fleet: Fleet) -> None:
    gpu = {"modelName": "T4", "memory": 16_000}
    with dial(fleet, fleet.token()) as raw:
        join(fleet, raw, "huge", gpus={"count": 1, "gpus": [gpu]})
        groups = {"memory": {"used": 1.7e308, "total": 3.0}}
        gpus = [{"gpu_id": 1e308, "power": 2.0}]
        raw.send(wire.encode(wire.AgentMetrics(groups, gpus, {"": "used"}, 1.0)))

        def shown() -> dict:
            found = fleet.server.http.get("/cluster/lab").json().get("data", {}).get("nodes", [])
            return next((each for each in found if each["id"] == "huge"), {})

        until(lambda: shown().get("memory") == {"total": 3.0})
        assert shown()["gpus"] == [{"gpu_id": 0, "power": 2.0}]
        assert fleet.listed()["huge"]["connected"]


def test_a_token_that_is_used_twice_at_the_same_time_admits_one_agent(fleet: Fleet) -> None:
    token = fleet.token()
    with dial(fleet, token) as first, dial(fleet, token) as second:
        first.send(hello({**NODE, "id": "one"}, "one"))
        second.send(hello({**NODE, "id": "two"}, "two"))
        kinds = {type(answer(first)), type(answer(second))}
    assert kinds == {wire.AgentWelcome, wire.AgentFarewell}
    nodes = fleet.server.http.get("/clusters/lab").json()["nodes"]["nodeData"]
    until(lambda: len({each["id"] for each in nodes} & {"one", "two"}) == 1)


FIRST = wire.AgentFolder(5, ("02:aa", "02:bb"), "boot 1")
FOLDERS = {
    "copied": (wire.AgentFolder(6, FIRST.addresses), wire.AgentFarewell),
    "cloned": (wire.AgentFolder(5, ("02:cc",)), wire.AgentFarewell),
    "same": (FIRST, wire.AgentWelcome),
    "repaired": (wire.AgentFolder(5, ("02:bb", "02:cc")), wire.AgentWelcome),
    "copied on the machine": (wire.AgentFolder(6, FIRST.addresses, FIRST.boot), wire.AgentFarewell),
    "copied elsewhere": (wire.AgentFolder(6, ("02:cc",), "boot 2"), wire.AgentFarewell),
    "restored before a restart": (
        wire.AgentFolder(6, FIRST.addresses, "boot 2"),
        wire.AgentWelcome,
    ),
    "other network cards while it runs": (
        wire.AgentFolder(5, ("02:cc",), FIRST.boot),
        wire.AgentWelcome,
    ),
    "unknown": (wire.AgentFolder(), wire.AgentWelcome),
    "earlier release": (None, wire.AgentWelcome),
}


@pytest.mark.parametrize("case", FOLDERS)
def test_only_an_agent_with_the_same_data_folder_takes_the_place_of_an_agent(
    apart: Fleet, case: str
) -> None:
    folder, expected = FOLDERS[case]
    secret = apart.token()
    for shown, kind in ((FIRST, wire.AgentWelcome), (folder, expected), (FIRST, wire.AgentWelcome)):
        with dial(apart, secret) as raw:
            raw.send(hello({**NODE, "id": "box"}, "box", shown))
            said = answer(raw)
        assert isinstance(said, kind), said
        until(lambda: not apart.listed()["box"]["connected"])
        if isinstance(said, wire.AgentFarewell):
            assert said.final
            assert f"`moored agent forget {apart.cluster}/box`" in said.reason
        else:
            secret = said.key or secret


def test_a_machine_that_joined_under_another_name_is_refused_with_a_remedy(fleet: Fleet):
    with dial(fleet, fleet.token()) as first, dial(fleet, fleet.token()) as second:
        first.send(hello({**NODE, "id": "m1", "machineId": "m"}, "m1"))
        assert isinstance(answer(first), wire.AgentWelcome)
        second.send(hello({**NODE, "id": "m2", "machineId": "m"}, "m2"))
        farewell = answer(second)
    assert isinstance(farewell, wire.AgentFarewell)
    assert farewell.reason.startswith("lab/m2 is the machine that is registered as lab/m1")
    assert "start this agent with --no-machine-id" in farewell.reason


def test_reports_of_an_agent_on_a_workload_are_bounded(fleet: Fleet) -> None:
    with dial(fleet, fleet.token()) as raw:
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
        raw.send(done_frame(start, long))
        raw.send(done_frame(call(raw, wire.StatusOrder), long))
        raw.send(done_frame(call(raw, wire.StopOrder), None))
        until(lambda: fleet.state(lease) == "ended")
        assert len(json.dumps(fleet.server.status(lease))) < 60_000


def test_the_output_of_a_command_on_an_agent_is_bounded_and_delays_no_other_request(
    fleet: Fleet, tmp_path: Path
):
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


def test_an_agent_on_a_full_disk_keeps_running_and_reports_it(fleet, tmp_path, disk):
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


GPU = {"count": 1, "gpus": [{"modelName": "L4", "memory": 24_000, "uuid": "GPU-aa"}]}


@pytest.fixture
def apart(fleet: Fleet, tmp_path: Path) -> Iterator[Fleet]:
    with fleet.apart(tmp_path) as apart:
        yield apart


def register(fleet: Fleet, who: str, cluster: str, *nodes: dict) -> tuple[int, str]:
    """Register nodes of a cluster by hand; return the status and the answer."""
    document = {
        "id": cluster,
        "status": "live",
        "nodes": {"nodeData": [{**NODE, **n} for n in nodes]},
    }
    path, headers = f"/clusters/{cluster}", bearing(who)
    answer = fleet.server.http.post("/clusters", json=document, headers=headers)
    if answer.status_code == 409 and "exists" in answer.text:
        answer = fleet.server.http.put(path, json=document, headers=headers)
    return answer.status_code, answer.text


def names(fleet: Fleet, cluster: str) -> set[str]:
    nodes = fleet.server.http.get(f"/clusters/{cluster}").json()["nodes"]["nodeData"]
    return {each["id"] for each in nodes}


def displaced(fleet: Fleet) -> list[tuple[str, str]]:
    """Return the nodes that agents of a cluster have replaced, each with its tenant."""
    lines = invoke("audit", "--what", "agent.displaced", "--json", "--data", fleet.data).stdout
    entries = [json.loads(line) for line in lines.splitlines()]
    return [
        (each["before"], each["about"]["tenant"])
        for each in entries
        if each["about"]["cluster"] == fleet.cluster
    ]


@pytest.mark.parametrize("same", [{"machineId": "m1"}, {"providerId": "aws:///i-1"}, {"gpus": GPU}])
def test_an_agent_takes_its_machine_over_from_the_tenant_that_registered_it(
    apart: Fleet, same: dict
):
    mine = f"mine-{apart.cluster}"
    squat = {"id": "x", **same}
    assert register(apart, "of-ann", mine, {"id": "own"}, squat)[0] == 201
    with dial(apart, apart.token()) as raw:
        join(apart, raw, "box", **same)
        assert (names(apart, mine), names(apart, apart.cluster)) == ({"own"}, {"box"})
        assert displaced(apart) == [(f"{mine}/x", "ann")]
        status, reason = register(apart, "of-ann", mine, {"id": "own"}, squat)
        assert (status, f"registered as {apart.cluster}/box" in reason) == (409, True), reason
        assert "ask an operator" in reason
        assert register(apart, "of-ann", mine, {"id": "own"})[0] == 200
    apart.server.http.delete(f"/clusters/{apart.cluster}")


def test_an_agent_takes_its_name_and_its_cluster_over_from_other_tenants(apart: Fleet) -> None:
    """The devices may also be registered under other names."""
    here, ann = f"/clusters/{apart.cluster}", bearing("of-ann")
    squats = [{"id": "box", "machineId": "false"}, {"id": "x", "machineId": "m2"}, {"id": "y"}]
    assert register(apart, "of-ann", apart.cluster, *squats)[0] == 201
    with dial(apart, apart.token()) as raw, dial(apart, apart.token()) as other:
        join(apart, raw, "box", machineId="m2", gpus=GPU)
        join(apart, other, "y")
        assert names(apart, apart.cluster) == {"box", "y"}
        assert apart.node("box")["machineId"] == "m2"
        taken = [f"{apart.cluster}/{each}" for each in ("x", "box", "y")]
        assert displaced(apart) == [(each, "ann") for each in taken]
        metrics = {"clusterId": apart.cluster, "nodes": []}
        for answer in (
            apart.server.http.put(here, json={"nodes": {"nodeData": []}}, headers=ann),
            apart.server.http.post(f"{here}/nodes", json={"id": apart.cluster}, headers=ann),
            apart.server.http.delete(here, headers=ann),
            apart.server.http.post("/cluster", json=metrics, headers=ann),
        ):
            assert answer.status_code == 403, answer.text
            assert "which the server maintains" in answer.text
        assert names(apart, apart.cluster) == {"box", "y"}


def test_an_agent_that_a_full_cluster_refuses_is_told_the_remedy(apart: Fleet) -> None:
    squats = [{"id": f"n{number}"} for number in range(NODES_PER_CLUSTER_MAX)]
    assert register(apart, "of-ann", apart.cluster, *squats)[0] == 201
    token = apart.token()
    with dial(apart, token) as raw:
        raw.send(hello({**NODE, "id": "box"}, "box"))
        farewell = answer(raw)
    assert isinstance(farewell, wire.AgentFarewell)
    assert "the tenant ann registered (`moorage fleet delete " in farewell.reason
    assert apart.server.http.delete(f"/clusters/{apart.cluster}").is_success, "operators may do so"
    with dial(apart, token) as raw:
        join(apart, raw, "box")


@pytest.mark.parametrize("shut", [{"status": "retired"}, {"unavailable": "no"}])
def test_no_tenant_can_exclude_a_machine_with_an_agent_from_placement(apart: Fleet, shut: dict):
    here = f"/clusters/{apart.cluster}"
    ann = bearing("of-ann")
    own = {"id": apart.cluster, "nodes": {"nodeData": [{**NODE, "id": "own"}]}, **shut}
    assert apart.server.http.post("/clusters", json=own, headers=ann).status_code == 201
    wanted = {"clusters": [apart.cluster], "resources": {"cpu_milli": 1000}, "lease": {}}
    assert not apart.server.ask(**wanted)["success"]
    with dial(apart, apart.token()) as raw, dial(apart, apart.token()) as other:
        join(apart, raw, "box")
        ((field, said),) = shut.items()
        assert displaced(apart) == [(f"{apart.cluster} ({field}: {said})", "ann")]
        until(lambda: apart.server.ask(**wanted)["success"])
        assert apart.server.http.put(here, json=shut, headers=ann).status_code == 403
        assert apart.server.http.put(here, json=shut).status_code == 200, "operators may do so"
        join(apart, other, "box2")
        assert not apart.server.ask(**wanted)["success"]
        assert len(displaced(apart)) == 1


def test_a_lease_on_a_machine_that_an_agent_takes_over_lasts_until_the_lease_ends(
    apart: Fleet,
) -> None:
    mine = f"mine-{apart.cluster}"
    register(apart, "of-ann", mine, {"id": "x", "machineId": "m3"})
    whole = {"resources": {"memory_mib": 1024}, "lease": {"ttl_seconds": 600}}
    lease = apart.server.ask(clusters=[mine], **whole)["lease"]
    with dial(apart, apart.token()) as raw:
        join(apart, raw, "box", machineId="m3")
        assert displaced(apart) == [(f"{mine}/x", "ann")]
        assert apart.state(lease) == "granted"
        again = apart.server.ask(clusters=[apart.cluster], **whole)
        assert not again["success"], "the machine is leased"
        assert apart.server.release(lease)["success"]
        until(lambda: apart.server.ask(clusters=[apart.cluster], **whole)["success"])


def test_an_agent_takes_over_devices_that_it_finds_later(apart: Fleet) -> None:
    mine = f"mine-{apart.cluster}"
    with dial(apart, apart.token()) as raw:
        key = join(apart, raw, "box")
    until(lambda: not apart.listed()["box"]["connected"])
    assert register(apart, "of-ann", mine, {"id": "x", "machineId": "m4"})[0] == 201
    with dial(apart, key) as raw:
        join(apart, raw, "box", machineId="m4")
        until(lambda: names(apart, mine) == set())
        until(lambda: apart.node("box").get("machineId") == "m4")


def test_no_agent_takes_over_the_machine_of_another_agent(apart: Fleet, tmp_path: Path) -> None:
    register(apart, "of-ann", apart.cluster, {"id": "hers"})  # The cluster is also ann's.
    with dial(apart, apart.token()) as raw:
        join(apart, raw, "box", machineId="m5")
    until(lambda: not apart.listed()["box"]["connected"])
    with apart.apart(tmp_path, f"other-{apart.cluster}") as other:
        for fleet, name, reason in (
            (apart, "hers", "is the machine that is registered as"),
            (apart, "box", "another machine is named"),
            (other, "box", f"registered as {apart.cluster}/box"),
        ):
            with dial(fleet, fleet.token()) as raw:
                raw.send(hello({**NODE, "id": name, "machineId": "m5"}, "thief"))
                farewell = answer(raw)
            assert isinstance(farewell, wire.AgentFarewell), farewell
            assert reason in farewell.reason
    assert names(apart, apart.cluster) == {"box", "hers"}
    assert displaced(apart) == []
