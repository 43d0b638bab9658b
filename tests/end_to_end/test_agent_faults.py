"""Tests of agents under faults of network, clocks, releases and storage."""

import asyncio
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import msgspec
import pytest
from cut_proxy import cut_proxy
from fleets import COUNTED, COUNTING, Fleet, serve_fleet
from served import CONTEXT, bearing, invoke, until
from test_clocks import SHIFTED
from test_slow_readers import UPGRADE
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from moorage.backends.agents import wire
from moorage.protocol import messages
from moorage.protocol.agent_socket import AGENT_PATH
from moorage.testing.daemon_process import serve_variables

pytestmark = pytest.mark.heavy

TOKENS = {"MOORAGE_TOKENS": "ann:of-ann,ops:of-ops", "MOORAGE_OPERATORS": "ops"}
VARIABLES = {**TOKENS, "MOORAGE_AGENT_LOST_SECONDS": "3"}
DAY = 86_400.0
LINES = 100
"""Number of lines that a command writes in 5 s: a machine may be disconnected for less."""


@pytest.fixture(scope="module")
def shared_fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("server")
    with serve_fleet(folder, bearer="of-ops", **VARIABLES) as fleet:
        yield fleet


def test_a_partitioned_machine_returns_with_its_workloads(fleet: Fleet) -> None:
    with cut_proxy(urlsplit(fleet.server.running.ws).port) as proxy:
        fleet.agent("box", fleet.token(), "--server", proxy.url)
        lease = fleet.ask(COUNTING.format(go=fleet.folder / "go"))
        until(lambda: fleet.state(lease) == "active")
        proxy.passes.clear()
        until(lambda: "unavailable" in fleet.node("box"))
        assert fleet.state(lease) == "active"
        (fleet.folder / "go").touch()
        proxy.passes.set()
        until(lambda: "unavailable" not in fleet.node("box"))
        assert fleet.output(lease) == COUNTED
    assert " s after the server's last message" in (fleet.folder / "box.log").read_text()


def test_a_copied_folder_ends_no_lease_of_a_stuck_agent(fleet: Fleet) -> None:
    agent = fleet.agent("box", fleet.token())
    lease = fleet.ask(COUNTING.format(go=fleet.folder / "go"))
    until(lambda: fleet.state(lease) == "active")
    agent.send_signal(signal.SIGSTOP)
    try:
        shutil.copytree(fleet.folder / "box", fleet.folder / "copy")
        said = fleet.refused(fleet.command("box", data="copy"))
        assert f"is not the one with which {fleet.cluster}/box joined" in said
    finally:
        agent.send_signal(signal.SIGCONT)
    (fleet.folder / "go").touch()
    assert fleet.output(lease) == COUNTED


def test_changes_of_clocks_lose_no_machine_and_end_no_workload(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "sitecustomize.py").write_text(SHIFTED)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    for name in ("server", "box"):
        (tmp_path / f"{name}.off").write_bytes(struct.pack("d", 0.0))
    monkeypatch.setenv("CALENDAR", str(tmp_path / "server.off"))
    with serve_fleet(tmp_path, MOORAGE_AGENT_LOST_SECONDS="12") as fleet:
        monkeypatch.setenv("CALENDAR", str(tmp_path / "box.off"))
        fleet.agent("box", fleet.token(), "--unheard-seconds", "2")
        seen = tmp_path / "seen"
        lease = fleet.ask(f"while :; do echo $$ >>{seen}; sleep 0.05; done")
        until(seen.exists)
        for server, box in ((DAY, -DAY), (-DAY, DAY)):
            for name, off in (("server", server), ("box", box)):
                with (tmp_path / f"{name}.off").open("r+b") as file:  # It is mapped: keep its size.
                    file.write(struct.pack("d", off))
            before = len(seen.read_text().split())
            until(lambda begun=before: len(seen.read_text().split()) > begun + LINES)
            assert fleet.state(lease) == "active"
            assert "unavailable" not in fleet.node("box")
        assert len(set(seen.read_text().split())) == 1, "the process was not restarted"
        log = (tmp_path / "box.log").read_text()
        assert "agent_disconnected" not in log


