"""`moored demo`, `replay`, `doctor` and `bench`, run as their users run them."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from served import policy, until

from moorage.backends.local import control_groups
from moorage.commands import display
from moorage.records.findings import DoctorFinding
from moorage.testing.daemon_process import child, daemon

pytestmark = pytest.mark.heavy  # Daemons.

FREE_PORTS = {"MOORAGE_PORT": "0", "MOORAGE_HTTP_PORT": "0"}
OPENB = Path(__file__).parents[3] / "shared" / "data" / "openb"


def moored(
    *words: str, expect: int = 0, timeout: float = 120, **variables: str
) -> subprocess.CompletedProcess:
    done = subprocess.run(
        [sys.executable, "-m", "moorage", *words],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == expect, done.stderr
    return done


def test_demo_shows_placement_lease_and_reason():
    shown = moored("demo", PYTHONIOENCODING="ascii").stdout  # What a bare terminal can show.
    assert "harbour/harbour-0 GPUs 0" in shown
    assert "It can never fit" in shown


def test_the_demo_does_not_follow_the_operators_own_settings():
    told = json.loads(
        moored(
            *("demo", "--json"),
            MOORAGE_HOST="0.0.0.0",  # noqa: S104  # Is not followed.
            MOORAGE_TOKENS="ann:sesame",
            MOORAGE_CONFIG="/nowhere",
            CLUSTER_SERVICE_URL="http://127.0.0.1:9",
        ).stdout
    )
    lease = told["exchanges"][0]["reply"]["lease"]
    assert (lease["state"], lease["tenant"]) == ("granted", "local")
    assert told["first_lease_seconds"] > 0


def test_a_command_that_is_stopped_takes_its_daemon_along(tmp_path):
    nodes, pods = tmp_path / "nodes.csv", tmp_path / "pods.csv"
    nodes.write_text("sn,cpu_milli,memory_mib,gpu,model\na,8000,8192,8,T4\n")
    rows = "".join(f"p{number},0,0,0,0\n" for number in range(50_000))
    pods.write_text("name,cpu_milli,memory_mib,num_gpu,gpu_milli\n" + rows)
    command = [sys.executable, "-m", "moorage", "replay", "--nodes", str(nodes)]
    with subprocess.Popen(
        [*command, "--pods", str(pods)], stderr=subprocess.PIPE, start_new_session=True, text=True
    ) as trial:
        assert trial.stderr is not None
        until(lambda: daemons_of(trial.pid))
        trial.send_signal(signal.SIGTERM)
        trial.communicate(timeout=60)
    assert trial.returncode == 128 + signal.SIGTERM
    assert not daemons_of(trial.pid)


def daemons_of(session: int) -> list[int]:
    """Return the daemons that a process or its children started, in a session of its own."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
            if b"serve" in words and os.getsid(int(folder.name)) == session:
                found.append(int(folder.name))
        except OSError:
            continue  # It ended meanwhile.
    return found


def test_doctor_names_the_option_where_the_folder_matters(tmp_path):
    for words, hints in (([], 2), (["--data", str(tmp_path)], 0)):
        told = json.loads(moored("doctor", "--json", *words, **FREE_PORTS).stdout)
        assert sum("doctor --data DIR" in each["detail"] for each in told["findings"]) == hints
        assert not words or str(tmp_path) in str(told)


def test_doctor_finds_this_machine_fit(capsys):
    told = json.loads(moored("doctor", "--json", **FREE_PORTS).stdout)
    assert told["ok"]
    assert {"seccomp", "self-test"} <= {
        finding["name"].removeprefix("sandbox: ") for finding in told["findings"]
    }
    (grouped,) = (each for each in told["findings"] if each["name"] == "control groups")
    assert "memory" in grouped["detail"]
    assert (grouped["state"] == "missing") == (control_groups.find().base is None)
    display.doctor([DoctorFinding(**finding) for finding in told["findings"]], as_json=False)
    assert "self-test" in capsys.readouterr().out


def test_doctor_shows_brackets_as_they_are(capsys):
    details = ["pip install 'moorage[aws]'", "/data/[/x]/ledger.db", "[red]"]
    findings = [DoctorFinding("[x]", "ok", detail) for detail in details]
    display.doctor(findings, as_json=False)
    shown = capsys.readouterr().out
    assert all(detail in shown for detail in [*details, "[x]"])


