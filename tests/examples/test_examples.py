"""Each example works as its reader runs it, with a real daemon, pool or Prometheus."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml

from moorage.config.settings import settings
from moorage.testing.daemon_process import daemon
from moorage_policies import catalog

EXAMPLES = Path(__file__).parents[2] / "examples"
BINARIES = Path(sys.executable).parent
SECONDS_MAX = 60


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    gpu = {"modelName": "A100", "memory": 40_960}
    gpus = {"count": 4, "gpus": [gpu] * 4}
    node = {"id": "n0", "vcpus": {"count": 8}, "memory": 1024, "gpus": gpus}
    with daemon() as running:
        cluster = {"id": "lab", "nodes": {"nodeData": [node]}}
        httpx.post(f"{running.http}/clusters", json=cluster).raise_for_status()
        document = catalog.document("first_fit")
        httpx.post(f"{running.http}/policy", json=document, timeout=30).raise_for_status()
        yield running.ws


def output_of(*command: str | Path, **environment: str) -> str:
    """Run a command, and return its output."""
    own = {"PATH": f"{BINARIES}{os.pathsep}{os.environ['PATH']}", "PYTEST_ADDOPTS": ""}
    variables = {**os.environ, **own, **environment}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, env=variables
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def python(name: str, *words: str) -> str:
    return output_of(sys.executable, EXAMPLES / name, *words)


def test_the_example_of_the_blocking_client_runs(url: str) -> None:
    assert python("blocking_client.py", url) == "yours: lab n0 GPU 0\n"


def test_the_example_of_the_asyncio_client_runs(url: str) -> None:
    reply = sorted(python("asyncio_client.py", url).splitlines())
    assert reply == ["yours: n0 GPU 0", "yours: n0 GPU 1"]


def test_the_example_of_the_node_client_runs(url: str) -> None:
    if shutil.which("node") is None:
        pytest.skip("no Node here: apt-get install nodejs")
    program = EXAMPLES / "node_client.mjs"
    reply = output_of("node", "--experimental-websocket", program, url, NODE_NO_WARNINGS="1")
    assert reply == "yours: lab n0 GPU 0\n"


def test_the_example_of_the_node_client_reports_a_missing_token() -> None:
    if shutil.which("node") is None:
        pytest.skip("no Node here: apt-get install nodejs")
    command = ["node", "--experimental-websocket", EXAMPLES / "node_client.mjs"]
    unset = {name: each for name, each in os.environ.items() if name != "MOORAGE_TOKEN"}
    with daemon(environment={"MOORAGE_TOKENS": "ann:secret-of-ann"}) as running:
        ran = subprocess.run(
            [*command, running.ws],
            env=unset,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert (ran.returncode, "needs a token: set MOORAGE_TOKEN" in ran.stderr) == (1, True)


def test_the_training_example_uses_the_gpus_of_its_lease(url: str) -> None:
    words = ["sh", "-c", "sleep 1.5; echo trained on GPU $CUDA_VISIBLE_DEVICES"]
    assert python("training_under_a_lease.py", url, *words) == "trained on GPU 0\n"


def test_the_graph_example_takes_a_lease_for_each_task(url: str) -> None:
    reply = dict(line.split(": ") for line in python("graph_of_tasks.py", url).splitlines())
    assert (reply["prepare"], reply["compare"]) == ("data", "compared")
    assert [len(reply[name].split()) for name in ("small", "large")] == [3, 4], reply


@pytest.mark.parametrize(
    "name",
    ["blocking_client.py", "asyncio_client.py", "graph_of_tasks.py", "training_under_a_lease.py"],
)
def test_without_a_server_each_example_prints_a_single_sentence(name: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"ws://127.0.0.1:{free.getsockname()[1]}"
    command = [sys.executable, EXAMPLES / name, url, "true"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(rf".*{url}: Connection refused\n", done.stderr)


def typed_lines(folder: Path) -> list[str]:
    """Return the commands that the README of an example has its reader type."""
    return re.findall(r"^\$ (.+)$", (folder / "README.md").read_text(), re.MULTILINE)


@pytest.mark.heavy
def test_the_example_policy_passes_its_tests_and_is_accepted(tmp_path: Path) -> None:
    folder = shutil.copytree(EXAMPLES / "policy_with_tests", tmp_path / "policy")
    with daemon() as running:
        reach = {"MOORAGE_URL": running.ws, "MOORAGE_HTTP_URL": running.http}
        reply = [
            output_of("bash", "-c", f"cd {folder} && {each}", **reach)
            for each in typed_lines(folder)
        ]
    tested, jailed, pushed = reply
    assert "2 passed" in tested
    assert "passed" in jailed
    assert pushed == "keep_whole:1-stable\n"


@pytest.mark.heavy
def test_tests_in_four_processes_share_two_gpus(tmp_path: Path) -> None:
    folder = shutil.copytree(EXAMPLES / "slots_in_pytest", tmp_path / "slots")
    serving, testing = typed_lines(folder)
    environment = {
        "PATH": f"{BINARIES}{os.pathsep}{os.environ['PATH']}",
        "MOORAGE_POOL_ADDRESS": f"uds:{tmp_path / 'pool.sock'}",
        "MARKS": str(tmp_path),
    }
    command = serving.removesuffix(" &").split()
    variables = {**os.environ, **environment}
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=variables)
    assert server.stdout is not None
    try:
        assert '"ready"' in server.stdout.readline()
        assert "8 passed" in output_of("bash", "-c", f"cd {folder} && {testing}", **environment)
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(SECONDS_MAX)
        server.stdout.close()


def compose_services() -> dict[str, dict]:
    text = (EXAMPLES / "compose_with_prometheus" / "compose.yaml").read_text()
    for name in ("RESEARCH", "MONITOR"):
        text = text.replace(f"${{{name}_TOKEN:?a long secret}}", f"{name.lower()}-secret")
        text = text.replace(f"${{{name}_TOKEN}}", f"{name.lower()}-secret")
    assert "${" not in text
    return yaml.safe_load(text)


@pytest.mark.heavy
def test_prometheus_scrapes_the_server_as_configured_in_compose(tmp_path: Path) -> None:
    if shutil.which("prometheus") is None:
        pytest.skip("no prometheus here: apt-get install prometheus")
    found = compose_services()
    environment = found["services"]["moored"]["environment"]
    assert set(environment) <= {each.environment for each in settings().values()}
    with daemon(environment=environment) as running, socket.socket() as free:
        where = running.http.partition("://")[2]
        token = {"Authorization": "Bearer monitor-secret"}
        named = httpx.get(f"{running.http}/metrics", headers={**token, "Host": "moored:8080"})
        assert named.status_code == 200, "as Prometheus asks for it, by its name"
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
        free.close()
        content = found["configs"]["prometheus"]["content"]
        file = tmp_path / "prometheus.yml"
        file.write_text(content.replace("moored:8080", where).replace("15s", "1s"))
        command = ["prometheus", f"--config.file={file}", f"--storage.tsdb.path={tmp_path}/tsdb"]
        with (tmp_path / "log").open("w") as log:
            server = subprocess.Popen(
                [*command, f"--web.listen-address={address}"], stdout=log, stderr=log
            )
        try:
            assert until_up(f"http://{address}"), (tmp_path / "log").read_text()
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(SECONDS_MAX)


def until_up(url: str) -> bool:
    """Return whether Prometheus gets the server's metrics in time."""
    deadline = time.monotonic() + SECONDS_MAX
    while time.monotonic() < deadline:
        try:
            answer = httpx.get(f"{url}/api/v1/query", params={"query": "moorage_leases"})
            # While it starts, it answers 503 with a text.
            if answer.is_success and answer.json()["data"]["result"]:
                return True
        except httpx.TransportError:
            pass  # It has not started yet.
        time.sleep(0.2)  # Prometheus tells of no event when it has scraped.
    return False


def test_each_example_is_listed_and_each_listed_example_exists() -> None:
    listed = (EXAMPLES / "README.md").read_text()
    names = {each.name for each in EXAMPLES.iterdir()} - {"README.md", "__pycache__"}
    assert len(names) == 8
    assert [name for name in names if f"]({name})" not in listed] == []