async def test_an_agent_tries_again_until_the_server_speaks_its_version(tmp_path: Path) -> None:
    """Servers of other releases refuse the agent, or send fields that the agent does not know."""
    refusal = wire.encode(
        wire.AgentFarewell("the agent speaks version 3, and this server 4", final=False)
    )
    welcome = wire.AgentWelcome("lab", "box", "key", 1, 60.0)
    answers = iter([refusal, msgspec.msgpack.encode({"type": "Later"}), wire.encode(welcome)])

    async def answer(connection: ServerConnection) -> None:
        await connection.recv()
        await connection.send(next(answers))
        await connection.wait_closed()

    async with asyncio.timeout(120), serve(answer, "127.0.0.1", 0) as server:
        url = f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        place = ["--server", url, "--data", str(tmp_path / "box"), "--token", "t"]
        agent = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "moorage", "agent", *place, "--no-machine-id"),
            env=serve_variables(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert agent.stdout is not None
        ready = json.loads(await agent.stdout.readline())
        agent.kill()
        _, errors = await agent.communicate()
    assert ready["event"] == "connected"
    assert b"this server 4" in errors
    assert b"agent_disconnected" in errors


def test_agents_follow_a_restored_server_once_an_operator_confirms_the_server(fleet: Fleet) -> None:
    agent = fleet.agent("box", fleet.token())
    agent.terminate()
    agent.wait(60)
    until(lambda: not fleet.listed()["box"]["connected"])
    file = fleet.folder / "box" / "agent.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "epoch": 9}))  # Another server's.
    command, pipe = fleet.command("box"), subprocess.PIPE
    with (
        subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as again,
        ExitStack() as end,
    ):
        end.callback(again.kill)
        assert again.stderr is not None
        assert again.stdout is not None
        assert any("run `moored agent reclaim` beside this one" in line for line in again.stderr)
        assert not fleet.listed()["box"]["connected"]
        done = invoke("agent", "reclaim", "--data", fleet.data)
        assert done.returncode == 0, done.stderr
        assert json.loads(again.stdout.readline())["event"] == "connected"
        until(lambda: "unavailable" not in fleet.node("box"))
        assert fleet.output(fleet.ask("echo here"))[0] == "here\n"
    lines = invoke("audit", "--what", "agent.reclaimed", "--json", "--data", fleet.data).stdout
    assert json.loads(lines)["what"] == "agent.reclaimed"


def test_a_credential_of_an_agent_gives_no_other_access(fleet: Fleet) -> None:
    paths = fleet.server.http.get("/openapi.json").json()["paths"]
    calls = [(method, path) for path, each in paths.items() for method in each]
    bare = [(m, p) for m, p in calls if fleet_status(fleet, m, p, {}) != 401]
    assert len(bare) < len(calls) / 2
    fleet.agent("box", fleet.token())
    key = json.loads((fleet.folder / "box" / "agent.json").read_text())["key"]
    for secret in (key, fleet.token()):
        with pytest.raises(InvalidStatus, match="401"):
            connect(fleet.server.running.ws, additional_headers=bearing(secret))
        for method, path in calls:
            status = fleet_status(fleet, method, path, bearing(secret))
            assert status == 401 or (method, path) in bare, (method, path, status)


def fleet_status(fleet: Fleet, method: str, path: str, headers: dict[str, str]) -> int:
    """Return the HTTP status of a call without a token, or with a secret as the token."""
    url = f"{fleet.server.running.http}{path}"
    return httpx.request(method, url, headers=headers, json={}, verify=CONTEXT).status_code


def test_an_agent_may_not_send_requests_of_clients(fleet: Fleet) -> None:
    door = fleet.server.running.ws + AGENT_PATH
    for token in ("of-ann", "of-ops"):
        with pytest.raises(InvalidStatus, match="401"):
            connect(door, additional_headers=bearing(token))
    kinds = [each for each in vars(messages).values() if isinstance(each, type)]
    tags = {each.__struct_config__.tag for each in kinds if hasattr(each, "__struct_config__")}
    for op in sorted(filter(None, tags)):
        with connect(door, additional_headers=bearing(fleet.token())) as raw:
            raw.send(json.dumps({"op": op}))
            farewell = wire.decode_instruction(raw.recv(30))
            assert isinstance(farewell, wire.AgentFarewell), (op, farewell)
            with pytest.raises(ConnectionClosed):
                raw.recv(30)


def test_a_stalled_reader_of_logs_delays_no_other_reader(fleet: Fleet) -> None:
    fleet.agent("box", fleet.token())
    wordy = fleet.ask("head -c 20000000 /dev/zero | tr '\\0' x; sleep 1000")
    until(lambda: fleet.state(wordy) == "active")
    text = json.dumps({"op": "logs", "lease": wordy["id"], "token": wordy["token"], "offset": 0})
    frame = b"\x81\xfe" + struct.pack(">H", len(text)) + bytes(4) + text.encode()
    upgrade = UPGRADE.replace(b"\r\n\r\n", b"\r\nAuthorization: Bearer of-ops\r\n\r\n")
    url = urlsplit(fleet.server.running.ws)
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        slow.connect((url.hostname, url.port))
        slow.settimeout(0.5)
        with suppress(TimeoutError):  # The server stops reading: flow control.
            slow.sendall(upgrade + frame * 200)
        assert fleet.output(fleet.ask("seq 50000; exit 3")) == (
            "".join(f"{number}\n" for number in range(1, 50_001)),
            3,
        )
        mine = {"op": "exec", "lease": wordy["id"], "token": wordy["token"]}
        (little,) = fleet.server.say({**mine, "command": ["echo", "well"]})
        assert little["data"]["output"] == "well\n"
        rss = int(Path(f"/proc/{fleet.server.pid}/statm").read_text().split()[1])
        assert rss * os.sysconf("SC_PAGE_SIZE") < 600 << 20
    assert fleet.server.release(wordy)["success"]
    until(lambda: fleet.state(wordy) == "ended")