def test_doctor_knows_a_healthy_server_from_another_that_has_its_port():
    with daemon() as running, socket.create_server(("127.0.0.1", 0)) as other:
        ports = [str(urlsplit(url).port) for url in (running.ws, running.http)]
        healthy = {"MOORAGE_PORT": ports[0], "MOORAGE_HTTP_PORT": ports[1]}
        told = json.loads(moored("doctor", "--json", **healthy).stdout)
        found = [each for each in told["findings"] if each["name"].endswith(" port")]
        assert [each["state"] for each in found] == ["ok", "ok"]
        assert all("a healthy server" in each["detail"] for each in found)
        taken = healthy | {"MOORAGE_HTTP_PORT": str(other.getsockname()[1])}
        told = json.loads(moored("doctor", "--json", expect=1, **taken).stdout)
        broken = [each["name"] for each in told["findings"] if each["state"] == "broken"]
        assert broken == ["http port"]


def test_a_log_in_a_file_has_no_colours(tmp_path):
    environment = {"MOORAGE_LOG_FORMAT": "console", "MOORAGE_HTTP_HOST": "127.0.0.1"}
    options = {"MOORAGE_LOG_LEVEL": "debug", "MOORAGE_SESSIONS_MAX": "1000000", **environment}
    with daemon(environment=options) as running:
        assert "sessions" in running.log.read_text()
        assert "\x1b" not in running.log.read_text()


def test_the_command_line_says_which_port_and_which_option():
    with daemon(environment={"MOORAGE_TOKENS": "ann:sesame"}) as running:
        wrong = running.http.replace("http", "ws")
        told = moorage("--url", wrong, "--token", "sesame", "leases")
        assert f"connect the WebSocket to port {urlsplit(running.ws).port}" in told
        told = moorage("--url", running.ws, "--token", "nope", "leases")
        assert "--token" in told
        assert "MOORAGE_TOKEN" in told
        assert "--token" in moorage("--http-url", running.http, "policy", "list")


