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
from served import until

from moorage.backends.local import control_groups
from moorage.benchmarks.daemon_process import daemon
from moorage.commands import display
from moorage.commands.findings import DoctorFinding

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


@pytest.mark.heavy
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


@pytest.mark.heavy
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


@pytest.mark.heavy
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


@pytest.mark.heavy
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


@pytest.mark.heavy
def test_replay_answers_every_request_of_a_trace(trace):
    told = json.loads(moored("replay", *trace, "--policy", "best_fit", "--json").stdout)
    (run,) = told["runs"]
    assert (run["requests"], run["answered"], run["granted"]) == (10, 10, 8)
    assert run["allocation_percent"] == 100
    assert run["refusals"] == {"no_capacity": 2}


@pytest.mark.heavy
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
@pytest.mark.heavy
@pytest.mark.skipif(not OPENB.exists(), reason=f"the production traces are not at {OPENB}")
@pytest.mark.parametrize(
    ("policy", "least", "most"),
    [
        ("expected_fill", 95.9, 100),
        ("fgd", 95.2, 100),
    ],
)
def test_openb_default_comes_out_as_published(policy, least, most):
    words = ["--nodes", str(OPENB / "nodes.csv"), "--pods", str(OPENB / "pods_default.csv")]
    done = moored("replay", *words, "--policy", policy, "--seeds", "5", "--json", timeout=900)
    told = json.loads(done.stdout)
    assert told["answered"] == told["requests"] > 50_000
    assert least <= told["allocation_percent"] <= most


@pytest.mark.heavy
@pytest.mark.quiet
def test_bench_figures_are_ratios():
    names = ("grants", "first_lease", "startup")
    told = json.loads(moored("bench", *names, "--json", timeout=400).stdout)
    assert told["grants"]["granted"] == told["grants"]["requests"]
    assert told["grants"]["grants_to_echo"] > 0.04
    assert told["first_lease"]["first_lease_to_imports"] > 1
    assert told["startup"]["full_to_empty"] < 3, "with a million facts in the history"


@pytest.mark.heavy
@pytest.mark.quiet
def test_an_executor_costs_at_most_three_times_what_futures_cost_and_grows_as_n_log_n():
    told = json.loads(moored("bench", "workflow", "--json", timeout=400).stdout)["workflow"]
    for shape in ("chain", "layered"):
        assert told[f"sync_{shape}_to_futures"] <= 3, shape
        assert told[f"async_{shape}_to_futures"] <= 3, shape
    for figure in ("sync_chain", "async_chain", "sync_wide"):
        assert told[f"{figure}_growth"] <= 1.3, figure  # 1, and what noise adds.
    # All tasks of the loop live at once, and the garbage collector goes over them again and
    # again: for 100,000 bare tasks asyncio itself takes twice as long per task as for 10,000.
    assert told["async_wide_growth"] <= 2


@pytest.mark.heavy
@pytest.mark.quiet
def test_filters_over_many_clusters_cost_what_their_hits_cost():
    told = json.loads(moored("bench", "candidates", "--json", timeout=300).stdout)["candidates"]
    assert told["many"] == 100 * told["few"]
    for kind in ("filter", "filter_with_metrics", "filter_after_change", "ask"):
        assert told[f"{kind}_many_to_few"] <= 20, kind


@pytest.mark.heavy
@pytest.mark.quiet
def test_bench_of_the_sandbox():
    told = json.loads(moored("bench", "sandbox", "--json", timeout=300).stdout)["sandbox"]
    # Ratios only, and wide: other people's work on the machine moves them.
    assert 0.5 < told["extra_10000_to_10_nodes"] < 2
    for order in ("known", "changed", "in_order", "in_random_order"):
        assert 0 < told[f"two_calls_{order}_to_extra"] <= 1, order
        assert told[f"two_calls_{order}_to_extra"] < told["two_calls_lone_to_extra"] < 4, order
    # One call of so many as are sent along reaches the host; in random order more do at first.
    assert told["two_calls_known_asked"] == told["two_calls_changed_asked"] == 0
    assert 0 < told["two_calls_in_order_asked"] < 0.1
    assert 0 < told["two_calls_in_random_order_asked"] < 0.3
    assert told["two_calls_lone_asked"] == 1
    assert (
        0 < told["in_process_p50_microseconds_10_nodes"] < told["jailed_p50_microseconds_10_nodes"]
    )
    assert told["with_hogs_to_alone_p99"] > 0
    assert told["with_idle_burners_to_alone_p99"] > 0
    assert told["stuck_to_answer_p50_milliseconds"] > 0


@pytest.mark.heavy
@pytest.mark.quiet
def test_a_million_gpus_cost_what_their_hits_cost():
    told = json.loads(moored("bench", "fleet", "--json", timeout=1800).stdout)["fleet"]
    assert told["gpus_many"] == 100 * told["gpus_few"] == 1_000_000
    for kind in ("filter", "search", "ask", "ask_of_named", "ask_with_filter", "change", "resize"):
        assert told[f"{kind}_seconds_many_to_few"] <= 40, kind
    assert told["ingest_seconds_per_cluster_many_to_few"] <= 10
    assert told["daemon_mib_many"] <= 2048
