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

from moorage.model import Tenant
from moorage.records.requests import Resources
from moorage.records.rights import Caller, Right, Role
from moorage_client.cli import looking, program, publishing
from moorage_client.cli.output import explain_failure, fields
from moorage_client.cli.sentences import _MISFITS
from moorage_client.cli.session import CommandSession
from moorage_client.errors import ConnectionFailed, refusal


def only_json(done):
    """Return the JSON document on stdout; stdout and stderr may have no other text."""
    assert done.stderr == ""
    return json.loads(done.stdout)


def state(shell):
    return Path(shell.environment["XDG_STATE_HOME"]) / "moorage" / "leases.json"


def test_ask_without_a_lease_prints_the_value_of_the_policy(shell, harbour):
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
        "gpus": 1, "gpu_milli": 500, "models": ["A100", "H100"], "gpu_memory_mib": 1,
        "cpu_milli": 2, "memory_mib": 3, "nodes": 4, "topology": "nvlink",
        "where": [
            {"key": "zone", "operator": "In", "values": ["a", "b"]},
            {"key": "spot", "operator": "NotIn", "values": ["yes"]},
            {"key": "disk", "operator": "Exists"},
            {"key": "old", "operator": "DoesNotExist"},
        ],
    }  # fmt: skip
    assert heard["lease"] == {
        "ttl_seconds": 60, "ttl_seconds_min": 30, "wait_seconds": 1, "priority": 5,
        "preemptible": True, "runtime_seconds_min": 7, "notice_seconds": 8, "idempotency_key": "k",
        "anti_affinity": {"group": "web", "topology": "rack"},
    }  # fmt: skip
    documents = ("clusters", "parameters", "settings", "filter", "search", "provision")
    assert [heard[name] for name in documents] == [
        ["c0", "c1"], {"spread": True}, {"a": 1}, {"b": 2}, {"c": 3}, {"backend": "local"},
    ]  # fmt: skip
    assert heard["explain"] is heard["dry_run"] is True


def test_commands_renew_and_release_a_lease_without_a_token_option(shell, harbour):
    granted = only_json(shell.process("ask", "first:1-x", "--ttl", "60", "--json"))
    lease = granted["lease"]
    assert granted["success"] is True
    assert lease["token"] == "t-1"
    assert lease["placement"][0]["gpus"] == ["0", "1"]
    [listed] = only_json(shell("leases", "--json"))
    shown = ("id", "state", "tenant", "placement", "expires_at", "fencing")
    assert {name: listed[name] for name in shown} == {name: lease[name] for name in shown}
    assert "token" not in listed
    assert only_json(shell("renew", lease["id"], "--ttl", "90", "--json"))["ttl_seconds"] == 90
    for _ in range(2):
        assert only_json(shell("release", lease["id"], "--json"))["state"] == "ended"
    assert only_json(shell("leases", "--state", "active", "--json")) == []
    over = shell("renew", lease["id"], "--json")
    assert (over.returncode, only_json(over)["error"]["code"]) == (7, "lease_ended")


def test_commands_about_a_lease_print_text_for_people(shell, harbour):
    granted = shell("ask", "first:1-x", "--lease")
    assert (granted.returncode, granted.stdout) == (0, "l-1  c0/n1 gpus 0,1\n")
    assert "moorage release l-1" in granted.stderr
    assert "t-1" not in granted.stdout + granted.stderr
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
def test_each_refusal_has_its_exit_code(shell, policy, code, exit_code):
    done = shell("ask", policy, "--json")
    document = only_json(done)
    assert (done.returncode, document["success"]) == (exit_code, False)
    assert document["error"]["code"] == code
    spoken = shell("ask", policy)
    assert (spoken.returncode, spoken.stdout) == (exit_code, "")
    assert document["message"] in spoken.stderr
    assert "moorage why r-no" in spoken.stderr
    assert ("Similar: first:1-x" in spoken.stderr) is (code == "unknown_policy")