def moorage(*words: str) -> str:
    """Return what the client's command line said of a failure."""
    command = [Path(sys.executable).with_name("moorage"), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0
    return done.stderr


@pytest.fixture
def trace(tmp_path) -> tuple[str, ...]:
    nodes, pods = tmp_path / "nodes.csv", tmp_path / "pods.csv"
    nodes.write_text("sn,cpu_milli,memory_mib,gpu,model\na,8000,8192,2,T4\nb,8000,8192,2,T4\n")
    rows = "".join(f"p{number},1000,1024,1,500\n" for number in range(9))
    pods.write_text("name,cpu_milli,memory_mib,num_gpu,gpu_milli\n" + rows)
    return ("--nodes", str(nodes), "--pods", str(pods))


def test_replay_answers_every_request_of_a_trace(trace):
    told = json.loads(moored("replay", *trace, "--policy", "best_fit", "--json").stdout)
    (run,) = told["runs"]
    assert (run["requests"], run["answered"], run["granted"]) == (10, 10, 8)
    assert run["allocation_percent"] == 100
    assert run["refusals"] == {"no_capacity": 2}


def test_replay_shows_what_any_terminal_can_print(trace):
    words = ("--limit", "3", "--connections", "2")
    shown = moored("replay", *trace, *words, PYTHONIOENCODING="ascii")
    assert "expected_fill on pods.csv" in shown.stdout


def test_replay_names_what_is_wrong_with_a_file(tmp_path):
    bad = tmp_path / "nodes.csv"
    bad.write_text("sn,cpu_milli,memory_mib,gpu,model\na,many,8192,2,T4\n")
    done = moored("replay", "--nodes", str(bad), "--pods", str(bad), expect=1)
    assert "line 2, column cpu_milli" in done.stderr
    missing = moored("replay", "--nodes", "nowhere.csv", "--pods", str(bad), expect=1)
    assert "nowhere.csv" in missing.stderr
    bare, pods = tmp_path / "bare.csv", tmp_path / "pods.csv"
    bare.write_text("sn,cpu_milli,memory_mib,gpu,model\na,8000,8192,0,\n")
    pods.write_text("name,cpu_milli,memory_mib,num_gpu,gpu_milli\np,1000,1024,0,0\n")
    empty = moored("replay", "--nodes", str(bare), "--pods", str(pods), expect=1)
    assert "bare.csv, column gpu: expected at least one GPU" in empty.stderr
    moored("replay", "--nodes", str(bare), "--pods", str(pods), "--arrive", "inf", expect=2)


def test_bench_knows_its_names():
    done = moored("bench", "nonsense", expect=1)
    assert "grants" in done.stderr


@pytest.mark.trace
@pytest.mark.skipif(not OPENB.exists(), reason=f"the production traces are not at {OPENB}")
def test_openb_default_comes_out_as_published():
    words = ["--nodes", str(OPENB / "nodes.csv"), "--pods", str(OPENB / "pods_default.csv")]
    done = moored(
        "replay", *words, "--policy", "expected_fill", "--seeds", "2", "--json", timeout=900
    )
    told = json.loads(done.stdout)
    assert told["answered"] == told["requests"] > 20_000
    assert told["allocation_percent"] >= 95.9


def test_bench_figures_are_ratios(tmp_path):
    nodes, pods = tmp_path / "nodes.csv", tmp_path / "pods.csv"
    rows = "".join(f"n{number},64000,262144,8,T4\n" for number in range(150))
    nodes.write_text("sn,cpu_milli,memory_mib,gpu,model\n" + rows)
    rows = "".join(f"p{number},1000,1024,1,1000\n" for number in range(50))
    pods.write_text("name,cpu_milli,memory_mib,num_gpu,gpu_milli\n" + rows)
    words = ("bench", "grants", "--nodes", str(nodes), "--pods", str(pods), "--json")
    told = json.loads(moored(*words, timeout=600).stdout)["grants"]
    assert told["granted"] == told["requests"] == 1_200
    assert told["grants_to_echo"] > 0
    assert told["grant_p50_to_echo_p50"] > 0
    assert told["cpu_to_echo"] > 0


@pytest.mark.parametrize(
    ("number", "code", "words"),
    [(signal.SIGINT, 130, "moorage: interrupted\n"), (signal.SIGKILL, -signal.SIGKILL, "")],
    ids=["ctrl_c", "kill_9"],
)
def test_the_end_of_a_command_ends_what_it_has_started(tmp_path, number, code, words):
    """`policy test` runs the server's sandbox in a process of its own, with folders of its own."""
    (tmp_path / "hangs.py").write_text(
        policy("import time\ntime.sleep(60)\nreturn {}", "hangs:1-x")["code"]
    )
    folders = tmp_path / "folders"
    folders.mkdir()
    with subprocess.Popen(
        [Path(sys.executable).with_name("moorage"), "policy", "test", "hangs.py"],
        env=os.environ | {"TMPDIR": str(folders)},
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509  # As a shell has it; no lock is held.
    ) as process:
        until(lambda: any(folders.iterdir()))
        os.killpg(process.pid, number)
        out, err = process.communicate(timeout=60)  # To the end of the last process that has them.
    assert (process.returncode, out, err) == (code, "", words)
    until(lambda: not any(folders.iterdir()))


def test_a_daemon_starts_where_pythonpath_hides_standard_modules(tmp_path):
    for name in ("random", "types"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a policy')\n")
    log = tmp_path / "log"
    command = [Path(sys.executable).with_name("moored"), "serve", "--data", str(tmp_path / "data")]
    variables = {**os.environ, **FREE_PORTS, "PYTHONPATH": str(tmp_path)}
    with child(command, log, variables) as (_, ready):
        assert ready["event"] == "ready"
    assert (
        f"moored: {tmp_path}/random.py has the name of Python's own module random"
        in log.read_text()
    )


def test_health_asks_at_the_address_of_the_settings(tmp_path):
    with daemon(tmp_path) as running:
        port = str(urlsplit(running.http).port)
        assert json.loads(moored("health", "--http-port", port).stdout) == {"status": "ok"}
        everywhere = {"MOORAGE_HTTP_HOST": "0.0.0.0", "MOORAGE_TOKENS": "a:bbbbbbbb"}  # noqa: S104  # Loopback is asked.
        plain = {"MOORAGE_INSECURE_PLAINTEXT": "true", "MOORAGE_HTTP_PORT": port}
        assert "ok" in moored("health", **everywhere, **plain).stdout
    silent = moored("health", "--http-port", port, expect=1).stderr
    assert silent.startswith(f"moored: no answer at 127.0.0.1:{port}: ")
    assert len(silent.splitlines()) == 1
