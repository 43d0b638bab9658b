"""`moorage run`, `exec` and `logs` as a user types them, against a real daemon."""

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
from served import MOORAGE, Server, here, serving, until

from moorage.testing.daemon_process import Running, child, serve_command, serve_variables
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
    """A command of the client, in this process."""
    return partial(server.moorage, MOORAGE_STATE=environment["MOORAGE_STATE"])


def started(environment, *words: str) -> "subprocess.Popen[str]":
    """Begin what `moorage` does to its end."""
    return subprocess.Popen(
        [MOORAGE, *words],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_the_output_and_the_exit_code_are_those_of_the_command(server, tmp_path, moorage):
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


def test_long_output_comes_whole(server, moorage):
    done = moorage("run", "--", "seq", "200000")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "".join(f"{number}\n" for number in range(1, 200_001))


def test_options_end_where_the_command_begins(server, tmp_path, moorage):
    (tmp_path / "seen").touch()
    done = moorage("run", "ls", "-a", "--color=never", folder=tmp_path)
    assert done.stdout.split() == [".", "..", "seen"], done.stderr


def test_as_json_it_is_one_document(server, moorage):
    done = moorage("run", "--json", "--", "sh", "-c", "echo hi; exit 3")
    document = json.loads(done.stdout)
    assert done.returncode == 3
    assert (document["exit_code"], document["output"]) == (3, "hi\n")


def test_a_folder_for_a_container_is_refused(server, moorage):
    done = moorage("run", "--image", "x", "--workdir", "/srv", "--", "true")
    assert done.returncode == 2
    assert "--workdir" in done.stderr


@pytest.mark.parametrize(("script", "code"), [("kill -9 $$", 137), ("kill -15 $$", 143)])
def test_a_signal_is_told_as_a_shell_does(server, script, code, moorage):
    assert moorage("run", "--", "sh", "-c", script).returncode == code


def test_a_command_that_cannot_start_says_why_and_exits_as_in_a_shell(server, moorage, tmp_path):
    plain = tmp_path / "plain.txt"
    plain.write_text("no program")
    for program, code, reason in (
        ("no-such-program", 127, "No such file or directory"),
        (str(tmp_path / "none"), 127, "No such file or directory"),
        (f"{plain}/below", 127, "Not a directory"),
        (str(plain), 126, "Permission denied"),
        (str(tmp_path), 126, "Permission denied"),
    ):
        done = moorage("run", "--", program)
        assert (done.returncode, f"{program}: {reason}" in done.stderr) == (code, True), done
    until(lambda: not server.held())


def test_a_command_that_fails_is_started_again_as_often_as_asked(
    server, environment, tmp_path, moorage
):
    script = 'n=$(wc -l < "$0"); echo >> "$0"; echo start $n; '
    script += 'until test -e "$0.$n"; do sleep 0.02; done; test $n = 1 || exit 7'
    starts = tmp_path / "starts"
    starts.touch()
    words = ["run", "--gpus", "1", "--requeue", "2", "--", "sh", "-c", script, str(starts)]
    process = started(environment, *words)
    assert process.stdout is not None
    for number in range(2):
        assert process.stdout.readline() == f"start {number}\n"
        (lease,) = server.held()
        (tmp_path / f"starts.{number}").touch()  # What it said is read: it may go on.
    rest, said = process.communicate(timeout=30)
    assert (process.returncode, rest) == (0, "")
    assert "attempt 1 failed; this is attempt 2" in said
    told = moorage("status", lease["id"]).stdout
    assert "2 of 3" in told
    assert f"attempt 1 failed on here/{platform.node()}: it ended by itself with exit" not in told
    assert "succeeded" in told
    until(lambda: not server.held())


def test_the_output_of_every_start_is_passed_on_and_kept_however_fast_they_follow(server, moorage):
    script = "echo out $MOORAGE_FENCING; echo MESSAGE >&2; exit 5"
    done = moorage("run", "--gpus", "1", "--requeue", "3", "--", "sh", "-c", script)
    assert done.returncode == 5
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["out", "MESSAGE"] * 4
    assert len(set(lines)) == 5, "each start has a fencing number of its own"
    for attempt in (1, 2, 3):
        assert f"attempt {attempt} failed; this is attempt {attempt + 1}" in done.stderr
    lease = done.stderr.split()[1]
    for words in (["logs", lease], ["logs", "-f", lease]):
        again = moorage(*words)
        assert again.stdout == done.stdout
        assert "attempt 1 failed; this is attempt 2" in again.stderr
    for attempt in (1, 2, 3, 4):
        one = moorage("logs", lease, "--attempt", str(attempt))
        assert one.stdout.splitlines() == lines[2 * attempt - 2 : 2 * attempt]
        assert one.stderr == ""
    assert moorage("logs", lease, "--tail", "8").stdout == "MESSAGE\n"
    never = moorage("logs", lease, "--attempt", "5")
    assert never.returncode == 5
    assert "has been started 4 times" in never.stderr
    told = server.say({"op": "status", "lease": lease})[0]["lease"]
    assert told["reason"].startswith("attempt 4 of 4 failed"), "not merely released"
    assert told["workload"]["outcome"]["attempt"] == 4


def test_what_a_start_wrote_is_told_under_its_own_number_or_not_at_all(
    server, environment, moorage
):
    done = moorage("run", "--requeue", "1", "--", "sh", "-c", "echo hello; exit 5")
    lease = done.stderr.split()[1]
    token = json.loads(Path(environment["MOORAGE_STATE"]).read_text())["leases"][lease]["token"]
    ask = {"op": "logs", "lease": lease, "token": token}
    for attempt in (1, 2):
        told = server.say({**ask, "attempt": attempt, "offset": 2})[0]["data"]
        assert (told["text"], told["attempt"], told["offset"]) == ("llo\n", attempt, 6)
        told = server.say({**ask, "attempt": attempt, "encoding": "base64"})[0]["data"]
        assert base64.b64decode(told["base64"]) == b"hello\n"
        assert "text" not in told
    on = server.say({**ask, "attempt": 1, "offset": 6})[0]["data"]
    assert (on["text"], on["attempt"], on["offset"], on["over"]) == ("", 2, 0, False)
    last = server.say({**ask, "attempt": 2, "offset": 6})[0]["data"]
    assert (last["text"], last["over"], last["exit_code"]) == ("", True, 5)
    error = server.say({**ask, "attempt": 3})[0]["error"]
    assert (error["code"], error["field"]) == ("not_found", "attempt")


def test_output_that_is_no_text_comes_out_as_it_was_written(server, environment, tmp_path):
    data = random.Random(5).randbytes(300_000)
    (tmp_path / "data").write_bytes(data)
    for words in (["run", "--", "cat", str(tmp_path / "data")],):
        done = subprocess.run(
            [MOORAGE, *words], env=environment, check=True, capture_output=True, timeout=60
        )
        assert done.stdout == data


def test_exec_logs_and_release_know_what_run_started(server, environment, tmp_path, moorage):
    words = ["run", "--gpus", "1", "--", "sh", "-c", "echo hello; exec sleep 1000"]
    process = started(environment, *words)
    assert process.stdout is not None
    assert process.stdout.readline() == "hello\n"
    (lease,) = [each["id"] for each in server.held()]
    assert Path(environment["MOORAGE_STATE"]).stat().st_mode & 0o777 == 0o600
    assert moorage("exec", lease, "--", "echo", "inside").stdout == "inside\n"
    assert moorage("logs", lease).stdout == "hello\n"
    assert moorage("release", lease).returncode == 0
    process.communicate(timeout=30)
    assert process.returncode != 0
    until(lambda: not server.held())


def test_a_command_that_fails_every_time_ends_as_it_did_last(server, moorage):
    words = ["run", "--gpus", "1", "--requeue", "1", "--", "sh", "-c", "echo no; exit 7"]
    done = moorage(*words)
    assert done.returncode == 7
    assert done.stdout.splitlines()[-1] == "no"
    lease = done.stderr.split()[1]
    told = moorage("status", lease).stdout
    assert f"attempt 2 failed on here/{platform.node()}: it ended by itself with exit" in told
    assert told.endswith("\n  no\n")
    assert "null" not in told
    (workload,) = [
        each["workload"]
        for each in json.loads(moorage("leases", "--state", "ended", "--json").stdout)
        if each["id"] == lease
    ]
    assert workload["outcome"]["nodes"] == [{"cluster_id": "here", "node_id": platform.node()}]


def test_more_than_there_is_is_refused(server, moorage):
    done = moorage("run", "--gpus", "9", "--", "true")
    assert done.returncode == 3
    assert "too few GPUs" in done.stderr


INT, TERM, HUP = signal.SIGINT, signal.SIGTERM, signal.SIGHUP


@pytest.mark.parametrize(
    ("sent", "late"),
    [
        *(([each], False) for each in (INT, TERM, HUP)),
        *((two, late) for two in ([INT, INT], [HUP, TERM]) for late in (False, True)),
    ],
)
def test_a_run_that_is_ended_by_a_signal_leaves_nothing(server, environment, sent, late, tmp_path):
    """It has waited for that, also where a second signal comes amid its end."""
    pid, ending = tmp_path / "pid", tmp_path / "ending"
    script = f"trap 'touch {ending}; sleep 1; exit' TERM; echo $$ > {pid}; "
    script += "while :; do sleep 0.05; done"
    process = started(environment, "run", "--gpus", "1", "--", "sh", "-c", script)
    until(lambda: pid.exists() and pid.read_text().strip())
    for number in sent:
        process.send_signal(number)
        until(lambda: ending.exists() or not late)
    said = process.communicate(timeout=30)[1]
    assert process.returncode in {128 + each for each in sent}  # They may come in any order.
    assert not server.held()
    assert not Path(f"/proc/{pid.read_text().strip()}").exists()
    assert "Traceback" not in said
    assert len(sent) > 1 or f"ended by {sent[0].name}" in said


def test_a_server_that_is_gone_is_told_and_a_late_ctrl_c_leaves(environment, tmp_path):
    begun = tmp_path / "begun"
    with child(serve_command(tmp_path / "data"), tmp_path / "log", serve_variables()) as (gone, at):
        one = Server(Running(at["ws"], at["http"], gone.pid, tmp_path / "log"))
        one.register(here())
        one.publish(catalog.document("best_fit"))
        there = environment | {"MOORAGE_URL": at["ws"], "MOORAGE_HTTP_URL": at["http"]}
        with started(there, "run", "--", "sh", "-c", f"touch {begun}; sleep 20") as process:
            until(begun.exists)
            gone.kill()
            assert "trying again" in next(line for line in process.stderr if "lease " not in line)
            process.send_signal(signal.SIGINT)
            while process.poll() is None:  # The first asks to end it; a later one leaves.
                time.sleep(1.0)  # What it waits for passes unsaid.
                process.send_signal(signal.SIGINT)
            assert process.returncode == 128 + signal.SIGINT
        one.close()


def test_what_a_command_writes_after_the_signal_is_passed_on(server, environment, tmp_path):
    """The last words of a job, say where it saved what it has, are what one wants to see."""
    begun = tmp_path / "begun"
    script = f"trap 'sleep 0.3; echo saved; exit 3' TERM; echo running; touch {begun}; "
    process = started(
        environment,
        "run",
        "--gpus",
        "1",
        "--",
        "sh",
        "-c",
        f"{script} while :; do sleep 0.05; done",
    )
    until(begun.exists)
    process.send_signal(signal.SIGTERM)
    wrote, said = process.communicate(timeout=30)
    assert (process.returncode, wrote.split("\n")[0]) == (128 + signal.SIGTERM, "running"), said
    assert wrote.endswith("saved\n")
    assert wrote.count("running") == 1
    assert not server.held()


@pytest.mark.heavy
def test_exec_and_logs_reach_a_running_workload(server, environment, moorage):
    provision = {
        "backend": "local",
        "spec": {"command": ["sh", "-c", "echo hello; sleep 1000"], "environment": {"A": "1"}},
    }
    words = [
        "ask",
        "best_fit:1.0-stable",
        "--gpus",
        "1",
        "--ttl",
        "60",
        "--provision",
        json.dumps(provision),
    ]
    lease = json.loads(moorage(*words, "--json").stdout)["lease"]["id"]
    until(lambda: moorage("logs", lease).stdout == "hello\n")
    done = moorage("exec", lease, "--", "sh", "-c", "echo $A $CUDA_VISIBLE_DEVICES; exit 5")
    assert (done.returncode, done.stdout.split()[0]) == (5, "1")
    late = moorage("exec", lease, "--limit", "0.2", "--", "sleep", "9")
    assert late.returncode == 1
    assert "longer than 0.2 s" in late.stderr
    assert moorage("logs", lease, "--tail", "3").stdout == "lo\n"
    assert moorage("logs", lease, "--tail", "0").stdout == ""
    follow = subprocess.Popen(
        [MOORAGE, "logs", "-f", lease], env=environment, stdout=subprocess.PIPE, text=True
    )
    assert moorage("release", lease).returncode == 0
    assert follow.communicate(timeout=30)[0] == "hello\n"
    until(lambda: not server.held())
    assert moorage("logs", lease).stdout == "hello\n", "what it wrote is kept"


@pytest.mark.parametrize("op", ["logs", "exec"])
def test_only_the_owner_looks_inside(server, op):
    provision = {"backend": "local", "spec": {"command": ["sleep", "1000"]}}
    reply = server.ask(
        "best_fit:1.0-stable", resources={}, lease={"ttl_seconds": 60}, provision=provision
    )
    lease = reply["lease"]
    more = {"command": ["true"]} if op == "exec" else {}
    wrong = server.say({"op": op, "lease": lease["id"], "token": "wrong", **more})[0]
    assert wrong["error"]["code"] == "wrong_token"
    unknown = server.say({"op": op, "lease": "nobody", "token": "x", **more})[0]
    assert unknown["error"]["code"] == "unknown_lease"
    server.release(lease)
    until(lambda: not server.held())
    bare = server.ask("best_fit:1.0-stable", resources={"gpus": 1}, lease={"ttl_seconds": 60})[
        "lease"
    ]
    nothing = server.say({"op": op, "lease": bare["id"], "token": bare["token"], **more})[0]
    assert nothing["error"]["code"] == "unsupported"
    server.release(bare)


ESCAPES = b"\x1b]0;owned\x07\x1b[31mred\x1b[0m\x9b2J\tgr\xc3\xbcn\r\n\xff\x00\x7f\xe2\x80\xaeend\n"


def on_a_terminal(environment, *words: str) -> bytes:
    """Return what a command writes to a terminal."""
    here, there = os.openpty()
    attributes = termios.tcgetattr(there)
    attributes[1] &= ~termios.OPOST  # The terminal itself adds nothing to what is written.
    termios.tcsetattr(there, termios.TCSANOW, attributes)
    with subprocess.Popen(
        [MOORAGE, *words], env=environment, stdin=subprocess.DEVNULL, stdout=there
    ) as process:
        os.close(there)
        said = b""
        with contextlib.suppress(OSError):  # That the other end is closed.
            while piece := os.read(here, 65_536):
                said += piece
        process.wait(60)
    os.close(here)
    return said


def test_a_workload_drives_no_terminal_but_files_get_every_byte(
    server, environment, tmp_path, moorage
):
    file = tmp_path / "escapes"
    file.write_bytes(ESCAPES)
    done = moorage("run", "--json", "--", "cat", str(file))
    lease = json.loads(done.stdout)["lease"]
    raw = subprocess.run([MOORAGE, "logs", lease], env=environment, capture_output=True, check=True)
    assert raw.stdout == ESCAPES
    document = moorage("logs", lease, "--json")
    assert json.loads(document.stdout) == {
        "lease": lease,
        "output": ESCAPES.decode(errors="replace"),
    }
    tame = "�]0;owned��[31mred�[0m�2J\tgrün\n����end\n"
    assert on_a_terminal(environment, "logs", lease).decode() == tame


def test_nor_does_a_command_inside_of_it(server, environment, tmp_path, moorage):
    file = tmp_path / "escapes"
    file.write_bytes(ESCAPES.decode(errors="replace").encode())
    with started(environment, "run", "--", "sleep", "60") as process:
        lease = process.stderr.readline().split()[1]
        inside = ("exec", lease, "--", "cat", str(file))
        until(lambda: moorage(*inside).returncode == 0)
        raw = subprocess.run([MOORAGE, *inside], env=environment, capture_output=True, check=True)
        assert raw.stdout == file.read_bytes()
        said = on_a_terminal(environment, *inside).decode()
        assert "\x1b" not in said
        assert "�[31mred" in said
        process.terminate()
        process.wait(60)