def test_the_error_for_a_missing_server_names_its_url_and_a_remedy(shell, nowhere):
    done = shell("leases", "--url", nowhere)
    assert (done.returncode, done.stdout) == (4, "")
    assert nowhere in done.stderr
    silent = shell("--url", nowhere, "--json", "leases")
    assert silent.returncode == 4
    assert only_json(silent)["error"]["code"] == "connection_failed"
    over_http = shell("policy", "list", "--http-url", nowhere.replace("ws", "http"))
    assert over_http.returncode == 4
    assert "Connection refused" in over_http.stderr
    for each in (done, over_http):
        assert "Start a server with `moored serve --here`, or give its URL with --" in each.stderr


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        (ConnectionFailed("ws://far.example:1", "Connection refused"), "Check --url"),
        (ConnectionFailed("http://127.0.0.1:1", "timed out"), "Check --http-url"),
        (refusal("unknown_clusters", "No live cluster is registered."), "moorage fleet import"),
        (refusal("unknown_policy", "No policy “x”."), "`moorage policy push best_fit`"),
    ],
)
def test_each_error_of_a_command_has_a_hint_for_its_cause(capsys, error, hint):
    explain_failure(error)
    assert hint in capsys.readouterr().err
    explain_failure(refusal("unknown_clusters", "No cluster “est” (did you mean east?)."))
    assert "fleet import" not in capsys.readouterr().err, "the similar name is enough of a hint"


def test_the_refusal_of_a_metrics_token_says_what_this_token_is_for(capsys):
    scraper = Caller(Tenant("ops"), Role.METRICS)
    explain_failure(refusal("unauthorized", scraper.refusal(Right.READ)))
    shown = capsys.readouterr().err
    assert "A token with the role metrics reads /metrics only." in shown
    assert "Say who you are" not in shown, "the caller said so"


def test_a_shadow_is_reported_in_words(capsys):
    side = {"policy_rule_uri": "a:1-x", "placed": 4, "refused": 0, "latency_ms": None}
    counts = {"asked": 5, "dropped": 1, "abandoned": 0, "compared": 4, "same": 1, "differ": 3}
    head = {"alias": "a:stable", "since": 0, "whole": True, "cost": {"refused": 2}, "samples": []}
    document = {**head, **counts, "active": side, "candidate": side, "differ_alone": 2}
    CommandSession().show(document, publishing._differences)
    shown = capsys.readouterr().out
    alone = "2 of them with no other decision in between"
    assert shown.startswith(f"5 asked, 4 compared: 1 the same, 3 different ({alone}); 1 dropped\n")
    assert "_" not in shown.splitlines()[0]
    assert "{" not in shown


def test_the_command_line_derives_no_http_url_from_the_url_of_the_socket(shell, nowhere):
    done = shell("policy", "list", "--url", nowhere)
    assert done.returncode == 2
    assert "--http-url or MOORAGE_HTTP_URL" in done.stderr
    swapped = shell("leases", "--url", "http://127.0.0.1:1")
    assert swapped.returncode == 2
    assert "--url: expected ws://HOST:PORT" in swapped.stderr


def test_a_server_that_sends_garbage_or_nothing_counts_as_unreachable(shell, harbour):
    harbour.mute.add("why")
    silence = shell("why", "r-0", "--timeout", "0.2", "--json")
    assert (silence.returncode, only_json(silence)["error"]["code"]) == (4, "timeout")
    harbour.garbage = "hello"
    garbage = shell("leases", "--json")
    assert (garbage.returncode, only_json(garbage)["error"]["code"]) == (4, "protocol_violated")


def test_wrong_and_missing_lease_tokens_are_reported(shell, harbour):
    def refusal(*words):
        done = shell(*words, "--json")
        assert done.returncode == 5
        return only_json(done)["error"]["code"]

    assert refusal("renew", "l-9") == "token_missing"
    assert "--lease-token" in shell("renew", "l-9").stderr
    assert refusal("release", "l-9") == "unknown_lease"
    shell("ask", "first:1-x", "--lease")
    assert refusal("release", "l-1", "--lease-token", "t-2") == "wrong_token"
    assert refusal("release", "l-9", "--lease-token", "t-1") == "unknown_lease"
    harbour.token = "secret"
    assert refusal("leases") == "unauthorized"
    assert shell("leases", "--token", "secret").returncode == 0


