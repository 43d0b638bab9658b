"""Tests of machines with agents: they join, run workloads, get lost and return.

Agents and server are processes, over loopback sockets. All agents are on one machine, so they
have names instead of the machine id. Each test has a separate cluster.
"""

import asyncio
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from subprocess import Popen
from typing import Any, NamedTuple

import pytest
from fleets import COUNTED, COUNTING, MOORED, Fleet, serve_fleet
from served import FIRST_FIT, MOORAGE, bearing, invoke, read_message, until
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from moorage.backends.agents import wire
from moorage.protocol.agent_socket import AGENT_PATH
from moorage.testing.daemon_process import serve_variables
from moorage_client.cli.exits import Exit

pytestmark = pytest.mark.heavy

TOKENS = {"MOORAGE_TOKENS": "ann:of-ann,ops:of-ops", "MOORAGE_OPERATORS": "ops"}
VARIABLES = {**TOKENS, "MOORAGE_BACKENDS": "local,memory"}
PAGE = 4_096
"""Bytes of the smallest possible buffer of a pipe."""


@pytest.fixture(scope="module")
def shared_fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with serve_fleet(tmp_path_factory.mktemp("server"), bearer="of-ops", **VARIABLES) as fleet:
        yield fleet


def complaint(fleet: Fleet, *more: str, data: str = "") -> str:
    """Run an agent `box` that retries; return the first line of its output."""
    command = fleet.command("box", *more, data=data)
    with Popen(command, stderr=subprocess.PIPE, text=True) as agent:
        assert agent.stderr is not None
        line = agent.stderr.readline()
        agent.kill()
    return line


def test_an_agent_whose_stdout_blocks_still_connects(fleet: Fleet) -> None:
    reader, writer = os.pipe()
    fcntl.fcntl(reader, fcntl.F_SETPIPE_SZ, PAGE)
    os.write(writer, b"." * PAGE)
    command = fleet.command("box", "--token", fleet.token())
    with (fleet.folder / "box.log").open("w") as log:
        agent = Popen(command, stdout=writer, stderr=log)
    try:
        until(lambda: fleet.listed().get("box", {}).get("connected"))
        assert fleet.output(fleet.ask("echo whole")) == ("whole\n", 0)
        agent.terminate()
        assert agent.wait(60) == 0
    finally:
        agent.kill()
        agent.wait()
        os.close(writer)
        os.close(reader)


def test_a_machine_joins_and_runs_the_workload_of_a_lease(fleet: Fleet) -> None:
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
    text, code = fleet.output(fleet.ask("seq 100000; exit 3"))
    assert (text, code) == ("".join(f"{number}\n" for number in range(1, 100_001)), 3)
    assert "used by another agent" in fleet.refused(fleet.command("other", "--token", token))


def test_the_option_unheard_seconds_ends_no_workload_of_a_connected_agent(fleet: Fleet) -> None:
    fleet.agent("box", fleet.token(), "--unheard-seconds", "1")
    assert fleet.output(fleet.ask("sleep 4; echo whole"))[0] == "whole\n"
    assert "unheard_seconds_short" in (fleet.folder / "box.log").read_text()


def test_an_agent_without_a_valid_token_or_key_is_refused(fleet: Fleet) -> None:
    assert "does not know this machine's" in fleet.refused(fleet.command("a", "--token", "no"))
    assert "has not joined" in fleet.refused(fleet.command("a"))
    http = fleet.server.running.http.replace("http", "ws", 1)
    assert "connect the WebSocket to port" in complaint(fleet, "--server", http, "--token", "no")
    with pytest.raises(InvalidStatus, match="401"):
        connect(fleet.server.running.ws + AGENT_PATH)


@pytest.mark.parametrize("address", ["nonsense", "http://127.0.0.1:1", "ws://"])
def test_an_invalid_server_address_is_refused_at_once(fleet: Fleet, address: str) -> None:
    said = fleet.refused(fleet.command("a", "--token", "t", "--server", address))
    assert "--server: expected ws://HOST:PORT" in said


@pytest.mark.parametrize(
    "words",
    [("--name", " "), ("--name", "a/b"), ("--name", "x" * 254), ("--address", "10.0.0.1,10.0.0.2")],
)
def test_a_name_or_address_of_another_machine_is_refused_at_once(
    fleet: Fleet, words: tuple[str, str]
) -> None:
    done = invoke(*fleet.command("a", "--token", "t", *words)[len(MOORED) :])
    assert done.returncode == 2
    assert f"{words[0]}: expected " in done.stderr


