"""Tests of `moorage` at a real daemon: formats, live tables, free GPUs, completion."""

import json
import os
import pty
import re
import signal
import subprocess

import pytest
import yaml
from served import FIRST_FIT, MOORAGE, cluster, ran, serving, until

pytestmark = pytest.mark.heavy

BIN = MOORAGE.parent
HELD = {"gpus": 2, "models": ["A100"]}


def environment(server, **more):
    urls = {"MOORAGE_URL": server.running.ws, "MOORAGE_HTTP_URL": server.running.http}
    own = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    return {**own, **urls, "COLUMNS": "200", **more}


def run(server, *arguments, code=0):
    done = server.moorage(*arguments)
    assert done.returncode == code, done.stderr
    return done.stdout


def hold(server, **resources):
    reply = server.ask(FIRST_FIT, resources=resources, lease={"ttl_seconds": 60})
    assert reply["success"], reply
    server.leases.append(reply["lease"])
    return reply["lease"]["id"]


@pytest.mark.parametrize("program", ["moorage", "moored"])
def test_moorage_and_moored_print_their_version(program):
    output = ran(BIN / program, "--version")
    assert re.fullmatch(program + r" \d+\.\d+\.\d+\n", output.stdout)


def test_an_idempotency_key_of_an_ended_lease_gets_no_second_lease(server):
    words = ("ask", FIRST_FIT, "--gpus", "1", "--ttl", "60", "--key", "done")
    lease = run(server, *words).split()[0]
    assert run(server, *words).split()[0] == lease
    run(server, "release", lease)
    again = server.moorage(*words)
    assert (again.returncode, again.stdout) == (7, "")
    assert f"lease {lease} is lost: released. --key done names this lease" in again.stderr


def test_the_command_gpus_lists_free_gpus_by_model_and_size(server):
    hold(server, **HELD)
    hold(server, gpus=1, gpu_milli=400, models=["H100"])
    rows = {row["model"]: row for row in json.loads(run(server, "gpus", "-o", "json"))}
    assert rows["A100"] == {
        "model": "A100",
        "free": 6,
        "total": 8,
        "fits": {"1": 6, "2": 3, "4": 1, "8": 0},
        "part_milli_free": 0,
        "clusters": ["east"],
    }
    assert (rows["H100"]["free"], rows["H100"]["part_milli_free"]) == (7, 600)
    table = run(server, "gpus", "h1", "-o", "wide").split()
    assert table[-9:] == ["H100", "7", "8", "7", "3", "1", "0", "0.6", "west"]
    assert "A100" not in table


def test_nodes_that_accept_no_leases_have_no_free_gpus(server):
    run(server, "fleet", "cordon", "east/east-0")
    (row,) = json.loads(run(server, "gpus", "A100", "--json"))
    run(server, "fleet", "uncordon", "east/east-0")
    assert (row["free"], row["total"]) == (4, 8)
    assert json.loads(run(server, "gpus", "--cluster", "west", "--json"))[0]["free"] == 8


def test_results_are_printed_as_tables_wide_tables_json_and_yaml(server):
    lease = hold(server, **HELD)
    (shown,) = json.loads(run(server, "leases", "-o", "json"))
    assert yaml.safe_load(run(server, "-o", "yaml", "leases")) == [shown]
    assert shown["id"] == lease
    assert "granted" not in run(server, "leases").splitlines()[1]
    assert "granted" in run(server, "leases", "--output=wide").splitlines()[1]
    refused = yaml.safe_load(run(server, "status", "nosuch", "-o", "yaml", code=5))
    assert refused["error"]["code"] == "unknown_lease"
    assert yaml.safe_load(run(server, "nosuch", "-oyaml", code=2))["error"]["code"] == "usage"
    run(server, "leases", "-o", "xml", code=2)
    # An option of the other command does not make our output JSON.
    assert run(server, "run", "--nosuch", "--", "cat", "-o", "json", code=2) == ""


def watching(server, *options, stdout=subprocess.PIPE, **more):
    return subprocess.Popen(
        [BIN / "moorage", "leases", "--watch", *options],
        env=environment(server, PYTHONUNBUFFERED="1", **more),
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        # A background job ignores Ctrl-C, and so would this one.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # noqa: PLW1509  # This process has no threads.
    )


def test_a_watched_listing_follows_changes(server):
    with watching(server, "--json") as seen:
        assert json.loads(seen.stdout.readline()) == []
        lease = hold(server, **HELD)
        (row,) = json.loads(seen.stdout.readline())
        assert (row["id"], row["state"]) == (lease, "granted")
        seen.send_signal(signal.SIGINT)
        assert "Traceback" not in seen.communicate(timeout=60)[1]
        assert seen.returncode == 130


def test_a_watched_listing_continues_after_a_restart_of_the_daemon(tmp_path):
    with serving(tmp_path) as server:
        server.fill(cluster("east"))
        seen = watching(server)
        assert re.match(r"\d{4}-", seen.stdout.readline())
        hold(server, **HELD)
        until(lambda: "east/east-0 gpus 0,1" in seen.stdout.readline())
    port = server.running.ws.rsplit(":", 1)[1].strip("/")
    with seen, serving(tmp_path, options=["--port", port]) as server:
        server.ask(FIRST_FIT, resources={"gpus": 1}, lease={"ttl_seconds": 60})
        until(lambda: "gpus 2" in seen.stdout.readline())
        seen.send_signal(signal.SIGINT)
        assert "reconnecting" in seen.communicate(timeout=60)[1]


@pytest.mark.parametrize(("variables", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False)])
def test_output_to_a_terminal_has_colours_unless_colours_are_disabled(server, variables, coloured):
    hold(server, **HELD)
    ours, theirs = pty.openpty()
    with watching(server, stdout=theirs, TERM="xterm", **variables) as seen:
        drawn = b""
        while not (b"granted" in drawn and b"as of 20" in drawn):
            drawn += os.read(ours, 65_536)
        seen.send_signal(signal.SIGINT)
        assert seen.wait(60) == 130
    assert (b"\x1b[32mgranted" in drawn) is coloured
    for each in (ours, theirs):
        os.close(each)


def complete(server, program, line, **more):
    """Return what bash would offer for the word at the end of a line."""
    wanted = {
        f"_{program.upper()}_COMPLETE": "complete_bash",
        "COMP_WORDS": f"{program} {line}",
        "COMP_CWORD": str(len(line.split(" "))),
    }
    done = ran(BIN / program, **environment(server, **wanted, **more))
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split()


def test_the_shell_completes_ids_and_uris_and_clusters(server):
    lease = hold(server, **HELD)
    assert complete(server, "moorage", "release ") == [lease]
    assert complete(server, "moorage", f"why {lease[:4]}") == [lease]
    assert complete(server, "moorage", "ask fir") == [FIRST_FIT]
    assert complete(server, "moorage", "fleet cordon we") == ["west"]
    assert complete(server, "moored", "doc") == ["doctor"]
    nowhere = {"MOORAGE_URL": "ws://127.0.0.1:1"}
    assert complete(server, "moorage", "release ", **nowhere) == [], "silent without a server"
