"""Tests of clean and failing starts and stops of a daemon."""

import json
import os
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from served import ask_message, cluster, ran, serving, tell, until
from websockets.exceptions import ConnectionClosed

from moorage.lab.errors import CommandError
from moorage.testing.daemon_process import Running, daemon, serve_command, serve_variables

pytestmark = pytest.mark.heavy  # Many daemons.

LEASE = {"ttl_seconds": 3_600}


def test_a_clean_stop_answers_all_requests_closes_with_1012_and_logs_no_error(tmp_path):
    with serving(tmp_path) as server:
        server.fill(cluster("east", nodes=1, gpus=1))
        held = server.ask(resources={"gpus": 1}, lease=LEASE)["lease"]
        wait = ask_message(
            resources={"gpus": 1}, lease={"ttl_seconds": 60, "wait_seconds": 60}, id=7
        )
        replies: list[dict] = []
        caller = threading.Thread(
            # Here the client reads the description, which it cannot read during the stop.
            target=lambda: replies.append(server.http.post("/allocate", json=wait).json())
        )
        with server.socket() as socket:
            assert tell(socket, {"op": "queue"})["success"]
            caller.start()
            until(server.waiting)
            os.kill(server.pid, signal.SIGTERM)
            with pytest.raises(ConnectionClosed) as closed:
                socket.recv(30)
        caller.join(30)
        assert closed.value.rcvd.code == 1012
        assert (replies[0]["error"]["code"], replies[0]["id"]) == ("shutting_down", 7)
    # The block above fails if the exit code is not 0.
    with serving(tmp_path) as server:
        assert [lease["id"] for lease in server.held()] == [held["id"]]
        renewed = server.say({"op": "renew", "lease": held["id"], "token": held["token"]})[0]
        assert renewed["lease"]["expires_at"] >= held["expires_at"]
        assert server.log() == ""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_further_stop_signals_leave_a_clean_stop_clean(tmp_path, number):
    command, errors = serve_command(tmp_path / "data"), tmp_path / "errors"
    with (
        errors.open("w") as stderr,
        subprocess.Popen(
            command, env=serve_variables(), stdout=subprocess.PIPE, stderr=stderr
        ) as process,
    ):
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["event"] == "ready"
        while process.poll() is None:
            process.send_signal(number)
            time.sleep(0.001)  # A signal at every moment of the stop.
    assert (process.returncode, errors.read_text()) == (0, "")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="module")
def running(data: Path) -> Iterator[Running]:
    """A daemon that was started under a lower soft limit of open files than the hard one."""
    usual = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (usual[1] - 1, usual[1]))
    try:
        with daemon(data) as running:
            yield running
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, usual)


def test_the_error_of_a_second_daemon_on_a_folder_names_the_first(data, running):
    with pytest.raises(CommandError, match=rf"process {running.pid}"), daemon(data):
        pass


def test_a_ledger_that_fails_during_the_start_ends_the_daemon(tmp_path):
    with serving(tmp_path) as server:
        server.fill(cluster("east", nodes=40, gpus=8))
        ask = ask_message(resources={"gpus": 1, "gpu_milli": 10}, lease={"ttl_seconds": 10})
        for _ in range(5):
            assert all(reply["success"] for reply in server.say(*[ask] * 100))
    # The restart extends 500 leases, but the disk has space for the first pages only.
    done = ran("/bin/sh", "-c", 'ulimit -f 128; exec "$@"', "sh", *serve_command(tmp_path))
    assert (done.returncode, done.stdout) == (3, "")
    assert "moored: cannot start: the ledger" in done.stderr


def test_a_daemon_may_open_more_files_than_a_shell_allows(running):
    limits = Path(f"/proc/{running.pid}/limits").read_text()
    (line,) = [line for line in limits.splitlines() if line.startswith("Max open files")]
    assert line.split()[3:5] == [str(resource.getrlimit(resource.RLIMIT_NOFILE)[1])] * 2


@pytest.mark.parametrize("closed", [">&-", "<&- >&- 2>&-"])
def test_a_daemon_without_standard_streams_serves_and_stops(tmp_path, closed):
    command = f'"$@" {closed} & echo $! >"{tmp_path}/pid"; wait $!; echo $? >"{tmp_path}/code"'
    words = ["/bin/sh", "-c", command, "sh", *serve_command(tmp_path / "data")]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as shell:
        ledger = tmp_path / "data" / "ledger.db-wal"
        until(ledger.exists)
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGTERM)
        shell.wait(30)
    assert (tmp_path / "code").read_text() == "0\n"


@pytest.mark.skipif(os.getuid() == 0, reason="root may look into every process")
def test_other_processes_cannot_read_the_daemons_environment(running):
    with pytest.raises(PermissionError):
        Path(f"/proc/{running.pid}/environ").read_bytes()