def test_a_token_of_an_agent_may_end_with_a_newline(fleet: Fleet) -> None:
    fleet.agent("line", f"{fleet.token()}\n")


@pytest.mark.parametrize("cluster", [" ", "a/b", "a\nb", "x" * 254])
def test_the_command_agent_token_needs_a_cluster(fleet: Fleet, cluster: str) -> None:
    made = invoke("agent", "token", "--cluster", cluster, "--data", fleet.data)
    assert (made.returncode, made.stdout) == (2, "")
    assert "--cluster: expected" in made.stderr


def test_a_copied_disk_and_a_taken_name_are_refused(fleet: Fleet) -> None:
    fleet.agent("box", fleet.token())
    assert "another agent runs over" in fleet.refused(fleet.command("box"))
    shutil.copytree(fleet.folder / "box", fleet.folder / "copy")
    name = f"{fleet.cluster}/box"
    assert f"an agent named {name} is connected already from 127.0.0.1" in complaint(
        fleet, data="copy"
    )
    other = complaint(fleet, "--token", fleet.token(), data="new")
    assert f"another machine is named {name} already" in other
    assert fleet.listed()["box"]["connected"]


@contextmanager
def running(fleet: Fleet, command: str) -> Iterator[Popen[str]]:
    """Yield a `moorage run` of a shell's command in the cluster."""
    wanted = ["--cluster", fleet.cluster, "--cpu-milli", "100", "--policy", FIRST_FIT]
    words = [MOORAGE, "run", *wanted, "--", "sh", "-c", command]
    server, state = fleet.server.running, str(fleet.folder / "leases.json")
    urls = {"MOORAGE_URL": server.ws, "MOORAGE_HTTP_URL": server.http, "MOORAGE_TOKEN": "of-ops"}
    pipe, variables = subprocess.PIPE, {**serve_variables(), **urls, "MOORAGE_STATE": state}
    with Popen(words, stdout=pipe, stderr=pipe, env=variables, text=True) as run:
        fleet.stack.callback(run.kill)
        yield run


def test_moorage_run_waits_for_a_machine_that_is_away(fleet: Fleet) -> None:
    agent = fleet.agent("box", fleet.token())
    with running(fleet, COUNTING.format(go=fleet.folder / "go")) as run:
        assert run.stdout is not None
        assert run.stderr is not None
        begun = run.stdout.readline()
        agent.kill()
        assert any("waiting: the machine box is not heard of since" in line for line in run.stderr)
        (fleet.folder / "go").touch()
        fleet.agent("box")
        assert (begun + run.stdout.read(), run.wait(60)) == COUNTED


def test_moorage_run_says_that_the_machine_ended_the_command_for_lack_of_contact(
    fleet: Fleet,
) -> None:
    agent = fleet.agent("box", fleet.token(), *UNHEARD)
    with running(fleet, "trap 'exit 3' TERM; echo begun; while :; do sleep 0.1; done") as run:
        assert run.stdout is not None
        assert run.stdout.readline() == "begun\n"
        agent.send_signal(signal.SIGSTOP)
        try:
            until(lambda: [*(fleet.folder / "box" / "local" / "running").glob("*/exit.json")])
        finally:
            agent.send_signal(signal.SIGCONT)
        _, errors = run.communicate(timeout=60)
    assert run.returncode == 3
    assert "its machine had not heard the server for too long" in errors.splitlines()[-1]


def test_an_agent_that_gets_many_end_signals_ends_cleanly(fleet: Fleet) -> None:
    agent = fleet.agent("box", fleet.token())
    while agent.poll() is None:
        agent.terminate()
    assert "Traceback" not in (fleet.folder / "box.log").read_text()


class Away(NamedTuple):
    """A machine with a stopped or dead agent, and a lease whose command writes to `seen`.

    A client follows the output.
    """

    fleet: Fleet
    agent: Popen[str]
    node: str
    lease: dict
    seen: Path
    follower: Popen[str]