@pytest.mark.parametrize(
    "words",
    [
        "ask", "ask first:1-x --gpus many", "ask first:1-x --inputs {",
        "ask first:1-x --inputs [1]", "ask first:1-x --inputs @/nowhere.json",
        "ask first:1-x --wait 5", "nothing", "leases --nothing",
        "policy push /nowhere.py --uri a:1-x", "policy push /nowhere.py",
    ],
)  # fmt: skip
def test_wrong_command_lines_are_refused(shell, harbour, words):
    done = shell(*words.split(), "--json")
    assert (done.returncode, only_json(done)["error"]["code"]) == (2, "usage")
    spoken = shell(*words.split())
    assert (spoken.returncode, spoken.stdout) == (2, "")
    assert spoken.stderr.startswith("moorage: ")
    assert harbour.heard == []


def command_helps(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, command in getattr(group, "commands", {}).items():
        yield (*path, name)
        yield from command_helps(command, (*path, name))


def test_every_command_has_help(capsys):
    paths = list(command_helps(typer.main.get_command(program.app)))
    assert len(paths) > 30
    for path in paths:
        assert program.run([*path, "--help"]) == 0
        assert f"Usage: moorage {' '.join(path)}" in capsys.readouterr().out
    assert program.run(["--help"]) == 0
    codes = capsys.readouterr().out.partition("Exit codes:")[2]
    for code in (0, 1, 2, 3, 4, 5, 6, 7, 70):
        assert f"{code} " in codes


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("quota set ann --gpus nan", "--gpus: expected a number"),
        ("quota set ann --borrow-gpus inf", "--borrow-gpus: expected a number"),
        ("quota set ann --weight nan", "--weight: expected a number"),
        ("quota set ann --gpus 0.0001", "--gpus: expected thousandths"),
        ("whatif --quota ann|gpus=nan", "expected a number"),
        ("ask first:1-x --ttl inf", "--ttl"),
        ("ask first:1-x --lease --wait inf", "--wait"),
        ("ask first:1-x --model=", "--model: expected a name, got a blank"),
        ("run --cluster | -- true", "--cluster: expected a name, got a blank"),
    ],
)
def test_the_refusal_of_an_impossible_value_names_its_option(shell, harbour, words, said):
    done = shell(*(word.replace("|", " ") for word in words.split()))
    assert (done.returncode, done.stdout) == (2, "")
    assert said in " ".join(done.stderr.split())
    assert harbour.heard == []


def test_a_narrow_terminal_cuts_nothing_off_and_a_terminal_gets_a_table(shell):
    shell("ask", "first:1-x", "--lease")
    shell.environment["COLUMNS"] = "40"
    letters = "".join(shell("leases").stdout.split())
    shell.environment["COLUMNS"] = "200"
    assert "c0/n1gpus0,1" in "".join(shell("leases").stdout.split())
    assert "l-1" in letters
    assert "…" not in letters
    ours, theirs = pty.openpty()
    command = [shell.program, "fleet"]
    subprocess.run(command, env=shell.environment, stdout=theirs, stderr=theirs, check=True)
    os.close(theirs)
    with os.fdopen(ours, "rb", buffering=0) as screen:
        assert b"c0" in screen.read(4096)


def test_stored_tokens_are_private_and_survive_concurrent_writers(shell):
    writers = [shell.start("ask", "first:1-x", "--lease", "--json") for _ in range(3)]
    for process in writers:
        with process:
            process.communicate(timeout=60)
        assert process.returncode == 0
    path = state(shell)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    stored = json.loads(path.read_text())["leases"]
    assert stored.keys() == {f"l-{number}" for number in range(1, 4)}
    assert {entry.name for entry in path.parent.iterdir()} == {"leases.json", "leases.json.lock"}


