"""Tests of `moorage run`, `exec` and `logs` at a real daemon, as a user types them."""

import base64
import contextlib
import json
import os
import platform
import random
import signal
import subprocess
import termios
import time
from functools import partial
from pathlib import Path

import pytest
from served import MOORAGE, here, kill, serving, until

from moorage.lab.errors import CommandError
from moorage_policies import catalog

pytestmark = pytest.mark.heavy  # Many daemons.


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    short = {"MOORAGE_REQUEUE_PAUSE_SECONDS": "0"}
    with serving(tmp_path_factory.mktemp("data"), environment=short) as server:
        server.register(here())
        server.publish(catalog.document("best_fit"))
        yield server
        assert server.log() == ""


@pytest.fixture
def environment(server, tmp_path_factory) -> dict[str, str]:
    return {
        "PATH": os.environ["PATH"],
        "MOORAGE_URL": server.running.ws,
        "MOORAGE_HTTP_URL": server.running.http,
        "MOORAGE_STATE": str(tmp_path_factory.mktemp("state") / "leases.json"),
    }


@pytest.fixture
def moorage(server, environment):
    """Run a command of `moorage` in the test process."""
    return partial(server.moorage, MOORAGE_STATE=environment["MOORAGE_STATE"])


def start(environment, *words: str) -> "subprocess.Popen[str]":
    """Start a `moorage` command; return its process."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([MOORAGE, *words], env=environment, text=True, **pipes)


def test_run_prints_the_output_and_returns_the_exit_code_of_the_command(server, tmp_path, moorage):
    script = "echo gpus $CUDA_VISIBLE_DEVICES $WHO; pwd; exit 3"
    words = ["run", "--gpus", "2", "--env", "WHO=me", "--", "sh", "-c", script]
    done = moorage(*words, folder=tmp_path)
    assert done.returncode == 3, done.stderr
    first, second = done.stdout.splitlines()
    assert first.endswith(" me")
    assert len(first.split()[1].split(",")) == 2
    assert second == str(tmp_path)
    assert "lease " in done.stderr
    until(lambda: not server.held())


def test_options_of_moorage_run_end_where_the_command_begins(tmp_path, moorage):
    (tmp_path / "seen").touch()
    done = moorage("run", "ls", "-a", "--color=never", folder=tmp_path)
    assert done.stdout.split() == [".", "..", "seen"], done.stderr


@pytest.mark.parametrize(
    ("words", "code", "reason"),
    [
        (("--image", "x", "--workdir", "/srv"), 2, "--workdir"),
        (("--gpus", "9"), 3, "too few GPUs"),
    ],
)
def test_an_impossible_call_of_moorage_run_is_refused(moorage, words, code, reason):
    done = moorage("run", *words, "--", "true")
    assert (done.returncode, reason in done.stderr) == (code, True), done.stderr


@pytest.mark.parametrize(("script", "code"), [("kill -9 $$", 137), ("kill -15 $$", 143)])
def test_a_command_that_a_signal_ends_has_the_exit_code_of_a_shell(script, code, moorage):
    assert moorage("run", "--", "sh", "-c", script).returncode == code


def test_a_command_that_cannot_start_has_the_exit_code_of_a_shell(server, moorage, tmp_path):
    plain = tmp_path / "plain.txt"
    plain.write_text("no program")
    for program, code, reason in (
        ("no-such-program", 127, "No such file or directory"),
        (f"{plain}/below", 127, "Not a directory"),
        (str(plain), 126, "Permission denied"),
    ):
        done = moorage("run", "--", program)
        assert (done.returncode, f"{program}: {reason}" in done.stderr) == (code, True), done
    until(lambda: not server.held())


@pytest.fixture(scope="module")
def failed_lease(server, tmp_path_factory) -> tuple[str, str, list[str]]:
    """A lease whose command failed four times, its token, and the lines of its output."""
    state = tmp_path_factory.mktemp("state") / "leases.json"
    script = "echo out $MOORAGE_FENCING; echo MESSAGE >&2; exit 5"
    words = ["run", "--gpus", "1", "--requeue", "3", "--", "sh", "-c", script]
    done = server.moorage(*words, MOORAGE_STATE=str(state))
    assert done.returncode == 5
    for attempt in (1, 2, 3):
        assert f"attempt {attempt} failed; this is attempt {attempt + 1}" in done.stderr
    lease = done.stderr.split()[1]
    return lease, json.loads(state.read_text())["leases"][lease]["token"], done.stdout.splitlines()


def test_the_output_of_each_start_of_a_lease_stays_readable(failed_lease, moorage):
    lease, _, lines = failed_lease
    assert [line.split()[0] for line in lines] == ["out", "MESSAGE"] * 4
    assert len(set(lines)) == 5, "each start has a fencing number of its own"
    for words in (["logs", lease], ["logs", "-f", lease]):
        again = moorage(*words)
        assert again.stdout.splitlines() == lines
        assert "attempt 1 failed; this is attempt 2" in again.stderr
    for attempt in (1, 2, 3, 4):
        one = moorage("logs", lease, "--attempt", str(attempt))
        assert one.stdout.splitlines() == lines[2 * attempt - 2 : 2 * attempt]
        assert one.stderr == ""
    assert moorage("logs", lease, "--tail", "8").stdout == "MESSAGE\n"
    never = moorage("logs", lease, "--attempt", "5")
    assert never.returncode == 5
    assert "has been started 4 times" in never.stderr


def test_a_command_that_always_fails_ends_with_the_reason_of_its_last_start(
    server, failed_lease, moorage
):
    lease, *_ = failed_lease
    ended = server.status({"id": lease})
    assert ended["reason"].startswith("attempt 4 of 4 failed"), "not “released”"
    outcome = ended["workload"]["outcome"]
    assert outcome["attempt"] == 4
    assert outcome["nodes"] == [{"cluster_id": "here", "node_id": platform.node()}]
    shown = moorage("status", lease).stdout
    assert f"attempt 4 failed on here/{platform.node()}: it ended by itself with exit" in shown
    assert shown.endswith("\n  MESSAGE\n")
    assert "null" not in shown


def test_the_output_of_a_start_is_read_by_the_number_of_the_start(server, failed_lease):
    lease, token, lines = failed_lease

    def logs(attempt: int, **more) -> dict:
        message = {"op": "logs", "lease": lease, "token": token, "attempt": attempt}
        return server.say(message | more)[0]

    for attempt in (1, 4):
        text = "".join(f"{line}\n" for line in lines[2 * attempt - 2 : 2 * attempt])
        data = logs(attempt, offset=2)["data"]
        assert (data["text"], data["attempt"], data["offset"]) == (text[2:], attempt, len(text))
        data = logs(attempt, encoding="base64")["data"]
        assert base64.b64decode(data["base64"]).decode() == text
        assert "text" not in data
    on = logs(3, offset=len(text))["data"]
    assert (on["text"], on["attempt"], on["offset"], on["over"]) == ("", 4, 0, False)
    last = logs(4, offset=len(text))["data"]
    assert (last["text"], last["over"], last["exit_code"]) == ("", True, 5)
    error = logs(5)["error"]
    assert (error["code"], error["field"]) == ("not_found", "attempt")


def test_long_binary_output_is_printed_unchanged(environment, tmp_path):
    data = random.Random(5).randbytes(1_500_000)
    (tmp_path / "data").write_bytes(data)
    command = [MOORAGE, "run", "--", "cat", str(tmp_path / "data")]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, timeout=60)
    assert done.stdout == data


def test_exec_and_logs_and_release_find_the_lease_of_moorage_run(server, environment, moorage):
    script = "echo hello; exec sleep 1000"
    words = ["run", "--gpus", "1", "--env", "A=1", "--", "sh", "-c", script]
    process = start(environment, *words)
    assert process.stdout is not None
    assert process.stdout.readline() == "hello\n"
    (lease,) = [each["id"] for each in server.held()]
    assert Path(environment["MOORAGE_STATE"]).stat().st_mode & 0o777 == 0o600
    done = moorage("exec", lease, "--", "sh", "-c", "echo $A $CUDA_VISIBLE_DEVICES; exit 5")
    assert (done.returncode, done.stdout.split()[0]) == (5, "1")
    late = moorage("exec", lease, "--limit", "0.2", "--", "sleep", "9")
    assert (late.returncode, "longer than 0.2 s" in late.stderr) == (1, True)
    for tail, text in (("6", "hello\n"), ("3", "lo\n"), ("0", "")):
        assert moorage("logs", lease, "--tail", tail).stdout == text
    follow = start(environment, "logs", "-f", lease)
    assert moorage("release", lease).returncode == 0
    assert follow.communicate(timeout=30)[0] == "hello\n"
    process.communicate(timeout=30)
    assert process.returncode != 0
    until(lambda: not server.held())
    assert moorage("logs", lease).stdout == "hello\n", "the output stays"


INT, TERM, HUP = signal.SIGINT, signal.SIGTERM, signal.SIGHUP


@pytest.mark.parametrize(
    ("sent", "late"),
    [
        ([INT], False),
        ([HUP], False),
        ([HUP, TERM], False),
        ([INT, INT], True),
    ],
)
def test_moorage_run_that_a_signal_ends_leaves_nothing_behind(
    server, environment, sent, late, tmp_path
):
    """The command waits for its workload to end, even after a second signal."""
    pid, ending = tmp_path / "pid", tmp_path / "ending"
    script = f"trap 'touch {ending}; sleep 0.5; exit' TERM; echo $$ > {pid}; "
    script += "while :; do sleep 0.05; done"
    process = start(environment, "run", "--gpus", "1", "--", "sh", "-c", script)
    until(lambda: pid.exists() and pid.read_text().strip())
    for number in sent:
        process.send_signal(number)
        until(lambda: ending.exists() or not late)
    errors = process.communicate(timeout=30)[1]
    assert process.returncode in {128 + each for each in sent}  # They may arrive in any order.
    assert not server.held()
    assert not Path(f"/proc/{pid.read_text().strip()}").exists()
    assert "Traceback" not in errors
    assert len(sent) > 1 or f"ended by {sent[0].name}" in errors


def test_a_late_ctrl_c_ends_a_command_whose_server_is_gone(environment, tmp_path):
    begun = tmp_path / "begun"
    with contextlib.suppress(CommandError), serving() as one:
        one.register(here())
        one.publish(catalog.document("best_fit"))
        urls = {"MOORAGE_URL": one.running.ws, "MOORAGE_HTTP_URL": one.running.http}
        words = ("run", "--", "sh", "-c", f"touch {begun}; sleep 20")
        with start(environment | urls, *words) as process:
            until(begun.exists)
            kill(one)
            assert "trying again" in next(line for line in process.stderr if "lease " not in line)
            process.send_signal(signal.SIGINT)
            while process.poll() is None:  # The first Ctrl-C ends the lease; a later one exits.
                time.sleep(0.5)  # Only a Ctrl-C some seconds later exits.
                process.send_signal(signal.SIGINT)
            assert process.returncode == 128 + signal.SIGINT


def test_output_that_a_command_writes_after_the_signal_is_printed(server, environment, tmp_path):
    """The last output of a job, such as where it saved its work, matters to its user."""
    begun = tmp_path / "begun"
    script = f"trap 'sleep 0.3; echo saved; exit 3' TERM; echo running; touch {begun}; "
    script += "while :; do sleep 0.05; done"
    process = start(environment, "run", "--gpus", "1", "--", "sh", "-c", script)
    until(begun.exists)
    process.send_signal(signal.SIGTERM)
    wrote, errors = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM, errors
    assert wrote.startswith("running\n")
    assert wrote.endswith("saved\n")
    assert not server.held()


def test_only_the_tenant_of_a_lease_reads_its_output_and_runs_commands_in_it(server):
    def lease_node(**more) -> dict:
        reply = server.ask("best_fit:1.0-stable", lease={"ttl_seconds": 60}, **more)
        return reply["lease"]

    spec = {"command": ["sleep", "1000"]}
    lease = lease_node(resources={}, provision={"backend": "local", "spec": spec})
    bare = lease_node(resources={"gpus": 1})
    for op in ({"op": "logs"}, {"op": "exec", "command": ["true"]}):
        for name, token, code in (
            (lease["id"], "wrong", "wrong_token"),
            ("unknown", "x", "unknown_lease"),
            (bare["id"], bare["token"], "unsupported"),
        ):
            (reply,) = server.say({**op, "lease": name, "token": token})
            assert reply["error"]["code"] == code
    server.release(lease)
    server.release(bare)
    until(lambda: not server.held())


ESCAPES = b"\x1b]0;owned\x07\x1b[31mred\x1b[0m\x9b2J\tgr\xc3\xbcn\r\n\xff\x00\x7f\xe2\x80\xaeend\n"


def on_a_terminal(environment, *words: str) -> bytes:
    """Return the output of a command at a terminal."""
    here, there = os.openpty()
    attributes = termios.tcgetattr(there)
    attributes[1] &= ~termios.OPOST  # The terminal must not change the output.
    termios.tcsetattr(there, termios.TCSANOW, attributes)
    with subprocess.Popen(
        [MOORAGE, *words], env=environment, stdin=subprocess.DEVNULL, stdout=there
    ) as process:
        os.close(there)
        wrote = b""
        with contextlib.suppress(OSError):  # The other end is closed.
            while piece := os.read(here, 65_536):
                wrote += piece
        process.wait(60)
    os.close(here)
    return wrote


def test_escape_sequences_of_a_workload_reach_files_but_no_terminal(environment, tmp_path, moorage):
    file = tmp_path / "escapes"
    file.write_bytes(ESCAPES)
    done = moorage("run", "--json", "--", "cat", str(file))
    text = ESCAPES.decode(errors="replace")
    document = json.loads(done.stdout)
    assert (document["exit_code"], document["output"]) == (0, text)
    lease = document["lease"]
    raw = subprocess.run([MOORAGE, "logs", lease], env=environment, capture_output=True, check=True)
    assert raw.stdout == ESCAPES
    logs = json.loads(moorage("logs", lease, "--json").stdout)
    assert logs == {"lease": lease, "output": text}
    tame = "�]0;owned��[31mred�[0m�2J\tgrün\n����end\n"
    assert on_a_terminal(environment, "logs", lease).decode() == tame


def test_escape_sequences_of_an_exec_command_reach_no_terminal(environment, tmp_path, moorage):
    file = tmp_path / "escapes"
    file.write_bytes(ESCAPES.decode(errors="replace").encode())
    with start(environment, "run", "--", "sh", "-c", "echo begun; exec sleep 60") as process:
        assert process.stdout.readline() == "begun\n"
        lease = process.stderr.readline().split()[1]
        inside = ("exec", lease, "--", "cat", str(file))
        assert moorage(*inside).stdout.encode() == file.read_bytes()
        wrote = on_a_terminal(environment, *inside).decode()
        assert "\x1b" not in wrote
        assert "�[31mred" in wrote
        process.terminate()
        process.wait(60)
