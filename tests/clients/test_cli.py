# ruff: noqa: S105  # The tokens of a harbour that lives for one test.
import json
import os
import pty
import signal
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer

from moorage.records.requests import Resources
from moorage_client.cli import looking, program, publishing
from moorage_client.cli.output import explain_failure, fields
from moorage_client.cli.sentences import _MISFITS
from moorage_client.cli.session import CommandSession
from moorage_client.errors import ConnectionFailed, refusal


def only_json(done):
    """Return the one JSON document on stdout; nothing else may be there, nor on stderr."""
    assert done.stderr == ""
    return json.loads(done.stdout)


def state(shell):
    return Path(shell.environment["XDG_STATE_HOME"]) / "moorage" / "leases.json"


def test_advice_is_what_the_policy_said(shell, harbour):
    done = shell("ask", "first:1-x", "--inputs", '{"say": {"hello": 1}}', "--gpus", "2")
    assert (done.returncode, done.stdout) == (0, '{"hello": 1}\n')
    assert done.stderr == "warning: three clusters\n"
    assert harbour.heard[0]["resources"] == {"gpus": 2}


def test_every_option_of_ask_reaches_the_server(shell, harbour, tmp_path):
    (tmp_path / "parameters.json").write_text('{"spread": true}')
    done = shell(
        *("ask", "first:1-x", "--gpus=1", "--gpu-milli=500", "--model=A100", "--model=H100"),
        *("--gpu-memory-mib=1", "--cpu-milli=2", "--memory-mib=3", "--nodes=4"),
        *("--where=zone=a,b", "--where=spot!=yes", "--where=disk", "--where=!old"),
        *("--topology=nvlink", "--cluster=c0", "--cluster=c1", "--explain", "--dry-run"),
        *(f"--parameters=@{tmp_path}/parameters.json", '--settings={"a": 1}'),
        *('--filter={"b": 2}', '--search={"c": 3}', '--provision={"backend": "local"}'),
        *("--ttl=60", "--wait=1", "--priority=5", "--preemptible", "--key=k"),
        *("--runtime-min=7", "--notice=8", "--ttl-min=30", "--apart=web=rack"),
    )
    assert done.returncode == 0
    [heard] = harbour.heard
    assert heard["resources"] == {
        "gpus": 1,
        "gpu_milli": 500,
        "models": ["A100", "H100"],
        "gpu_memory_mib": 1,
        "cpu_milli": 2,
        "memory_mib": 3,
        "nodes": 4,
        "topology": "nvlink",
        "where": [
            {"key": "zone", "operator": "In", "values": ["a", "b"]},
            {"key": "spot", "operator": "NotIn", "values": ["yes"]},
            {"key": "disk", "operator": "Exists"},
            {"key": "old", "operator": "DoesNotExist"},
        ],
    }
    assert heard["lease"] == {
        "ttl_seconds": 60,
        "ttl_seconds_min": 30,
        "wait_seconds": 1,
        "priority": 5,
        "preemptible": True,
        "runtime_seconds_min": 7,
        "notice_seconds": 8,
        "idempotency_key": "k",
        "anti_affinity": {"group": "web", "topology": "rack"},
    }
    assert heard["clusters"] == ["c0", "c1"]
    assert heard["parameters"] == {"spread": True}
    assert heard["settings"] == {"a": 1}
    assert heard["filter"] == {"b": 2}
    assert heard["search"] == {"c": 3}
    assert heard["provision"] == {"backend": "local"}
    assert heard["explain"] is True
    assert heard["dry_run"] is True


def test_the_life_of_a_lease_without_pasting_a_token(shell, harbour):
    asked = only_json(shell.process("ask", "first:1-x", "--ttl", "60", "--json"))
    lease = asked["lease"]
    assert asked["success"] is True
    assert lease["token"] == "t-1"
    assert lease["placement"][0]["gpus"] == ["0", "1"]
    [listed] = only_json(shell.process("leases", "--json"))
    shown = ("id", "state", "tenant", "placement", "expires_at", "fencing")
    assert {name: listed[name] for name in shown} == {name: lease[name] for name in shown}
    assert "token" not in listed
    assert only_json(shell("renew", lease["id"], "--ttl", "90", "--json"))["ttl_seconds"] == 90
    assert only_json(shell("release", lease["id"], "--json"))["state"] == "ended"
    assert only_json(shell("release", lease["id"], "--json"))["state"] == "ended"
    assert only_json(shell("leases", "--state", "active", "--json")) == []
    over = shell("renew", lease["id"], "--json")
    assert over.returncode == 7
    assert only_json(over)["error"]["code"] == "lease_ended"


