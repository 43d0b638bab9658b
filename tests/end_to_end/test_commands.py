"""Tests of `moored demo`, `replay`, `doctor` and `bench`, as their users run them."""

import contextlib
import json
import os
import pwd
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from served import MOORAGE, invoke, policy, ran, until

from moorage.backends.local import control_groups
from moorage.commands import display, examination
from moorage.daemon.door_record import DoorRecord, find_network, write_doors
from moorage.records.findings import DoctorFinding
from moorage.testing.daemon_process import (
    Running,
    child,
    daemon,
    serve_command,
    serve_variables,
)
from tests.certificates import certificate, pem_of
from tests.ports import free_port
from tests.sites import Answer, Site

pytestmark = pytest.mark.heavy

FREE_PORTS = {"MOORAGE_PORT": "0", "MOORAGE_HTTP_PORT": "0"}
OPENB = Path(__file__).parents[3] / "shared" / "data" / "openb"


def moored(
    *words: str | Path, expect: int = 0, seconds: float = 120, **variables: str
) -> subprocess.CompletedProcess:
    done = ran(sys.executable, "-m", "moorage", *words, seconds=seconds, **variables)
    assert done.returncode == expect, done.stderr
    return done


def test_the_demo_shows_placement_and_lease_and_reason():
    shown = moored("demo", PYTHONIOENCODING="ascii").stdout  # A plain terminal can show only ASCII.
    assert "harbour/harbour-0 GPUs 0" in shown
    assert "It can never fit" in shown


def test_the_demo_does_not_follow_the_operators_own_settings():
    own = {
        "MOORAGE_HOST": "0.0.0.0",  # noqa: S104  # The demo ignores it.
        "MOORAGE_TOKENS": "ann:sesame",
        "MOORAGE_CONFIG": "/nowhere",
        "CLUSTER_SERVICE_URL": "http://127.0.0.1:9",
    }
    shown = json.loads(moored("demo", "--json", **own).stdout)
    lease = shown["exchanges"][0]["reply"]["lease"]
    assert (lease["state"], lease["tenant"]) == ("granted", "local")
    assert shown["first_lease_seconds"] > 0


def write_trace(folder: Path, nodes: str, pods: str) -> tuple[str, ...]:
    """Write the files of a trace; return the options that name the files."""
    files = folder / "nodes.csv", folder / "pods.csv"
    files[0].write_text("sn,cpu_milli,memory_mib,gpu,model\n" + nodes)
    files[1].write_text("name,cpu_milli,memory_mib,num_gpu,gpu_milli\n" + pods)
    return ("--nodes", str(files[0]), "--pods", str(files[1]))


def test_a_command_that_is_stopped_stops_the_daemon_that_it_started(tmp_path):
    rows = "".join(f"p{number},0,0,0,0\n" for number in range(50_000))
    trace = write_trace(tmp_path, "a,8000,8192,8,T4\n", rows)
    command = [sys.executable, "-m", "moorage", "replay", *trace]
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, start_new_session=True, text=True
    ) as trial:
        until(lambda: daemons_of(trial.pid))
        trial.send_signal(signal.SIGTERM)
        trial.communicate(timeout=60)
    assert trial.returncode == 128 + signal.SIGTERM
    assert not daemons_of(trial.pid)


