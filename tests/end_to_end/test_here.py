"""The first hour: `moored serve --here`, `moorage run` right after it, and both again."""

import contextlib
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from served import MOORAGE, Server, cluster, ran, serving, until

from moorage.testing.daemon_process import (
    Running,
    child,
    daemon,
    serve_command,
    serve_variables,
)
from moorage_policies import catalog

TTL = {"ttl_seconds": 300}
TOKENS = {"MOORAGE_TOKENS": "ann:sesame", "MOORAGE_BACKENDS": "local"}


def moorage(server: Server, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {
        "MOORAGE_URL": server.running.ws,
        "MOORAGE_HTTP_URL": server.running.http,
        "MOORAGE_TOKEN": "sesame",
        "XDG_STATE_HOME": str(folder),
    }
    return ran(MOORAGE, *words, **environment)


@pytest.mark.heavy
@pytest.mark.parametrize("environment", [{}, TOKENS], ids=["open", "tokens"])
def test_run_works_right_after_serve_and_again_after_a_second_start(tmp_path, environment):
    said = "hello from here"
    for start in (1, 2):
        with serving(
            tmp_path / "data", options=["--here"], environment=environment, bearer="sesame"
        ) as server:
            done = moorage(server, tmp_path, "run", "--cpu-milli", "100", "--", "echo", said)
            assert (done.returncode, done.stdout.strip()) == (0, said), (start, done.stderr)
            listed = server.moorage("policy", "list", "--json")
            uris = {each["policy_rule_uri"] for each in json.loads(listed.stdout)}
            assert {catalog.document(name)["policy_rule_uri"] for name in catalog.shipped()} <= uris
            shown = server.moorage("fleet", "--json").stdout
            fleet = json.loads(shown)
            assert [each["cluster_id"] for each in fleet] == [platform.node()]
            assert server.log() == ""


@pytest.mark.heavy
def test_what_here_registers_is_one_line_of_the_log(tmp_path):
    log = {"MOORAGE_LOG_LEVEL": "info", "MOORAGE_LOG_FORMAT": "json"}
    with daemon(tmp_path / "data", options=["--here"], environment=log) as running:
        lines = [json.loads(line) for line in running.log.read_text().splitlines()]
        (line,) = [each for each in lines if each["event"] in {"changed", "here"}]
        assert line["registered"] == f"{platform.node()}/{platform.node()}"
        assert len(line["published"].split(", ")) == len(catalog.shipped())


@pytest.mark.heavy
def test_the_quick_start_can_be_gone_through_twice(tmp_path):
    page = Path(__file__).parents[2] / "docs" / "how-to" / "ask-for-gpus.md"
    blocks = re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    with daemon(tmp_path / "data") as running:
        filling = next(block for block in blocks if "put_cluster" in block)
        filling = filling.replace("http://127.0.0.1:8080", running.http)
        for _ in range(2):
            subprocess.run([sys.executable, "-c", filling], check=True, timeout=60)
        server = Server(running)
        assert server.ask(resources={"gpus": 1})["data"]["cluster_id"] == "lab"
        server.close()


@pytest.mark.heavy
def test_a_backend_is_given_the_nodes_that_it_starts_on(tmp_path):
    with serving(tmp_path / "data", options=["--here"]) as server:
        server.register(*(cluster(f"a{number}", nodes=3) for number in range(3)))
        mixed = cluster("mixed", nodes=3)
        mixed["nodes"]["nodeData"][1]["id"] = "localhost"  # This machine under another name.
        server.register(mixed)
        for words in (
            [],
            ["--cluster", "a0", "--cluster", "mixed"],
            ["--policy", "spread:1.0-stable"],
        ):
            done = moorage(server, tmp_path, "run", *words, "--cpu-milli", "10", "--", "echo", "x")
            assert (done.returncode, done.stdout) == (0, "x\n"), (words, done.stderr)
        done = moorage(server, tmp_path, "run", "--cluster", "a0", "--", "echo", "x")
        assert done.returncode != 0
        assert "local starts on the nodes" in done.stderr
        assert "lease " not in done.stderr


@contextlib.contextmanager
def called(name: str, data: Path) -> Iterator[Running]:
    """Serve on a machine of this name."""
    log = data.with_name(f"{name}.log")
    renamed = f"hostname {name}; exec {shlex.join([*serve_command(data), '--here'])}"
    with child(["unshare", "-u", "sh", "-c", renamed], log, serve_variables()) as (process, ready):
        yield Running(ready["ws"], ready["http"], process.pid, log)


@pytest.mark.heavy
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may rename a machine")
def test_a_renamed_machine_keeps_its_node_its_leases_and_what_they_run(tmp_path):
    data, mark = tmp_path / "data", f"{os.getpid()}.25"
    with called("old-name", data) as running:
        server = Server(running)
        command = {"backend": "local", "spec": {"command": ["sleep", mark]}}
        lease = server.ask(resources={"cpu_milli": 100}, lease=TTL, provision=command)["lease"]
        server.close()
    for name in ("new-name", "newer-name"):
        with called(name, data) as running:
            server = Server(running)
            server.in_state(lease, "active")
            done = moorage(server, tmp_path, "run", "--cpu-milli", "100", "--", "echo", name)
            assert (done.returncode, done.stdout.strip()) == (0, name), done.stderr
            fleet = json.loads(moorage(server, tmp_path, "fleet", "--json").stdout)
            assert [each["cluster_id"] for each in fleet] == ["old-name"]
            assert running.log.read_text() == ""
            if name == "newer-name":
                server.release(lease)
                until(lambda: not running_commands(mark))
            else:
                assert running_commands(mark)
            server.close()


def running_commands(mark: str) -> list[str]:
    """Return the processes that sleep for so long."""
    return ran("pgrep", "-xf", f"sleep {mark}").stdout.split()


@pytest.mark.heavy
def test_a_card_that_falls_off_the_bus_moves_what_is_held_behind_it(tmp_path):
    """Through the command line, a document with UUIDs, and a backend that starts nothing twice."""
    file = tmp_path / "lab.json"

    def import_with(server: Server, *cards: str, way: str = "--replace") -> None:
        rows = [{"modelName": "L4", "memory": 24_000, "uuid": f"GPU-{card}"} for card in cards]
        node = {"id": platform.node(), "vcpus": {"count": 8}, "memory": 1024}
        node["gpus"] = {"count": len(rows), "gpus": rows}
        file.write_text(json.dumps({"id": "lab", "nodes": {"nodeData": [node]}}))
        done = moorage(server, tmp_path, "fleet", "import", str(file), way)
        assert done.returncode == 0, done.stderr

    with serving(tmp_path / "data") as server:
        server.publish(catalog.document("first_fit"))
        import_with(server, "aaa", "bbb", "ccc", "ddd", way="--merge")
        first = server.ask(resources={"gpus": 2}, lease=TTL)["lease"]
        second = server.ask(
            resources={"gpus": 1},
            lease=TTL,
            provision={"backend": "local", "spec": {"command": ["sleep", "1000"]}},
        )["lease"]
        server.release(first)
        assert second["placement"][0]["gpus"] == ["2"]
        import_with(server, "aaa", "ccc", "ddd")
        status = server.status(second)
        assert status["placement"][0]["gpus"] == ["1"]
        third = server.ask(resources={"gpus": 2}, lease=TTL)["lease"]
        assert third["placement"][0]["gpus"] == ["0", "2"]
        import_with(server, "aaa", "ddd")
        status = server.status(second)
        assert status["lost_devices"] == ["GPU-ccc"]