def test_the_life_of_a_lease_for_a_person(shell, harbour):
    asked = shell("ask", "first:1-x", "--lease")
    assert asked.returncode == 0
    assert asked.stdout == "l-1  c0/n1 gpus 0,1\n"
    assert "moorage release l-1" in asked.stderr
    assert "t-1" not in asked.stdout + asked.stderr
    assert "l-1" in shell("leases").stdout
    assert "now ends in 5 min 00 s" in shell("renew", "l-1").stdout
    assert "fencing" in shell("status", "l-1").stdout
    assert shell("release", "l-1").stdout == "lease l-1 is ended\n"


@pytest.mark.parametrize(
    ("policy", "code", "exit_code"),
    [
        ("full:1-x", "no_capacity", 1),
        ("badly:1-x", "bad_message", 3),
        ("huge:1-x", "never_fits", 3),
        ("unknown:1-x", "unknown_policy", 5),
        ("broken:1-x", "policy_error", 6),
        ("defect:1-x", "internal", 70),
    ],
)
def test_each_no_has_its_exit_code(shell, policy, code, exit_code):
    done = shell("ask", policy, "--json")
    document = only_json(done)
    assert done.returncode == exit_code
    assert document["success"] is False
    assert document["error"]["code"] == code
    spoken = shell("ask", policy)
    assert (spoken.returncode, spoken.stdout) == (exit_code, "")
    assert document["message"] in spoken.stderr
    assert "moorage why r-no" in spoken.stderr


def test_a_refusal_shows_its_details(shell):
    assert "Similar: first:1-x" in shell("ask", "unknown:1-x").stderr


def test_a_missing_server_is_named_with_the_way_out(shell, nowhere):
    done = shell.process("leases", "--url", nowhere)
    assert (done.returncode, done.stdout) == (4, "")
    assert nowhere in done.stderr
    assert "moored serve" in done.stderr
    silent = shell.process("--url", nowhere, "--json", "leases")
    assert silent.returncode == 4
    assert only_json(silent)["error"]["code"] == "connection_failed"
    over_http = shell("policy", "list", "--http-url", nowhere.replace("ws", "http"))
    assert over_http.returncode == 4
    assert "Connection refused" in over_http.stderr
    for each in (done, over_http):
        assert "Start a server with `moored serve --here`, or name one with --" in each.stderr


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        (ConnectionFailed("ws://far.example:1", "Connection refused"), "whether --url is right"),
        (ConnectionFailed("http://127.0.0.1:1", "timed out"), "whether --http-url is right"),
        (refusal("unknown_clusters", "No live cluster is registered."), "moorage fleet import"),
        (refusal("unknown_policy", "No policy “x”."), "`moorage policy push best_fit`"),
    ],
)
def test_a_hint_fits(capsys, error, hint):
    explain_failure(error)
    assert hint in capsys.readouterr().err


def test_a_name_that_is_meant_is_hint_enough(capsys):
    explain_failure(refusal("unknown_clusters", "No cluster “est” (did you mean east?)."))
    assert "fleet import" not in capsys.readouterr().err


def test_what_a_shadow_did_is_said_in_words(capsys):
    side = {"policy_rule_uri": "a:1-x", "placed": 4, "refused": 0, "latency_ms": None}
    counts = {"asked": 5, "dropped": 1, "abandoned": 0, "compared": 4, "same": 1, "differ": 3}
    told = {"alias": "a:stable", "since": 0, "whole": True, "cost": {"refused": 2}, "samples": []}
    document = {**told, **counts, "active": side, "candidate": side, "differ_alone": 2}
    publishing._differences(CommandSession(), document)
    shown = capsys.readouterr().out
    alone = "2 of them while no other request was decided"
    assert shown.startswith(f"5 asked, 4 compared: 1 the same, 3 different ({alone}); 1 dropped\n")
    assert "_" not in shown.splitlines()[0]
    assert "{" not in shown