def daemons_of(session: int) -> list[int]:
    """Return the daemons that a process or its children started, each in its own session."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
            if b"serve" in words and os.getsid(int(folder.name)) == session:
                found.append(int(folder.name))
        except OSError:
            continue  # The process ended meanwhile.
    return found


def doctor(*words: str | Path, expect: int = 0, **variables: str) -> dict:
    done = invoke("doctor", "--json", *words, **FREE_PORTS | variables)
    assert done.returncode == expect, done.stdout
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="module")
def running(data: Path) -> Iterator[Running]:
    with daemon(data) as running:
        yield running


def at_ports_of(running: Running) -> dict[str, str]:
    """Return the settings of a server at these ports."""
    ports = [str(urlsplit(url).port) for url in (running.ws, running.http)]
    return dict(zip(FREE_PORTS, ports, strict=True))


def test_doctor_with_a_named_folder_does_not_suggest_the_option_data(tmp_path):
    report = doctor("--data", tmp_path, MOORAGE_TOKENS="ann:sesame12")
    assert "not on this machine, since local_here is false" in about("backend: local", report)[1]
    assert not any("doctor --data DIR" in each["detail"] for each in report["findings"])
    assert str(tmp_path) in str(report)


def test_doctor_finds_no_fault_on_this_machine(capsys):
    report = doctor()
    assert "on this machine, since local_here is true" in about("backend: local", report)[1]
    assert report["ok"]
    findings = {each["name"].removeprefix("sandbox: "): each for each in report["findings"]}
    assert {"seccomp", "self-test"} <= findings.keys()
    assert sum("doctor --data DIR" in each["detail"] for each in report["findings"]) == 2
    grouped = findings["control groups"]
    assert "memory" in grouped["detail"]
    assert (grouped["state"] == "missing") == (control_groups.find().base is None)
    display.doctor([DoctorFinding(**each) for each in report["findings"]], as_json=False)
    assert "self-test" in capsys.readouterr().out


def test_doctor_puts_brackets_around_addresses_of_ipv6():
    port = str(free_port())
    report = doctor(MOORAGE_HOST="::1", MOORAGE_PORT=port)
    assert about("websocket port", report) == ("ok", f"[::1]:{port} is free")


def test_doctor_prints_brackets_unchanged(capsys):
    details = ["pip install 'moorage[aws]'", "/data/[/x]/ledger.db", "[red]"]
    findings = [DoctorFinding("[x]", "ok", detail) for detail in details]
    display.doctor(findings, as_json=False)
    shown = capsys.readouterr().out
    assert all(detail in shown for detail in [*details, "[x]"])


def test_doctor_distinguishes_a_healthy_server_from_another_program_on_its_port(
    data: Path, running: Running
):
    at = at_ports_of(running)
    report = doctor("--data", data, **at)
    for name in ("websocket port", "http port"):
        state, detail = about(name, report)
        assert (state, "a healthy server runs there already" in detail) == ("ok", True)
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = at | {"MOORAGE_HTTP_PORT": str(other.getsockname()[1])}
        report = doctor("--data", data, expect=1, **taken)
    broken = [each["name"] for each in report["findings"] if each["state"] == "broken"]
    assert broken == ["http port"]


def test_the_log_of_the_daemon_in_a_file_has_no_colours():
    options = {"MOORAGE_LOG_FORMAT": "console", "MOORAGE_HTTP_HOST": "127.0.0.1"}
    options |= {"MOORAGE_LOG_LEVEL": "debug", "MOORAGE_SESSIONS_MAX": "1000000"}
    with daemon(environment=options) as running:
        assert "sessions" in running.log.read_text()
        assert "\x1b" not in running.log.read_text()


@pytest.fixture
def trace(tmp_path) -> tuple[str, ...]:
    rows = "".join(f"p{number},1000,1024,1,500\n" for number in range(9))
    return write_trace(tmp_path, "a,8000,8192,2,T4\nb,8000,8192,2,T4\n", rows)


def test_replay_answers_every_request_of_a_trace(trace):
    (run,) = json.loads(moored("replay", *trace, "--policy", "best_fit", "--json").stdout)["runs"]
    assert (run["requests"], run["answered"], run["granted"]) == (10, 10, 8)
    assert run["allocation_percent"] == 100
    assert run["refusals"] == {"no_capacity": 2}


def test_replay_prints_only_characters_that_its_output_can_encode(trace):
    words = ("--limit", "3", "--connections", "2")
    shown = moored("replay", *trace, *words, PYTHONIOENCODING="ascii")
    assert "expected_fill on pods.csv" in shown.stdout


def test_replay_names_the_fault_in_a_file(tmp_path):
    bad = write_trace(tmp_path, "a,many,8192,2,T4\n", "")
    assert "line 2, column cpu_milli" in invoke("replay", *bad).stderr
    bare = write_trace(tmp_path, "a,8000,8192,0,\n", "p,1000,1024,0,0\n")
    assert "nodes.csv, column gpu: expected at least one GPU" in invoke("replay", *bare).stderr
    assert invoke("replay", *bare, "--arrive", "inf").returncode == 2


def test_bench_refuses_the_name_of_an_unknown_benchmark():
    done = invoke("bench", "nonsense")
    assert (done.returncode, "grants" in done.stderr) == (1, True)


@pytest.mark.trace
@pytest.mark.skipif(not OPENB.exists(), reason=f"the production traces are not at {OPENB}")
def test_the_default_of_the_openb_benchmark_gives_the_published_figures():
    trace = ["--nodes", str(OPENB / "nodes.csv"), "--pods", str(OPENB / "pods_default.csv")]
    words = ["replay", *trace, "--policy", "expected_fill", "--seeds", "1", "--json"]
    outcome = json.loads(moored(*words, seconds=900).stdout)
    assert outcome["answered"] == outcome["requests"] > 10_000
    assert outcome["allocation_percent"] >= 95.9


def test_each_figure_of_bench_is_a_ratio(tmp_path):
    nodes = "".join(f"n{number},64000,262144,8,T4\n" for number in range(150))
    pods = "".join(f"p{number},1000,1024,1,1000\n" for number in range(50))
    words = ("bench", "grants", *write_trace(tmp_path, nodes, pods), "--json")
    grants = json.loads(moored(*words, seconds=600).stdout)["grants"]
    assert grants["granted"] == grants["requests"] == 1_200
    for name in ("grants_to_echo", "grant_p50_to_echo_p50", "cpu_to_echo"):
        assert grants[name] > 0


@pytest.mark.parametrize(
    ("number", "code", "words"),
    [(signal.SIGINT, 130, "moorage: interrupted\n"), (signal.SIGKILL, -signal.SIGKILL, "")],
    ids=["ctrl_c", "kill_9"],
)
def test_the_end_of_moorage_policy_test_ends_its_child_processes(tmp_path, number, code, words):
    """`policy test` runs the server's sandbox in a separate process, with its own folders."""
    (tmp_path / "hangs.py").write_text(
        policy("import time\ntime.sleep(60)\nreturn {}", "hangs:1-x")["code"]
    )
    folders = tmp_path / "folders"
    folders.mkdir()
    with subprocess.Popen(
        [MOORAGE, "policy", "test", "hangs.py"],
        env=os.environ | {"TMPDIR": str(folders)},
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509  # As a shell sets it; no lock is held.
    ) as process:
        until(lambda: any(folders.iterdir()))
        os.killpg(process.pid, number)
        out, err = process.communicate(timeout=60)  # Until no process holds the pipes.
    assert (process.returncode, out, err) == (code, "", words)
    until(lambda: not any(folders.iterdir()))


