"""No file of a workload, and no lack of file descriptors, ends or hangs the daemon."""

import contextlib
import json
import os
import resource
import shutil
import socket
from pathlib import Path

import pytest
from served import (
    Server,
    here,
    is_over,
    kill,
    read_message,
    serve_and_kill,
    serving,
    until,
    workload_processes,
)
from test_backends import run

from moorage.testing.daemon_process import child, serve_command, serve_variables

pytestmark = pytest.mark.heavy  # Many daemons.

WRITES = ["sh", "-c", "echo words; exec sleep 1000"]


@pytest.fixture
def data(tmp_path) -> Path:
    return tmp_path / "data"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("shared")) as server:
        server.fill(here())
        yield server


def logs(server: Server, lease: dict) -> dict:
    return server.say({"op": "logs", "lease": lease["id"], "token": lease["token"]})[0]


def asking(op: str, lease: dict) -> str:
    more = {"command": ["true"]} if op == "exec" else {}
    return json.dumps({"op": op, "lease": lease["id"], "token": lease["token"], **more})


def as_folder(place: Path) -> None:
    place.unlink()
    place.mkdir()


def as_loop(place: Path) -> None:
    place.unlink()
    place.symlink_to(place.name)


def as_fifo(place: Path) -> None:
    place.unlink()
    os.mkfifo(place)


def as_socket(place: Path) -> None:
    place.unlink()
    with contextlib.chdir(place.parent), socket.socket(socket.AF_UNIX) as made:
        made.bind(place.name)


DAMAGES = [as_folder, as_loop, as_fifo, as_socket]


@pytest.mark.parametrize("damage", DAMAGES)
def test_files_that_a_workload_replaces_affect_only_this_workload(server, damage):
    names = ("output.log", "order.json", "process.json", "lock")
    leases = {name: run(server, WRITES) for name in names}
    for lease in leases.values():
        server.in_state(lease, "active")
        until(lambda lease=lease: logs(server, lease)["data"]["text"])
    started = workload_processes(server.data)
    for name, lease in leases.items():
        damage(server.data / "local" / "running" / lease["id"] / name)
        reply = logs(server, lease)
        assert reply["success"] or reply["error"]["code"] in {"engine_failed", "not_found"}, reply
        server.release(lease)
    for lease in leases.values():
        server.in_state(lease, "ended")
        assert lease["id"] not in workload_processes(server.data)
        assert all(map(is_over, started[lease["id"]]))
    assert server.http.get("/healthz").status_code == 200


def test_concurrent_commands_in_one_workload_are_bounded(server):
    first, second = (run(server, WRITES) for _ in range(2))
    for lease in (first, second):
        server.in_state(lease, "active")
    with server.socket() as client:
        for number in range(12):
            ask = json.loads(asking("exec", first)) | {"id": str(number)}
            command = ["sh", "-c", "until [ -e go ]; do sleep 0.1; done"]
            client.send(json.dumps({**ask, "command": command}))
        refused = [read_message(client) for _ in range(4)]
        assert {each["error"]["code"] for each in refused} == {"busy"}
        assert server.say(asking("exec", second))[0]["success"], "each workload has its own limit"
        ask = json.loads(asking("exec", first))
        assert server.say(ask)[0]["error"]["code"] == "busy"
        assert server.say(asking("logs", first))[0]["success"]
        (server.data / "local" / "running" / first["id"] / "work" / "go").touch()
        for _ in range(8):
            assert read_message(client)["data"]["exit_code"] == 0
    assert server.say(ask)[0]["success"]
    for lease in (first, second):
        server.release(lease)
        server.in_state(lease, "ended")


def test_a_start_of_the_daemon_sets_unreadable_files_aside_and_reports_them(data):
    with serve_and_kill(data) as before:
        before.fill(here())
        leases = [(damage, run(before, WRITES)) for damage in (*DAMAGES, shutil.rmtree)]
        for _, lease in leases:
            before.in_state(lease, "active")
        kill(before)
    folders = data / "local"
    for damage, lease in leases:
        folder = folders / "running" / lease["id"]
        damage(folder if damage is shutil.rmtree else folder / "order.json")
    with serving(data) as after:
        for damage, lease in leases:
            after.in_state(lease, "ended")
            assert lease["id"] not in workload_processes(data), damage
            if damage is not shutil.rmtree:
                said = f"{lease['id']} is not a valid record of a workload"
                assert said in after.log(), damage
                assert (folders / "damaged" / lease["id"] / "process.json").exists(), damage
        again = run(after, WRITES, gpus=8)
        after.in_state(again, "active")
        after.release(again)
        after.in_state(again, "ended")


def test_connections_leave_enough_file_descriptors_to_the_daemon(data, tmp_path):
    command = ["prlimit", "--nofile=256:256", *serve_command(data)]
    with child(command, tmp_path / "log", serve_variables()) as (_, ready):
        server = Server(type("Running", (), ready))
        server.fill(here())
        with server.socket() as client, contextlib.ExitStack() as opened:
            lease = run(server, WRITES)
            server.in_state(lease, "active")
            for door in ("ws", "http"):
                port = int(ready[door].rpartition(":")[2])
                for _ in range(300):
                    more = opened.enter_context(socket.socket())
                    more.settimeout(5)
                    more.connect(("127.0.0.1", port))
                for op in ("exec", "logs") * 5:
                    client.send(asking(op, lease))
                    assert read_message(client)["success"]
        server.release(lease)
        server.in_state(lease, "ended")
        server.close()
        assert "sessions_max" in (tmp_path / "log").read_text()


def test_requests_are_refused_as_busy_without_free_descriptors(server):
    with server.socket() as client:
        lease = run(server, WRITES)
        server.in_state(lease, "active")
        limits = resource.prlimit(server.pid, resource.RLIMIT_NOFILE)
        used = len(list(Path(f"/proc/{server.pid}/fd").iterdir()))
        for left in (0, 1, 2, 3, 5, 8, 20):
            resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (used + left, limits[1]))
            for op in ("logs", "exec"):
                client.send(asking(op, lease))
                assert read_message(client)["error"]["code"] == "busy"
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, limits)
        client.send(asking("exec", lease))
        assert read_message(client)["success"]
    server.release(lease)
    server.in_state(lease, "ended")
