"""The first hour: `moored serve --here`, `moorage run` right after it, and both again."""

import json
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest
from served import Server, cluster

from moorage.benchmarks.daemon_process import daemon
from moorage_policies import catalog

MOORAGE = Path(sys.executable).with_name("moorage")
TOKENS = {"MOORAGE_TOKENS": "ann:sesame", "MOORAGE_BACKENDS": "local"}


def moorage(server: Server, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {
        "MOORAGE_URL": server.running.ws,
        "MOORAGE_HTTP_URL": server.running.http,
        "MOORAGE_TOKEN": "sesame",
        "XDG_STATE_HOME": str(folder),
    }
    return subprocess.run(
        [MOORAGE, *words],
        check=False,  # Exit codes are what is tested.
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.heavy
@pytest.mark.parametrize("environment", [{}, TOKENS], ids=["open", "tokens"])
def test_run_works_right_after_serve_and_again_after_a_second_start(tmp_path, environment):
    said = "hello from here"
    for start in (1, 2):
        with daemon(tmp_path / "data", options=["--here"], environment=environment) as running:
            server = Server(running, "sesame")
            done = moorage(server, tmp_path, "run", "--cpu-milli", "100", "--", "echo", said)
            assert (done.returncode, done.stdout.strip()) == (0, said), (start, done.stderr)
            listed = server.moorage("policy", "list", "--json")
            uris = {each["policy_rule_uri"] for each in json.loads(listed.stdout)}
            assert {catalog.document(name)["policy_rule_uri"] for name in catalog.shipped()} <= uris
            shown = server.moorage("fleet", "--json").stdout
            fleet = json.loads(shown)
            assert [each["cluster_id"] for each in fleet] == [platform.node()]
            assert running.log.read_text() == ""
            server.close()


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
    with daemon(tmp_path / "data", options=["--here"]) as running:
        server = Server(running)
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
        assert "the backend local starts on" in done.stderr
        assert "not on a0/a0-0" in done.stderr
        server.close()