def test_a_lease_token_that_cannot_be_stored_is_shown(shell, tmp_path):
    path = state(shell)
    path.parent.mkdir(parents=True)
    path.write_text("not json")
    granted = shell("ask", "first:1-x", "--lease")
    assert granted.returncode == 0
    assert "t-1" in granted.stderr
    assert str(path) in granted.stderr
    assert path.read_text() == "not json"
    assert shell("renew", "l-1").returncode == 5
    assert shell("release", "l-1", "--lease-token", "t-1").returncode == 0
    shell.environment["MOORAGE_STATE"] = str(tmp_path / "mine.json")
    shell("ask", "first:1-x", "--lease")
    assert "l-2" in json.loads((tmp_path / "mine.json").read_text())["leases"]


def test_ctrl_c_ends_quietly(shell, harbour):
    with shell.start("ask", "slow:1-x", "--lease", "--wait", "600") as process:
        harbour.wait_for(lambda: harbour.count("ask") == 1)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (130, "", "moorage: interrupted\n")


@pytest.mark.parametrize("words", ["fleet", "fleet --json"])
@pytest.mark.parametrize("stdout", ["| true; exit ${PIPESTATUS[0]}", ">&-"])
def test_a_command_whose_output_is_closed_reports_no_error(shell, words, stdout):
    done = subprocess.run(
        ["bash", "-c", f'"$0" {words} {stdout}', shell.program],
        env=shell.environment,
        stderr=subprocess.PIPE,
        text=True,
        timeout=30,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def ran(harbour):
    """Return the requests for a placement that `moorage run` has sent to the harbour."""
    return [each for each in harbour.heard if "policy_rule_uri" in each]


def test_run_takes_an_existing_policy_unless_the_user_names_a_policy(shell, harbour):
    harbour.registered = ["mine:1-x", "other:1-x"]
    done = shell("run", "--", "true")
    assert [each["policy_rule_uri"] for each in ran(harbour)] == ["best_fit:1.0-stable", "mine:1-x"]
    assert (
        "using the policy mine:1-x, since best_fit:1.0-stable is not registered (--policy"
        in done.stderr
    )
    harbour.heard.clear()
    assert shell("run", "-p", "theirs:1-x", "--", "true").returncode == 5
    shell.environment["MOORAGE_POLICY"] = "theirs:1-x"
    assert shell("run", "--", "true").returncode == 5
    assert {each["policy_rule_uri"] for each in ran(harbour)} == {"theirs:1-x"}


def test_run_takes_the_only_backend_and_chooses_no_backend_among_several(shell, harbour):
    harbour.backends = ["kubernetes"]
    done = shell("run", "--", "true")
    assert done.returncode == 2
    assert "--image: expected an image, since the backend kubernetes" in done.stderr
    shell("run", "--image", "busybox", "--", "true")
    spec = {"command": ["true"], "environment": {}, "category": "container", "image": "busybox"}
    assert ran(harbour)[-1]["provision"] == {"backend": "kubernetes", "spec": spec}
    harbour.backends = ["aws", "ray"]
    done = shell("run", "--", "true")
    assert done.returncode == 2
    assert "--backend: expected a backend of this server: aws, ray" in done.stderr
    shell("run", "--backend", "ray", "--", "true")
    assert "workdir" not in ran(harbour)[-1]["provision"]["spec"]


def starts(phase, **more):
    workload = {"backend": "local", "phase": phase, "detail": more.pop("detail", "")}
    return {"state": "starting", "workload": workload, **more}


PROVISION = ("ask", "first:1-x", "--lease", "--provision", '{"backend": "local"}')


def test_ask_waits_until_its_workload_is_ready(shell, harbour):
    harbour.states = [starts("pulling", detail="3 of 9"), starts("ready", state="active")]
    done = shell(*PROVISION, "--until", "active")
    assert (done.returncode, done.stdout) == (0, "l-1  c0/n1 gpus 0,1\n")
    assert "l-1: pulling 3 of 9" in done.stderr
    assert "active; ends in" in done.stderr


def test_ask_reports_a_workload_that_never_becomes_ready(shell, harbour):
    assert shell("ask", "first:1-x", "--lease", "--until", "active").returncode == 2
    assert harbour.heard == [], "nothing starts"
    harbour.states = [starts("failed", state="ended", reason="no such image")]
    done = shell(*PROVISION, "--until=active", "--json")
    assert done.returncode == 7
    assert "no such image" in only_json(done)["message"]


def test_gpu_milli_are_shown_only_for_less_than_a_whole_gpu():
    for document, words in (
        ('{"cpu_milli": 100, "gpu_milli": 1000}', "CPU (milli) 100"),
        ('{"gpus": 2, "gpu_milli": 1000}', "GPUs 2"),
        ('{"gpus": 1, "gpu_milli": 500}', "GPUs 1, GPU share (milli) 500"),
    ):
        assert looking._wants(msgspec.json.decode(document, type=Resources)) == words


def test_history_lists_ended_leases_and_refusals(shell, harbour):
    rows = only_json(shell("history", "--json"))
    assert [row["request"] for row in rows] == ["r-1", "r-2", "r-3"]
    assert [row["request"] for row in only_json(shell("history", "--limit=1", "--json"))] == ["r-1"]
    [granted] = only_json(shell("history", "--state", "granted", "--json"))
    assert granted["state"] == "granted"
    assert "refused!" in shell("history").stdout


def test_tenants_are_shown_if_there_are_several(shell, harbour):
    for _ in range(2):
        shell("ask", "first:1-x", "--lease")
    assert "tenant" not in shell("leases").stdout
    assert shell("fleet", "cordon", "c0").stdout == "c0 is cordoned; no lease is there\n"
    harbour.leases["l-2"]["tenant"] = "ann"
    shown = shell("leases").stdout
    for word in ("tenant", "ann", "local"):
        assert word in shown


def test_a_refusal_is_explained_in_words(shell, harbour):
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
    for line in (
        "  Waiting does not help: it would not fit an empty fleet either.\n",
        "  What rules out most nodes: too few GPUs.\n",
        "  2 nodes have too few GPUs.\n",
        "  The largest amounts: nodes 2, GPUs 0.\n",
        "  It would fit with GPUs: 4 instead of 8, or without `where`.\n",
        'The policy\'s answer: {"a": []}\n',
    ):
        assert line in said
    for raw in ("verdict", "binding", "misfits", "largest:", "fits if", "ackends"):
        assert raw not in said
    error = only_json(shell("ask", "huge:1-x", "--json"))["error"]
    assert {name: error[name] for name in details} == details


def test_each_reason_why_a_node_does_not_fit_has_words():
    from moorage.policy.fleet import Misfit  # noqa: PLC0415  # The server's type; the client has only the phrases.

    for each in Misfit:
        if each is not Misfit.FITS:
            assert each.name.lower() in _MISFITS


@pytest.mark.parametrize("value", [[], {}, [""], {"a": [""]}, [[], {}]])
def test_empty_fields_are_not_printed(capsys, value):
    fields({"fits_if": value, "models": value, "state": "refused"})
    assert capsys.readouterr().out == "state    refused\n"


@pytest.mark.parametrize("place", ["", "c0/", "/n1", "/"])
@pytest.mark.parametrize("words", [("fleet", "cordon"), ("fleet", "drain"), ("whatif", "--drain")])
def test_a_node_or_cluster_with_an_empty_name_is_refused(shell, harbour, words, place):
    """An unset variable in `c0/$NODE` must not take all of c0 out of service."""
    done = shell(*words, place)
    assert done.returncode == 2, done.stderr
    assert harbour.heard == []


def test_a_node_named_by_a_hash_is_shown_with_a_short_name(shell, harbour):
    name = "3fa9" * 14
    harbour.nodes = [name, "n1"]
    assert f"{name[:12]} " in shell("fleet", "c0").stdout
    assert name not in shell("fleet", "c0").stdout
    assert only_json(shell("fleet", "c0", "--json"))[0]["node_id"] == name
    for given, node in ((f"c0/{name[:12]}", name), (f"c0/{name}", name), ("c0/n1", "n1")):
        shell("fleet", "cordon", given)
        assert (harbour.heard[-1]["op"], harbour.heard[-1]["node"]) == ("cordon", node)
