"""The daemon starts, serves and stops although it cannot write its log."""

import contextlib
import fcntl
import json
import os
import pty
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from served import Server, cluster, until

from moorage.testing.daemon_process import serve_command
from tests.ports import free_port

pytestmark = pytest.mark.heavy  # Daemons.

PAGE = 4_096
"""Bytes of the smallest possible buffer of a pipe."""
LOUD = {**os.environ, "MOORAGE_LOG_LEVEL": "debug"}
JSON = {"MOORAGE_LOG_FORMAT": "json"}
QUOTA = {"op": "set_quota", "tenant": "ann", "nominal": {"gpu_milli": 1000}}
CORDON = {"op": "cordon", "cluster": "east", "node": "east-1", "reason": "fans"}


@contextlib.contextmanager
def serving(
    data: Path, log: int, **variables: str
) -> Iterator[tuple[Server, subprocess.Popen[str]]]:
    process = subprocess.Popen(
        serve_command(data), stdout=subprocess.PIPE, stderr=log, text=True, env=LOUD | variables
    )
    try:
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline())
        assert ready["console"] == f"{ready['http']}/console"
        server = Server(type("Running", (), ready))
        yield server, process
        server.close()
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.mark.parametrize(("variables", "readable"), [({}, True), (JSON, False)])
def test_a_terminal_gets_readable_log_lines(tmp_path, variables, readable):
    reader, writer = pty.openpty()
    with serving(tmp_path / "data", writer, **variables) as (server, process):
        os.close(writer)
        assert server.http.get("/console").status_code == 200
        server.register(cluster("east"))
        said = b""
        while b"changed" not in said:
            said += os.read(reader, PAGE)
        (line,) = [each for each in said.splitlines() if b"changed" in each]
        assert line.startswith(b"{") is not readable
        process.terminate()
        with contextlib.suppress(OSError):  # EIO: the process has ended.
            while os.read(reader, PAGE):
                pass
    os.close(reader)


def full() -> int:
    """Return a file on a disk that is full."""
    return os.open("/dev/full", os.O_WRONLY)


def pipe_without_reader() -> int:
    """Return a pipe whose reader has gone."""
    reader, writer = os.pipe()
    os.close(reader)
    return writer


def work(server: Server, *names: str) -> None:
    """Cause lines in the log, by requests and by events of the core."""
    server.register(*(cluster(name) for name in names))
    assert all(reply["success"] for reply in server.say(QUOTA, CORDON))
    assert server.http.get("/healthz").status_code == 200


@pytest.mark.parametrize("log", [full, pipe_without_reader])
def test_a_log_that_cannot_be_written_does_not_disturb_the_daemon(tmp_path, log):
    descriptor = log()
    with serving(tmp_path, descriptor) as (server, process):
        os.close(descriptor)
        work(server, "east", "west")
        assert server.metric("moorage_log_lines_dropped_total") >= 2, "a line for each change"
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


@pytest.mark.parametrize(
    ("log", "flag", "code"), [(full, "--data=/dev/null", 3), (pipe_without_reader, "--port=x", 2)]
)
def test_a_failed_start_has_its_exit_code_although_the_log_cannot_be_written(
    tmp_path, log, flag, code
):
    descriptor = log()
    done = subprocess.run(
        [*serve_command(tmp_path), flag], stderr=descriptor, timeout=60, check=False
    )
    os.close(descriptor)
    assert done.returncode == code


def test_a_ready_line_that_is_not_read_does_not_block_the_daemon(tmp_path):
    reader, writer = os.pipe()
    fcntl.fcntl(reader, fcntl.F_SETPIPE_SZ, PAGE)
    os.write(writer, b"." * PAGE)
    port = free_port()
    command = [*serve_command(tmp_path), f"--http-port={port}"]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=writer, stderr=log)
    os.close(writer)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}") as client:
            until(lambda: answers(client), 90)
        assert os.read(reader, PAGE) == b"." * PAGE
        assert json.loads(os.read(reader, PAGE))["event"] == "ready"
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        os.close(reader)


def answers(client: httpx.Client) -> bool:
    with contextlib.suppress(httpx.ConnectError):
        return client.get("/readyz").is_success
    return False