UNHEARD = ("--unheard-seconds", "2")
WRITING = "while :; do echo $MOORAGE_NODE_ID >>{seen}; sleep 0.05; done"
# Names of machines, the command, the signal for the lease's agent, and the agent's options.
SCENES = {
    "stopped": ("ab", WRITING, signal.SIGSTOP, UNHEARD),
    "dead": ("ab", WRITING, signal.SIGKILL, UNHEARD),
    "alone": ("a", "echo $$ >>{seen}; sleep 1000", signal.SIGSTOP, UNHEARD),
    "ended": ("a", WRITING, signal.SIGSTOP, UNHEARD),
    "found": ("a", f"echo >{{seen}}; {COUNTING}", signal.SIGSTOP, ()),
}


@pytest.fixture(scope="module")
def away(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Away]]:
    """Machines of several clusters, all lost at the same time, since each loss takes seconds."""
    folder = tmp_path_factory.mktemp("lost")
    with serve_fleet(folder, MOORAGE_AGENT_LOST_SECONDS="12") as server, ExitStack() as stack:
        scenes = {}
        urls = {**os.environ, "MOORAGE_URL": server.server.running.ws, "MOORAGE_TOKEN": "of-ops"}
        for name, (nodes, command, _, options) in SCENES.items():
            (folder / name).mkdir()
            fleet = stack.enter_context(server.apart(folder / name))
            agents = {each: fleet.agent(each, fleet.token(), *options) for each in nodes}
            again = options and name != "ended"
            terms = {"on_failure": "requeue", "attempts_max": 2} if again else {}
            seen = folder / name / "seen"
            lease = fleet.ask(command.format(seen=seen, go=folder / name / "go"), **terms)
            node = lease["placement"][0]["node_id"]
            words = [MOORAGE, "logs", "-f", lease["id"], "--lease-token", lease["token"]]
            follower = stack.enter_context(Popen(words, env=urls, text=True))
            stack.callback(follower.kill)
            scenes[name] = Away(fleet, agents[node], node, lease, seen, follower)
        for each in scenes.values():
            until(lambda one=each: one.fleet.state(one.lease) == "active" and one.seen.exists())
        for name, each in scenes.items():
            each.agent.send_signal(SCENES[name][2])
        yield scenes
        for each in scenes.values():
            each.agent.send_signal(signal.SIGCONT)


def wait_phase(news: Any, lease: dict, phase: str) -> dict:
    """Wait for the news that the workload of a lease is in a phase; return the news."""
    while True:
        message = read_message(news)
        data = message["data"]
        if message["event"] == "workload" and (data["id"], data["phase"]) == (lease["id"], phase):
            return data


def test_a_command_keeps_running_while_its_machine_is_lost_and_found(away: dict[str, Away]) -> None:
    scene = away["found"]
    fleet, lease, name = scene.fleet, scene.lease, scene.node
    with fleet.server.watching("leases") as news:
        assert name in wait_phase(news, lease, "lost")["detail"]
    until(lambda: "unavailable" in fleet.node(name))
    expected = f"lost: the machine {name} is not heard of since 20"
    assert fleet.node(name)["unavailable"].startswith(expected)
    demand = {"clusters": [fleet.cluster], "resources": {"cpu_milli": 1}}
    refused = fleet.server.ask(FIRST_FIT, **demand, lease={"ttl_seconds": 9})
    assert refused["error"]["code"] == "no_capacity"
    assert "not heard of since" in fleet.server.moorage("fleet", fleet.cluster).stderr
    held = fleet.server.status(lease)
    assert (held["state"], held["workload"]["phase"]) == ("active", "lost")
    assert f"node {fleet.cluster}/{name} is lost: the machine {name} is not" in held["reason"]
    (why,) = fleet.server.say({"op": "why", "lease": lease["id"]})
    assert why["data"]["reason"] == held["reason"]
    until(lambda: fleet.now()["agents"]["lost"])
    now = fleet.now()
    assert name in [each["node_id"] for each in now["agents"]["first"]]
    assert fleet.cluster in [each["cluster_id"] for each in now["clusters_out"]]
    (dry,) = fleet.server.say({"op": "release", "lease": lease["id"], "dry_run": True})
    assert dry["reasons"]["stop_seconds"] == 10.0
    with fleet.server.watching("leases") as news:
        scene.agent.send_signal(signal.SIGCONT)
        wait_phase(news, lease, "ready")
    until(lambda: "unavailable" not in fleet.node(name))
    held = fleet.server.status(lease)
    assert (held["workload"]["phase"], held.get("reason")) == ("ready", None)
    (fleet.folder / "go").touch()
    assert fleet.output(lease) == COUNTED