def test_a_socket_named_alone_does_not_lead_to_the_http_of_another_server(shell, nowhere):
    done = shell("policy", "list", "--url", nowhere)
    assert done.returncode == 2
    assert "--http-url or MOORAGE_HTTP_URL" in done.stderr
    swapped = shell("leases", "--url", "http://127.0.0.1:1")
    assert swapped.returncode == 2
    assert "--url: expected ws://HOST:PORT" in swapped.stderr


def test_garbage_and_silence_are_unreachable_too(shell, harbour):
    harbour.mute.add("why")
    silence = shell("why", "r-0", "--timeout", "0.2", "--json")
    assert silence.returncode == 4
    assert only_json(silence)["error"]["code"] == "timeout"
    harbour.garbage = "hello"
    garbage = shell("leases", "--json")
    assert garbage.returncode == 4
    assert only_json(garbage)["error"]["code"] == "protocol_violated"


def test_tokens_of_leases_and_of_people(shell, harbour):
    foreign = shell("renew", "l-9", "--json")
    assert foreign.returncode == 5
    assert only_json(foreign)["error"]["code"] == "token_missing"
    assert "--lease-token" in shell("renew", "l-9").stderr
    assert only_json(shell("release", "l-9", "--json"))["error"]["code"] == "unknown_lease"
    shell("ask", "first:1-x", "--lease")
    wrong = shell("release", "l-1", "--lease-token", "t-2", "--json")
    assert wrong.returncode == 5
    assert only_json(wrong)["error"]["code"] == "wrong_token"
    assert shell("release", "l-9", "--lease-token", "t-1").returncode == 5
    harbour.token = "secret"
    assert shell("leases").returncode == 5
    assert shell("leases", "--token", "secret").returncode == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ["ask"],
        ["ask", "first:1-x", "--gpus", "many"],
        ["ask", "first:1-x", "--inputs", "{"],
        ["ask", "first:1-x", "--inputs", "[1]"],
        ["ask", "first:1-x", "--inputs", "@/nowhere.json"],
        ["ask", "first:1-x", "--wait", "5"],
        ["nothing"],
        ["leases", "--nothing"],
        ["policy", "push", "/nowhere.py", "--uri", "a:1-x"],
        ["policy", "push", "/nowhere.py"],
    ],
)
def test_wrong_command_lines(shell, harbour, arguments):
    done = shell(*arguments, "--json")
    assert done.returncode == 2
    assert only_json(done)["error"]["code"] == "usage"
    spoken = shell(*arguments)
    assert (spoken.returncode, spoken.stdout) == (2, "")
    assert spoken.stderr.startswith("moorage: ")
    assert harbour.heard == []


def helped(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, command in getattr(group, "commands", {}).items():
        yield (*path, name)
        yield from helped(command, (*path, name))


def test_every_command_has_help(capsys):
    paths = list(helped(typer.main.get_command(program.app)))
    assert len(paths) > 30
    for path in paths:
        assert program.run([*path, "--help"]) == 0
        assert f"Usage: moorage {' '.join(path)}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["quota", "set", "ann", "--gpus", "nan"], "--gpus: expected a number"),
        (["quota", "set", "ann", "--borrow-gpus", "inf"], "--borrow-gpus: expected a number"),
        (["quota", "set", "ann", "--weight", "nan"], "--weight: expected a number"),
        (["quota", "set", "ann", "--gpus", "0.0001"], "--gpus: expected thousandths"),
        (["whatif", "--quota", "ann gpus=nan"], "expected a number"),
    ],
)
def test_an_amount_that_is_none_is_no_use_of_a_command(shell, words, said):
    done = shell(*words)
    assert done.returncode == 2
    assert said in " ".join(done.stderr.split())


def test_help_names_every_command_and_exit_code(shell):
    done = shell.process("--help")
    assert done.returncode == 0
    for word in ("ask", "renew", "release", "leases", "why", "status", "queue", "fleet", "policy"):
        assert word in done.stdout
    for code in (0, 1, 2, 3, 4, 5, 6, 7, 70):
        assert f"{code} " in done.stdout.partition("Exit codes:")[2]