def test_a_daemon_starts_although_pythonpath_hides_standard_modules(tmp_path):
    for name in ("random", "types"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a policy')\n")
    log = tmp_path / "log"
    command = [MOORAGE.with_name("moored"), "serve", "--data", str(tmp_path / "data")]
    variables = {**os.environ, **FREE_PORTS, "PYTHONPATH": str(tmp_path)}
    with child(command, log, variables) as (_, ready):
        assert ready["event"] == "ready"
    expected = f"moored: {tmp_path}/random.py has the name of Python's own module random"
    assert expected in log.read_text()


def test_health_uses_the_address_of_the_settings(running):
    port = str(urlsplit(running.http).port)
    assert json.loads(invoke("health", "--http-port", port).stdout) == {"status": "ok"}
    everywhere = {"MOORAGE_HTTP_HOST": "0.0.0.0", "MOORAGE_TOKENS": "a:bbbbbbbb"}  # noqa: S104  # The command connects to loopback.
    plain = {"MOORAGE_INSECURE_PLAINTEXT": "true", "MOORAGE_HTTP_PORT": port}
    assert "ok" in invoke("health", **everywhere, **plain).stdout


def test_health_names_the_address_that_does_not_answer():
    port = str(free_port())
    silent = moored("health", "--http-port", port, expect=1).stderr
    assert silent.startswith(f"moored: no answer at 127.0.0.1:{port}: ")
    assert len(silent.splitlines()) == 1


def about(name: str, report: dict) -> tuple[str, str]:
    """Return the state and the detail of a finding."""
    (found,) = [each for each in report["findings"] if each["name"] == name]
    return found["state"], found["detail"]


def test_doctor_names_ended_servers_and_damage(tmp_path: Path) -> None:
    signer = certificate("an authority")
    for name, days in (("old", -1), ("new", 100), ("soon", 3), ("today", 0.5)):
        for ending, text in zip(
            ("pem", "key"), pem_of(*certificate(name, signer, days)), strict=True
        ):
            (tmp_path / f"{name}.{ending}").write_bytes(text)

    def tls(certificate: str, key: str) -> dict[str, str]:
        named = {"CERT": f"{certificate}.pem", "KEY": f"{key}.key"}
        return {f"MOORAGE_TLS_{name}": str(tmp_path / file) for name, file in named.items()}

    data = ("--data", tmp_path / "data")
    for name, expires in (("short", "2d"), ("long", "100d")):
        words = ("--role", "client", "--tenant", "ann", "--expires", expires)
        assert invoke("token", "create", name, *words, *data).returncode == 0
    away = {"MOORAGE_OIDC_ISSUER": "http://127.0.0.1:1", "MOORAGE_OIDC_AUDIENCE": "moorage"}
    report = doctor(*data, expect=1, **tls("new", "new"), **away)
    assert about("tls", report)[0] == "ok"
    assert "short in 1 days" in about("tokens", report)[1]
    assert "long" not in about("tokens", report)[1]
    state, detail = about("issuer", report)
    assert (state, "none of its tokens can be verified" in detail) == ("broken", True)
    assert about("tokens", report)[0] == "warning"
    assert about("audit log", report) == (
        "ok",
        "the last entry is 2; `moored audit verify` checks all of them",
    )
    assert about("disk", report)[0] == "ok"

    (log,) = (tmp_path / "data" / "audit").glob("*.jsonl")
    log.write_text("no entry\n")
    (tmp_path / "data" / "tokens.db").write_bytes(b"no database" * 1_000)
    report = doctor(*data, expect=1, MOORAGE_AUDIT_DAYS="30", **tls("new", "old"))
    for name in ("tls", "tokens", "audit log"):
        assert about(name, report)[0] == "broken", report
    assert "expected a certificate and its key" in about("tls", report)[1]
    assert "put back a copy of this file, or move it away" in about("tokens", report)[1]
    report = doctor(expect=1, **tls("old", "old"))
    assert "expired" in about("tls", report)[1]
    state, detail = about("tls", doctor(**tls("soon", "soon")))
    assert (state, "in 2 days: replace it" in detail) == ("warning", True)
    state, detail = about("tls", doctor(expect=1, **tls("today", "today")))
    assert (state, "within a day: replace it" in detail) == ("broken", True)


def test_doctor_names_the_setting_to_change(tmp_path: Path) -> None:
    file = tmp_path / "a file"
    file.touch()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        tls = {"MOORAGE_TLS_CERT": str(tmp_path / "none"), "MOORAGE_TLS_KEY": str(file)}
        report = doctor("--data", file, expect=1, MOORAGE_HTTP_PORT=port, **tls)
    said = {
        "ledger": f"{file}: Not a directory; expected a folder that this user may write",
        "http port": "Address already in use; expected a free port of this machine: change http_h",
        "tls": "none: No such file or directory; correct tls_cert, tls_key or tls_client_ca",
    }
    for name, part in said.items():
        state, detail = about(name, report)
        assert (state, part in detail) == ("broken", True), detail


def test_doctor_knows_the_server_of_another_folder(running: Running, tmp_path: Path) -> None:
    other = doctor("--data", tmp_path / "other", expect=1, **at_ports_of(running))
    for name in ("websocket port", "http port"):
        state, detail = about(name, other)
        assert (state, f"no server uses {tmp_path / 'other'}" in detail) == ("broken", True), detail


def test_doctor_names_the_ports_of_its_own_server(data: Path, running: Running) -> None:
    free = [str(free_port()) for _ in FREE_PORTS]
    report = doctor("--data", data, **dict(zip(FREE_PORTS, free, strict=True)))
    places = " and ".join(sorted(urlsplit(url).netloc for url in (running.ws, running.http)))
    for name, port, settings in (
        ("websocket port", free[0], "host, port"),
        ("http port", free[1], "http_host, http_port"),
    ):
        expected = (
            f"127.0.0.1:{port} ({settings}): the server that uses {data} listens at {places} "
            "instead: restart it with these settings, or run this command with its settings"
        )
        assert about(name, report) == ("missing", expected)


def test_doctor_names_the_address_of_its_own_server(data: Path, running: Running) -> None:
    every = {"MOORAGE_HTTP_HOST": "0.0.0.0", "MOORAGE_INSECURE_PLAINTEXT": "true"}  # noqa: S104  # Not bound.
    at = at_ports_of(running) | every | {"MOORAGE_TOKENS": "ann:sesame12"}
    report = doctor("--data", data, **at)
    assert about("websocket port", report)[0] == "ok"
    state, detail = about("http port", report)
    assert (state, urlsplit(running.http).netloc in detail) == ("missing", True), detail
    assert "restart it with these settings" in detail


def test_doctor_notices_swapped_ports(data: Path, running: Running) -> None:
    ports = dict(zip(FREE_PORTS, reversed(at_ports_of(running).values()), strict=True))
    report = doctor("--data", data, expect=1, **ports)
    for name in ("websocket port", "http port"):
        state, detail = about(name, report)
        said = f"the server that uses {data} listens there, but does not answer as {name}"
        assert (state, said in detail) == ("broken", True), detail


def test_doctor_names_its_own_server_if_another_server_has_the_port(
    data: Path, running: Running, tmp_path: Path
) -> None:
    with daemon(tmp_path / "other") as other:
        report = doctor("--data", data, expect=1, **at_ports_of(other))
    places = " and ".join(sorted(urlsplit(url).netloc for url in (running.ws, running.http)))
    for name in ("websocket port", "http port"):
        state, detail = about(name, report)
        said = f"the server that uses {data} listens at {places}"
        assert (state, said in detail) == ("broken", True), detail


SHOW_PYTHON = """
mount --bind "$1" "$0"; mount -t tmpfs -o mode=755 none "$2"; mkdir -p "$1"; mount --bind "$0" "$1"
shift 2; exec "$@"
"""


ANOTHER = 65534


def as_another(place: Path) -> list[str]:
    """Return a program that runs its arguments as the user `ANOTHER`.

    If Python is in a home folder that this user cannot read, a mount makes Python readable.
    """
    if os.geteuid() != 0:
        pytest.skip("only root can run a program as another user")
    program = ["setpriv", f"--reuid={ANOTHER}", f"--regid={ANOTHER}", "--clear-groups"]
    home = Path(*Path(sys.base_prefix).parts[:2])
    if not home.stat().st_mode & 0o001:
        space = ("unshare", "--mount", "--propagation=private", "sh", "-ec")
        program = [*space, SHOW_PYTHON, str(place), sys.base_prefix, str(home), *program]
    return program


def moored_of_another(place: Path, *words: str | Path, **variables: str) -> list[str]:
    """Run a command as another user; it must be refused; return the lines of its stderr."""
    command = [*as_another(place), sys.executable, "-P", "-m", "moorage", *words]
    done = ran(*command, **variables)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    return done.stderr.splitlines()


@pytest.mark.parametrize("hidden", [False, True])
def test_doctor_names_the_user_who_can_see_the_server(tmp_path: Path, *, hidden: bool) -> None:
    as_another(tmp_path)
    with tempfile.TemporaryDirectory() as folder, daemon(Path(folder, "data")) as running:
        data = Path(folder, "data")
        Path(folder).chmod(0o700 if hidden else 0o755)
        closed, at = Path(folder) if hidden else data, at_ports_of(running)
        words = ("doctor", "--data", str(data))
        (line,) = moored_of_another(tmp_path, *words, **at)
        assert line == (
            f"moored: {closed} belongs to another user, and hides its ledger, tokens, audit log "
            "and server from this one: run this command as the server's user, such as "
            f"`sudo -u root moored {' '.join(words)}`"
        )
        assert moored_of_another(tmp_path, "doctor", **at, MOORAGE_DATA_DIR=str(data))
        at |= {"MOORAGE_TLS_CERT": str(data / "none"), "MOORAGE_TLS_KEY": str(data / "none")}
        every = {"MOORAGE_HOST": "0.0.0.0"}  # noqa: S104  # Not bound.
        (other,) = moored_of_another(tmp_path, *words, **every, **at)
        assert other == line


def test_doctor_finds_a_running_server_as_the_user_of_the_server(tmp_path: Path) -> None:
    program = as_another(tmp_path)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        data, log = Path(folder, "data"), Path(folder, "log")
        data.mkdir()
        os.chown(data, ANOTHER, ANOTHER)
        doors = data / "doors.json"
        examine = [sys.executable, "-P", "-m", "moorage", "doctor", "--json", "--data", str(data)]

        with child([*program, *serve_command(data)], log, serve_variables()) as (server, ready):
            at = at_ports_of(Running(ready["ws"], ready["http"], server.pid, log))
            of_file = doors.stat()
            own = json.loads(ran(*program, *examine, **at).stdout)
            free = FREE_PORTS | {"MOORAGE_PORT": str(free_port())}
            away = json.loads(ran(*program, *examine, **free).stdout)
            of_root = json.loads(ran(*examine, **at).stdout)
            beside = json.loads(ran("unshare", "--net", *examine, **at).stdout)
        assert (of_file.st_uid, of_file.st_mode & 0o777) == (ANOTHER, 0o600)
        assert not doors.exists()

    for name, door in (("websocket port", "ws"), ("http port", "http")):
        place = urlsplit(ready[door]).netloc
        healthy = ("ok", f"{place}: a healthy server runs there already")
        assert about(name, own) == about(name, of_root) == healthy
        state, detail = about(name, beside)
        network = f"the server that uses {data} listens in another network, such as a container's,"
        assert (state, f"{network} at " in detail, place in detail) == ("missing", True, True)
    state, detail = about("websocket port", away)
    places = " and ".join(sorted(urlsplit(ready[door]).netloc for door in ("ws", "http")))
    said = f"the server that uses {data} listens at {places} instead"
    assert (state, said in detail) == ("missing", True)


def test_doctor_does_not_believe_the_record_of_a_killed_server(tmp_path: Path) -> None:
    command = serve_command(tmp_path / "data")
    with child(command, tmp_path / "log", serve_variables()) as (server, ready):
        at = at_ports_of(Running(ready["ws"], ready["http"], server.pid, tmp_path / "log"))
        server.kill()
        server.wait()
    assert (tmp_path / "data" / "doors.json").exists()
    report = doctor("--data", tmp_path / "data", **at)
    for name, door in (("websocket port", "ws"), ("http port", "http")):
        assert about(name, report) == ("ok", f"{urlsplit(ready[door]).netloc} is free")
    with daemon(tmp_path / "other") as other:
        report = doctor("--data", tmp_path / "data", expect=1, **at_ports_of(other))
    for name in ("websocket port", "http port"):
        assert f"but no server uses {tmp_path / 'data'}" in about(name, report)[1]


def test_doctor_reaches_a_server_behind_a_forwarded_port(running: Running, tmp_path: Path) -> None:
    inside = DoorRecord(("0.0.0.0", 8765), ("0.0.0.0", 8080), "net:[1]")  # noqa: S104  # Not bound.
    remove = write_doors(tmp_path, inside)
    report = doctor("--data", tmp_path, **at_ports_of(running))
    remove()
    for name in ("websocket port", "http port"):
        state, detail = about(name, report)
        assert (state, "a healthy server runs there already" in detail) == ("ok", True)


def test_root_starts_no_server_in_the_folder_of_another_user(tmp_path: Path) -> None:
    program = as_another(tmp_path)
    name = pwd.getpwuid(ANOTHER).pw_name
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        data, log = Path(folder, "data"), Path(folder, "log")
        data.mkdir()
        os.chown(data, ANOTHER, ANOTHER)
        examine = [sys.executable, "-P", "-m", "moorage", "doctor", "--json", "--data", str(data)]
        with daemon(data) as running:  # It is the first one, as in a container of root.
            warned = running.log.read_text()
            of_root = json.loads(ran(*examine, **at_ports_of(running)).stdout)
        unable = ran(*program, *serve_command(data))
        of_owner = json.loads(ran(*program, *examine, **FREE_PORTS).stdout)
        for each in data.rglob("*"):
            os.chown(each, ANOTHER, ANOTHER, follow_symlinks=False)
        with child([*program, *serve_command(data)], log, serve_variables()):
            pass
        before = sorted(data.rglob("*"))
        for words in (("serve",), ("prices",), ("ledger", "repair")):
            refused = ran(sys.executable, "-P", "-m", "moorage", *words, "--data", data)
            assert refused.returncode == 2
            assert f"sudo -u {name} moored {' '.join(words)} --data {data}`" in refused.stderr
        assert sorted(data.rglob("*")) == before
        healed = json.loads(ran(*program, *examine, **FREE_PORTS).stdout)
        os.chown(data / "ledger.db", 0, 0)
        beside_server = json.loads(ran(*examine, **FREE_PORTS).stdout)

    assert f"{data} belongs to the user {ANOTHER}, but this server runs as root" in warned
    assert unable.returncode == 3
    for report, expected in (
        (of_root, "missing"),
        (of_owner, "broken"),
        (beside_server, "broken"),
    ):
        state, detail = about("files", report)
        assert (state, f"as root, run `chown -R {name} {data}`" in detail) == (expected, True)
        assert ".db" in detail
    assert not [each for each in healed["findings"] if each["name"] == "files"]


class Busy(Site):
    """A server that answers a health check only after a while."""

    def answer(self, *_: object) -> Answer:
        time.sleep(0.5)  # As a server whose processors are taken.
        return 200, {}


def test_doctor_waits_for_the_busy_server_of_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(examination, "ANSWER_SECONDS_MAX", 0.1)
    with contextlib.ExitStack() as held, Busy() as server:
        port = str(server.server_port)
        at = DoorRecord(("127.0.0.1", 1), ("127.0.0.1", int(port)), find_network())
        held.callback(write_doors(tmp_path, at))
        own = doctor("--data", tmp_path, MOORAGE_HTTP_PORT=port)
        other = doctor("--data", tmp_path / "other", expect=1, MOORAGE_HTTP_PORT=port)
    assert "a healthy server runs there already" in about("http port", own)[1]
    assert "Address already in use" in about("http port", other)[1]


def test_doctor_reaches_a_server_with_tls(tmp_path: Path) -> None:
    files = tmp_path / "server.pem", tmp_path / "server.key"
    for file, text in zip(files, pem_of(*certificate("server")), strict=True):
        file.write_bytes(text)
    tls = dict(zip(("MOORAGE_TLS_CERT", "MOORAGE_TLS_KEY"), map(str, files), strict=True))
    tls["MOORAGE_TLS_CLIENT_CA"] = str(files[0])
    with daemon(tmp_path / "own", environment=tls) as running:
        at = at_ports_of(running) | tls
        report = doctor("--data", tmp_path / "own", **at)
        other = doctor("--data", tmp_path / "other", expect=1, **at)
        ports = dict(zip(FREE_PORTS, reversed(at_ports_of(running).values()), strict=True))
        swapped = doctor("--data", tmp_path / "own", expect=1, **ports, **tls)
        for name in ("websocket port", "http port"):
            assert "a healthy server runs there" in about(name, report)[1]
            assert about(name, other)[0] == "broken"
            state, detail = about(name, swapped)
            said = f"listens there, but does not answer as {name}"
            assert (state, said in detail) == ("broken", True), detail