@pytest.mark.parametrize("gone", ["stopped", "dead"])
def test_a_lease_moves_once_its_lost_machine_has_ended_its_workload(
    away: dict[str, Away], gone: str
) -> None:
    """The agent hangs or is dead; its deadline still ends the command, so none runs twice."""
    scene = away[gone]
    fleet, there = scene.fleet, scene.node
    other = "b" if there == "a" else "a"
    until(lambda: scene.seen.read_text().endswith(f"{other}\n"))
    scene.agent.send_signal(signal.SIGCONT)
    if gone == "dead":
        fleet.agent(there, None, *UNHEARD)
    until(lambda: "unavailable" not in fleet.node(there))
    assert scene.follower.poll() is None
    assert fleet.server.release(scene.lease)["success"]
    until(lambda: fleet.state(scene.lease) == "ended")
    nodes = scene.seen.read_text().split()
    assert nodes == sorted(nodes, reverse=there == "b"), "one after the other"


def test_a_reader_of_logs_learns_that_the_machine_ended_the_workload(away: dict[str, Away]) -> None:
    scene = away["ended"]
    assert scene.follower.wait(60) == Exit.LEASE_LOST
    assert "has ended its workloads" in scene.fleet.server.status(scene.lease)["reason"]


def test_a_requeued_lease_without_another_place_runs_again_on_its_node(
    away: dict[str, Away],
) -> None:
    scene = away["alone"]
    fleet, lease = scene.fleet, scene.lease
    until(lambda: fleet.state(lease) not in {"active", "failing"})
    assert len(scene.seen.read_text().split()) == 1
    scene.agent.send_signal(signal.SIGCONT)
    until(lambda: len(scene.seen.read_text().split()) == 2)
    until(lambda: fleet.state(lease) == "active")
    (answer,) = fleet.server.say({"op": "status", "request": lease["id"]})
    assert answer["lease"]["workload"]["attempt"] == 2
    first, _ = map(int, scene.seen.read_text().split())
    assert not Path(f"/proc/{first}").exists()


def test_an_agent_whose_limit_of_silence_is_too_long_is_refused(fleet: Fleet) -> None:
    line = complaint(fleet, "--token", fleet.token(), "--unheard-seconds", "51")
    assert "agent_lost_seconds, 60, must be 10 s longer" in line


def test_a_lost_machine_is_forgotten_and_may_join_again(fleet: Fleet) -> None:
    agent, name = fleet.agent("box", fleet.token()), f"{fleet.cluster}/box"
    lease, fails = fleet.ask("exec sleep 1000"), fleet.ask("exec sleep 1000")
    until(lambda: fleet.state(lease) == fleet.state(fails) == "active")
    assert f"{name} is connected" in invoke("agent", "forget", name, "--data", fleet.data).stderr
    by_operator = {"op": "forget", "cluster": fleet.cluster, "node": "box"}
    replies = fleet.server.say(by_operator, by_operator | {"node": "bo"})
    assert [each["error"]["code"] for each in replies] == ["conflict", "not_found"]
    agent.kill()
    assert fleet.server.release(lease)["success"]
    until(lambda: not fleet.listed()["box"]["connected"])
    assert fleet.state(lease) == "ending"  # The workload may still run.
    assert fleet.state(fails) == "active"
    assert "expected CLUSTER/NODE" in fleet.server.moorage("fleet", "forget", "box").stderr
    done = fleet.server.moorage("fleet", "forget", name)
    there = f"{lease['id']}, {fails['id']}"
    assert done.stdout == f"{name} is forgotten; 2 leases there: {there}\n"
    until(lambda: fleet.state(lease) == fleet.state(fails) == "ended")
    why = {"op": "status", "lease": fails["id"]}
    assert "an operator removed the machine" in fleet.server.say(why)[0]["lease"]["reason"]
    nodes = fleet.server.http.get(f"/clusters/{fleet.cluster}").json()["nodes"]["nodeData"]
    assert nodes == []
    assert "does not know this machine's" in fleet.refused(fleet.command("box"))
    agent = fleet.agent("box", fleet.token())
    folder = fleet.folder / "box" / "local" / "running"
    until(lambda: not any(folder.iterdir()))  # No lease has this workload any more.
    agent.terminate()
    until(lambda: not fleet.listed()["box"]["connected"])
    assert invoke("agent", "forget", name, "--data", fleet.data).returncode == 0
    lines = invoke("audit", "--what", "agent.*", "--json", "--data", fleet.data).stdout
    entries = [
        (each["what"], each["who"])
        for each in map(json.loads, lines.splitlines())
        if each["about"]["cluster"] == fleet.cluster
    ]
    me = f"uid {os.getuid()}"
    once = [("agent.token_created", me), ("agent.joined", "moored")]
    assert entries == [*once, ("agent.forgotten", "ops"), *once, ("agent.forgotten", me)]