@pytest.mark.parametrize(
    "arguments",
    [["queue"], ["fleet"], ["fleet", "c0"], ["why", "r-1"], ["status", "l-1"], ["version"]],
)
def test_looking_in_both_voices(shell, arguments):
    shell("ask", "first:1-x", "--lease")
    assert only_json(shell(*arguments, "--json"))
    spoken = shell(*arguments)
    assert spoken.returncode == 0
    assert spoken.stdout
    assert "\x1b" not in spoken.stdout  # Neither our colours nor a policy's.


def test_a_narrow_terminal_cuts_nothing_off(shell):
    shell("ask", "first:1-x", "--lease")
    shell.environment["COLUMNS"] = "40"
    letters = "".join(shell("leases").stdout.split())
    shell.environment["COLUMNS"] = "200"
    assert "c0/n1gpus0,1" in "".join(shell("leases").stdout.split())
    assert "l-1" in letters
    assert "…" not in letters


def test_on_a_terminal_the_table_is_drawn(shell):
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [shell.program, "fleet"], env=shell.environment, stdout=theirs, stderr=theirs
    ) as drawn:
        assert drawn.wait(30) == 0
    os.close(theirs)
    with os.fdopen(ours, "rb", buffering=0) as screen:
        assert b"c0" in screen.read(4096)


def test_tokens_are_private_and_survive_many_writers(shell):
    asking = [shell.start("ask", "first:1-x", "--lease", "--json") for _ in range(3)]
    for process in asking:
        with process:
            process.communicate(timeout=60)
        assert process.returncode == 0
    path = state(shell)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    kept = json.loads(path.read_text())["leases"]
    assert kept.keys() == {f"l-{number}" for number in range(1, 4)}
    assert sorted(entry.name for entry in path.parent.iterdir()) == [
        "leases.json",
        "leases.json.lock",
    ]


def test_a_token_that_cannot_be_kept_is_shown(shell):
    path = state(shell)
    path.parent.mkdir(parents=True)
    path.write_text("not json")
    asked = shell("ask", "first:1-x", "--lease")
    assert asked.returncode == 0
    assert "t-1" in asked.stderr
    assert str(path) in asked.stderr
    assert path.read_text() == "not json"
    assert shell("renew", "l-1").returncode == 5
    assert shell("release", "l-1", "--lease-token", "t-1").returncode == 0


def test_another_state_file_can_be_named(shell, tmp_path):
    shell.environment["MOORAGE_STATE"] = str(tmp_path / "mine.json")
    shell("ask", "first:1-x", "--lease")
    assert "l-1" in json.loads((tmp_path / "mine.json").read_text())["leases"]


def test_ctrl_c_ends_quietly(shell, harbour):
    with shell.start("ask", "slow:1-x", "--lease", "--wait", "600") as process:
        harbour.wait_for(lambda: harbour.count("ask") == 1)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (130, "", "moorage: interrupted\n")


