"""`moored serve --here` and `moorage run` work, and work again after a second start."""

import contextlib
import json
import os
import platform
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from served import Server, bearing, cluster, invoke, ran, serving, until

from moorage.protocol.cluster_documents import machine_key, nodes_of
from moorage.testing.daemon_process import Running, child, serve_command, serve_variables
from moorage_policies import catalog

pytestmark = pytest.mark.heavy  # Daemons.

TTL = {"ttl_seconds": 300}
TOKENS = {"MOORAGE_TOKENS": "ann:sesame", "MOORAGE_BACKENDS": "local"}
LOG = {"MOORAGE_LOG_LEVEL": "info", "MOORAGE_LOG_FORMAT": "json"}
NAME = platform.node()
OWN = f"/clusters/{NAME}"
SMALL = {"vcpus": {"count": 1}, "memory": 1024}
MACHINE_ID = Path("/etc/machine-id")
MACHINE = [machine_key(MACHINE_ID.read_text().strip())] if MACHINE_ID.exists() else []


def run(server: Server, folder: Path, *words: str) -> tuple[int, str, str]:
    """Run a command by `moorage run`; return its exit code, its output and its errors."""
    words = ("run", "--cpu-milli", "10", *words)
    done = server.moorage(*words, XDG_STATE_HOME=str(folder), MOORAGE_STATE="")
    return done.returncode, done.stdout, done.stderr


def test_moorage_run_works_right_after_serve_and_again_after_a_second_start(tmp_path):
    node, shipped = platform.node(), catalog.shipped()
    for start in (1, 2):
        with serving(
            tmp_path / "data", options=["--here"], environment=TOKENS | LOG, bearer="sesame"
        ) as server:
            lines = [json.loads(line) for line in server.log().splitlines()]
            found = [each for each in lines if each["event"] in {"changed", "here"}]
            if start == 1:
                (line,) = found
                assert line["registered"] == f"{node}/{node}"
                assert len(line["published"].split(", ")) == len(shipped)
            code, out, said = run(server, tmp_path, "--", "echo", "hello from here")
            assert (code, out) == (0, "hello from here\n"), (start, said)
            listed = json.loads(server.moorage("policy", "list", "--json").stdout)
            uris = {each["policy_rule_uri"] for each in listed}
            assert {catalog.document(name)["policy_rule_uri"] for name in shipped} <= uris
            fleet = json.loads(server.moorage("fleet", "--json").stdout)
            assert [each["cluster_id"] for each in fleet] == [node]
            levels = {json.loads(line)["level"] for line in server.log().splitlines()}
            assert levels <= {"info"}


def test_moorage_run_gets_a_node_on_which_its_backend_starts_workloads(tmp_path):
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
            code, out, said = run(server, tmp_path, *words, "--", "echo", "x")
            assert (code, out) == (0, "x\n"), (words, said)
        code, _, said = run(server, tmp_path, "--cluster", "a0", "--", "echo", "x")
        assert code != 0
        assert "local only starts workloads on the nodes" in said
        assert "lease " not in said


HERS = [
    {"id": "hers", "nodes": {"nodeData": [{**SMALL, "id": "x", "machineId": key}]}}
    for key in MACHINE
]
RETIRED = {"id": NAME, "status": "retired", "nodes": {"nodeData": [{**SMALL, "id": "x"}]}}
CLOSED = {"id": NAME, "nodes": {"nodeData": [{**SMALL, "id": NAME, "unavailable": "no"}]}}


@pytest.mark.parametrize("squats", [[*HERS, RETIRED], [CLOSED]], ids=["retired", "closed"])
def test_the_servers_own_machine_replaces_a_tenants_node_for_this_machine(tmp_path, squats):
    tokens = {"MOORAGE_TOKENS": "ann:of-ann,ops:of-ops", "MOORAGE_OPERATORS": "ops"}
    known = {"environment": tokens | {"MOORAGE_BACKENDS": "local"}, "bearer": "of-ops"}
    ann = bearing("of-ann")
    with serving(tmp_path / "data", **known) as server:
        for squat in squats:
            assert server.http.post("/clusters", json=squat, headers=ann).status_code == 201
    for start in (1, 2):
        with serving(tmp_path / "data", options=["--here"], **known) as server:
            code, out, said = run(server, tmp_path, "--", "echo", "x")
            assert (code, out) == (0, "x\n"), (start, said)
            refused = server.http.put(OWN, json={"status": "x"}, headers=ann)
            assert refused.status_code == server.http.delete(OWN, headers=ann).status_code == 403
            assert not nodes_of(server.http.get("/clusters/hers").json())
    lines = invoke("audit", "--what", "agent.displaced", "--json", "--data", tmp_path / "data")
    entries = [json.loads(line) for line in lines.stdout.splitlines()]
    assert [each["about"]["tenant"] for each in entries] == ["ann"] * len(squats)


@contextlib.contextmanager
def serve_named(name: str, data: Path) -> Iterator[Server]:
    """Serve on a machine with this host name."""
    log = data.with_name(f"{name}.log")
    renamed = f"hostname {name}; exec {shlex.join([*serve_command(data), '--here'])}"
    with child(["unshare", "-u", "sh", "-c", renamed], log, serve_variables()) as (process, ready):
        server = Server(Running(ready["ws"], ready["http"], process.pid, log))
        yield server
        server.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may rename a machine")
def test_a_renamed_machine_keeps_its_node_and_leases_and_workloads(tmp_path):
    data, mark = tmp_path / "data", f"{os.getpid()}.25"
    with serve_named("old-name", data) as server:
        command = {"backend": "local", "spec": {"command": ["sleep", mark]}}
        lease = server.ask(resources={"cpu_milli": 100}, lease=TTL, provision=command)["lease"]
    with serve_named("new-name", data) as server:
        server.in_state(lease, "active")
        assert running_commands(mark)
        code, out, said = run(server, tmp_path, "--", "echo", "x")
        assert (code, out) == (0, "x\n"), said
        fleet = json.loads(server.moorage("fleet", "--json").stdout)
        assert [each["cluster_id"] for each in fleet] == ["old-name"]
        server.release(lease)
        until(lambda: not running_commands(mark))
        assert server.log() == ""


def running_commands(mark: str) -> list[str]:
    """Return the processes that sleep for a duration that only this test uses."""
    return ran("pgrep", "-xf", f"sleep {mark}").stdout.split()