def test_a_machine_that_was_forgotten_while_the_server_was_down_leaves_the_fleet(
    tmp_path: Path,
) -> None:
    with serve_fleet(tmp_path, **VARIABLES, bearer="of-ops") as fleet:
        agent, file = fleet.agent("box", fleet.token()), tmp_path / "pid"
        held = fleet.ask(f"trap '' TERM; echo $$ >{file}; while :; do sleep 0.05; done")
        until(lambda: file.exists() and fleet.state(held) == "active")
        agent.kill()
        until(lambda: not fleet.listed()["box"]["connected"])
    assert invoke("agent", "forget", "lab/box", "--data", fleet.data).returncode == 0
    assert not fleet.listed()
    again = invoke("agent", "forget", "lab/box", "--data", fleet.data)
    assert "no agent is named" in again.stderr
    with serve_fleet(tmp_path, **VARIABLES, bearer="of-ops") as fleet:
        fleet.agent("box", fleet.token())
        until(lambda: fleet.state(held) == "ended")
        # Workloads without a lease end slowly, and nothing starts meanwhile.
        lease = fleet.ask(f"[ -e /proc/$(cat {file}) ] && echo double || echo alone")
        assert fleet.output(lease) == ("alone\n", 0)
        until(lambda: "unavailable" not in fleet.node("box"))


def test_a_revoked_agent_is_disconnected(fleet: Fleet) -> None:
    agent = fleet.agent("box", fleet.token())
    key = json.loads((fleet.folder / "box" / "agent.json").read_text())["key"]
    done = invoke("agent", "revoke", f"{fleet.cluster}/box", "--data", fleet.data)
    assert done.returncode == 0
    with pytest.raises(InvalidStatus, match="401"):
        connect(fleet.server.running.ws + AGENT_PATH, additional_headers=bearing(key))
    assert agent.wait(60) == 3
    assert fleet.listed()["box"]["revoked"]
    until(lambda: "its agent is revoked" in fleet.node("box").get("unavailable", ""))


async def order(connection: ServerConnection, epoch: int) -> bool:
    """Welcome an agent as a server with an epoch; return whether the agent obeys an order."""
    await connection.recv()
    await connection.send(wire.encode(wire.AgentWelcome("lab", "box", "key", epoch, 60.0)))
    await connection.send(wire.encode(wire.AgentCall(1, wire.DiscoverOrder(), epoch)))
    try:
        while True:
            report = wire.decode_report(bytes(await connection.recv()))
            if not isinstance(report, wire.AgentMetrics):
                return isinstance(report, wire.AgentDone)
    except ConnectionClosed:
        return False


async def test_an_agent_refuses_an_earlier_epoch_of_the_server_also_after_a_restart(tmp_path: Path):
    epochs = iter([7, 6, 7, 8])
    done: asyncio.Queue[tuple[int, bool]] = asyncio.Queue()

    async def lead(connection: ServerConnection) -> None:
        epoch = next(epochs)
        await done.put((epoch, await order(connection, epoch)))

    async with asyncio.timeout(120), serve(lead, "127.0.0.1", 0) as server:
        url = f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        place = ["--server", url, "--data", str(tmp_path / "box"), "--token", "t"]
        command = [sys.executable, "-P", "-m", "moorage", "agent", *place, "--no-machine-id"]
        seen = []
        for connections in (1, 3):
            agent = await asyncio.create_subprocess_exec(
                *command, env=serve_variables(), stderr=asyncio.subprocess.PIPE
            )
            seen += [await done.get() for _ in range(connections)]
            agent.kill()
            _, errors = await agent.communicate()
    assert b"the server's epoch, 6, is older than 7" in errors
    assert seen == [(7, True), (6, False), (7, True), (8, True)]