@pytest.mark.parametrize("words", [["fleet"], ["fleet", "--json"], ["version"]])
def test_a_reader_that_goes_away_is_no_error(shell, words):
    reading, writing = os.pipe()
    os.close(reading)
    with subprocess.Popen(
        [shell.program, *words],
        env=shell.environment,
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        os.close(writing)
        _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (0, "")


@pytest.mark.parametrize("words", [["fleet"], ["fleet", "--json"], ["version"]])
def test_a_closed_stdout_is_no_error(shell, words):
    done = subprocess.run(
        ["/bin/sh", "-c", 'exec "$@" >&-', "sh", shell.program, *words],
        env=shell.environment,
        stderr=subprocess.PIPE,
        text=True,
        timeout=30,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("words", ["ask first:1-x --ttl inf", "ask first:1-x --lease --wait inf"])
def test_endless_times_are_refused_by_the_command_line(shell, words):
    done = shell(*words.split())
    assert (done.returncode, done.stdout) == (2, "")
    assert words.split()[-2] in done.stderr


def test_an_ask_survives_a_server_that_restarts(shell, harbour):
    with shell.start("ask", "slow:1-x", "--lease", "--wait", "60", "--json") as process:
        harbour.wait_for(lambda: harbour.count("ask") == 1)
        harbour.stop()
        harbour.start()
        harbour.wait_for(lambda: harbour.count("ask") == 2)
        harbour.gate.set()
        out, _ = process.communicate(timeout=30)
    assert process.returncode == 0
    assert json.loads(out)["lease"]["id"] == "l-1"


def test_what_was_never_planned_has_no_time(capsys):
    fields({"state": "active", "retry_at": 0.0, "workload": {"retry_at": 0, "attempt": 1}})
    shown = capsys.readouterr().out
    assert "1970" not in shown
    assert "retry_at" not in shown
    assert '{"attempt": 1}' in shown


def ran(harbour):
    """Return what `moorage run` asked for, request by request."""
    return [each for each in harbour.heard if "policy_rule_uri" in each]


def test_run_takes_a_policy_that_there_is(shell, harbour):
    harbour.registered = ["mine:1-x", "other:1-x"]
    done = shell("run", "--", "true")
    assert [each["policy_rule_uri"] for each in ran(harbour)] == ["best_fit:1.0-stable", "mine:1-x"]
    assert "mine:1-x decides: no best_fit:1.0-stable here (--policy says another)" in done.stderr


def test_run_takes_no_other_policy_than_the_one_that_is_named(shell, harbour):
    harbour.registered = ["mine:1-x"]
    assert shell("run", "-p", "theirs:1-x", "--", "true").returncode == 5
    shell.environment["MOORAGE_POLICY"] = "theirs:1-x"
    assert shell("run", "--", "true").returncode == 5
    assert {each["policy_rule_uri"] for each in ran(harbour)} == {"theirs:1-x"}


def test_run_takes_the_only_backend_and_says_that_it_needs_an_image(shell, harbour):
    harbour.backends = ["kubernetes"]
    done = shell("run", "--", "true")
    assert done.returncode == 2
    assert "--image: expected the image to run it in: the backend kubernetes" in done.stderr
    shell("run", "--image", "busybox", "--", "true")
    assert ran(harbour)[-1]["provision"] == {
        "backend": "kubernetes",
        "spec": {
            "command": ["true"],
            "environment": {},
            "category": "container",
            "image": "busybox",
        },
    }


def test_run_chooses_among_no_backends(shell, harbour):
    harbour.backends = ["aws", "ray"]
    done = shell("run", "--", "true")
    assert done.returncode == 2
    assert "--backend: expected one that this server has: aws, ray" in done.stderr
    assert len(ran(harbour)) == 1
    shell("run", "--backend", "ray", "--", "true")
    assert "workdir" not in ran(harbour)[-1]["provision"]["spec"]


def starts(phase, **more):
    workload = {"backend": "local", "phase": phase, "detail": more.pop("detail", "")}
    return {"state": "starting", "workload": workload, **more}


PROVISION = ("ask", "first:1-x", "--lease", "--provision", '{"backend": "local"}')


def test_ask_waits_until_what_it_starts_is_ready(shell, harbour):
    harbour.states = [starts("pulling", detail="3 of 9"), starts("ready", state="active")]
    done = shell(*PROVISION, "--until", "active")
    assert (done.returncode, done.stdout) == (0, "l-1  c0/n1 gpus 0,1\n")
    assert "l-1: pulling 3 of 9" in done.stderr
    assert "active; ends in" in done.stderr


def test_ask_says_so_where_it_never_is_ready(shell, harbour):
    harbour.states = [starts("failed", state="ended", reason="no such image")]
    done = shell(*PROVISION, "--until=active", "--json")
    assert done.returncode == 7
    assert "no such image" in only_json(done)["message"]


def test_nothing_is_waited_for_where_nothing_starts(shell, harbour):
    assert shell("ask", "first:1-x", "--lease", "--until", "active").returncode == 2
    assert harbour.heard == []


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ('{"cpu_milli": 100, "gpu_milli": 1000}', "CPU (milli) 100"),
        ('{"gpus": 2, "gpu_milli": 1000}', "GPUs 2"),
        ('{"gpus": 1, "gpu_milli": 500}', "GPUs 1, GPU share (milli) 500"),
    ],
)
def test_a_share_is_named_where_it_is_a_part_of_a_gpu(document, words):
    assert looking._wants(msgspec.json.decode(document, type=Resources)) == words


def test_history_is_what_ended_or_was_refused_and_why(shell, harbour):
    rows = only_json(shell("history", "--json"))
    assert [row["request"] for row in rows] == ["r-1", "r-2", "r-3"]
    assert [row["request"] for row in only_json(shell("history", "--limit=1", "--json"))] == ["r-1"]
    [granted] = only_json(shell("history", "--state", "granted", "--json"))
    assert granted["state"] == "granted"
    assert "refused!" in shell("history").stdout


def test_tenants_are_told_apart_where_there_are_several(shell, harbour):
    shell("ask", "first:1-x", "--lease")
    shell("ask", "first:1-x", "--lease")
    assert "tenant" not in shell("leases").stdout
    assert shell("fleet", "cordon", "c0").stdout == "c0 is cordoned; no lease is there\n"
    harbour.leases["l-2"]["tenant"] = "ann"
    shown = shell("leases").stdout
    assert "tenant" in shown
    assert "ann" in shown
    assert "local" in shown


def test_a_refusal_is_told_in_words(shell, harbour):
    details = {
        "verdict": "never",
        "binding": "gpu_count",
        "misfits": {"gpu_count": 2},
        "largest": {"nodes": 2, "models": [""], "gpus": 0},
        "fits_if": [
            {"field": "resources.gpus", "asked": 8, "fits": 4},
            {"field": "resources.where", "asked": ["rack"], "fits": ""},
        ],
        "backends": [],
        "data": {"a": []},
    }
    harbour.refusals["huge:1-x"] = {**harbour.refusals["huge:1-x"], **details}
    said = shell("ask", "huge:1-x").stderr
    assert "  Waiting does not help: it would not fit an empty fleet either.\n" in said
    assert "  What rules out most nodes: too few GPUs.\n" in said
    assert "  2 nodes have too few GPUs.\n" in said
    assert "  The most that there is: nodes 2, GPUs 0.\n" in said
    assert "  It would fit with GPUs: 4 instead of 8, or without `where`.\n" in said
    assert 'The policy\'s answer: {"a": []}\n' in said
    assert "ackends" not in said
    for raw in ("verdict", "binding", "misfits", "largest:", "fits if"):
        assert raw not in said
    error = only_json(shell("ask", "huge:1-x", "--json"))["error"]
    assert {name: error[name] for name in details} == details


def test_each_reason_of_a_node_has_its_words():
    from moorage.policy.fleet import Misfit  # noqa: PLC0415  # Of the server; the client has words.

    for each in Misfit:
        if each is not Misfit.FITS:
            assert each.name.lower() in _MISFITS


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--model", ["ask", "first:1-x", "--model="]),
        ("--cluster", ["run", "--cluster", " ", "--", "true"]),
    ],
)
def test_a_blank_name_is_refused_by_its_option(shell, harbour, option, words):
    done = shell(*words)
    assert done.returncode == 2
    assert f"{option}: expected a name, got a blank" in done.stderr
    assert harbour.heard == []


@pytest.mark.parametrize("value", [[], {}, [""], {"a": [""]}, [[], {}]])
def test_what_is_empty_is_not_shown(capsys, value):
    fields({"fits_if": value, "models": value, "state": "refused"})
    assert capsys.readouterr().out == "state    refused\n"


def test_a_node_that_is_called_by_a_hash_has_a_short_name(shell, harbour):
    name = "3fa9" * 14
    harbour.nodes = [name, "n1"]
    assert f"{name[:12]} " in shell("fleet", "c0").stdout
    assert name not in shell("fleet", "c0").stdout
    assert only_json(shell("fleet", "c0", "--json"))[0]["node_id"] == name
    for given, node in ((f"c0/{name[:12]}", name), (f"c0/{name}", name), ("c0/n1", "n1")):
        shell("fleet", "cordon", given)
        assert (harbour.heard[-1]["op"], harbour.heard[-1]["node"]) == ("cordon", node)
