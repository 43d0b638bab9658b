"""Workloads cannot reach the daemon or its data, by either method of confinement."""

import os
import platform
import sys

import pytest
from served import Server, here, until
from test_backends import run

from moorage.backends.local import confinement
from moorage.backends.local.containers import shows
from moorage.testing.daemon_process import child, serve_command, serve_variables

pytestmark = pytest.mark.heavy

WAYS = {"mounts": [], "siblings": ["setpriv", "--bounding-set=-sys_admin"]}


@pytest.fixture(scope="module", params=WAYS)
def confined_server(request, tmp_path_factory):
    """A daemon, its data folder, and its pid."""
    way = request.param
    folder = tmp_path_factory.mktemp(way)
    if way == "mounts" and confinement.find(str(folder)).way != way:
        pytest.skip("only root can mount")
    before = [] if os.geteuid() else WAYS[way]
    variables = {**serve_variables(), "AWS_SECRET_ACCESS_KEY": "a-secret"}
    data = folder / "data"
    command = [*before, *serve_command(data)]
    with child(command, folder / "log", variables) as (process, ready):
        server = Server(type("Running", (), {"ws": ready["ws"], "http": ready["http"]}))
        server.fill(here())
        yield server, data, process.pid, way
        server.close()
    assert (folder / "log").read_text() == ""


def output(server: Server, lease: dict) -> str:
    message = {"op": "logs", "lease": lease["id"], "token": lease["token"]}
    return server.say(message)[0]["data"]["text"]


def try_script(server: Server, script: str) -> list[str]:
    """Run a script as a workload, and as an exec command; return the output of each."""
    lease = run(server, ["sh", "-c", f"{script}\necho over; exec sleep 1000"])
    until(lambda: "over\n" in output(server, lease))
    beside = {"op": "exec", "lease": lease["id"], "token": lease["token"]}
    (reply,) = server.say({**beside, "command": ["sh", "-c", script]})
    assert reply["success"], reply
    printed = [output(server, lease).removesuffix("over\n"), reply["data"]["output"]]
    server.release(lease)
    server.in_state(lease, "ended")
    return printed


ATTEMPTS = [
    "cat {data}/ledger.db",
    "cat {data}/*",
    "echo x >> {data}/ledger.db",
    "echo x > {data}/new",
    "rm {data}/ledger.db",
    "mv {data} {data}.away",
    "ln {data}/ledger.db here",
    "cat ../order.json",
    "rm -f ../lock",
    "cat /proc/{pid}/root{data}/ledger.db",
    "cat /proc/1/root{data}/ledger.db",
    "cat /proc/{pid}/environ | tr -d '\\0'",
    "cat /proc/{pid}/mem",
    "cat /proc/{pid}/fd/*",
    "umount {data}",
    "unshare -m umount {data}",
    "nsenter -m -t 1 cat {data}/ledger.db",
    "ln -s {data}/ledger.db link && cat link",
    "mount --bind {data} .",
]


def test_no_workload_reads_the_daemons_data(confined_server):
    server, data, pid, _ = confined_server
    before = sorted(each.name for each in data.iterdir())
    attempts = [each.format(data=data, pid=pid) for each in ATTEMPTS]
    script = "\n".join(
        f"({each}) > seen 2> /dev/null; echo $? $(wc -c < seen)" for each in attempts
    )
    for printed in try_script(server, script):
        for attempt, line in zip(ATTEMPTS, printed.splitlines(), strict=True):
            code, size = line.split()
            harmless = attempt.startswith(("rm -f", "cat /proc"))  # These may exit with 0.
            assert code != "0" or harmless, attempt
            assert size == "0", attempt
    assert sorted(each.name for each in data.iterdir()) == before
    assert server.http.get("/healthz").status_code == 200


def test_a_workload_cannot_signal_the_daemon_or_its_supervisor(confined_server):
    server, _, pid, _ = confined_server
    if tuple(map(int, platform.release().split(".")[:2])) < (6, 12):
        pytest.skip("this kernel's Landlock knows no signals")
    script = f"kill -9 {pid} || kill -9 $PPID || kill -0 $$ && echo its own only"
    lease = run(server, ["sh", "-c", f"{script}; exec sleep 1000"])
    until(lambda: "its own only\n" in output(server, lease))
    server.release(lease)
    server.in_state(lease, "ended")


def test_a_confined_workload_has_all_access_except_to_the_data_folder(confined_server, tmp_path):
    server, data, _, way = confined_server
    (tmp_path / "old").write_text("old")
    script = f"""
        pwd; echo own > file; cat file; mkdir -p deep/er; mv file deep/er; ls deep/er
        cd {tmp_path}; cat old; echo new > new-$$; cat new-$$; mv new-$$ $OLDPWD
        ls / > /dev/null && ls {data.parent} > /dev/null && echo listed
        echo x > /dev/null; echo word > /dev/stdout; head -c 4 /dev/zero | wc -c
        d=$(mktemp -d) && echo y > $d/file && rm -r $d && echo temporary
        grep -c . /proc/self/status > /dev/null && echo proc
        {sys.executable} -c 'import socket, tempfile; tempfile.TemporaryFile(); print("python")'
    """
    expected = ["own", "file", "oldnew", "listed", "word", "4", "temporary", "proc", "python"]
    for printed in try_script(server, script):
        place, *lines = printed.split()
        assert place.endswith("/work")
        assert lines == expected
    if way == "mounts":
        for printed in try_script(server, f"echo n > {data.parent}/made-$$ && echo made"):
            assert printed == "made\n"


def test_a_command_in_a_workload_can_signal_the_workload(confined_server):
    server, *_ = confined_server
    lease = run(server, ["sh", "-c", "trap 'echo heard' HUP; echo $$; while :; do sleep 0.1; done"])
    until(lambda: output(server, lease).strip())
    pid = output(server, lease).strip()
    beside = {"op": "exec", "lease": lease["id"], "token": lease["token"]}
    (reply,) = server.say({**beside, "command": ["kill", "-HUP", pid]})
    assert reply["data"]["exit_code"] == 0
    until(lambda: "heard" in output(server, lease))
    server.release(lease)
    server.in_state(lease, "ended")


def test_containers_may_not_mount_the_data_folder_by_any_name(tmp_path):
    data = tmp_path / "state" / "data"
    (data / "local").mkdir(parents=True)
    (tmp_path / "link").symlink_to(data / "local")
    (tmp_path / "other").mkdir()
    (tmp_path / "database").mkdir()
    for shown in ("/", "state", "state/data", "state/data/local", "state/../state/data/x", "link"):
        assert shows(str(tmp_path / shown), str(data)), shown
    for harmless in ("other", "database", "state/database", "/dev", "/usr"):
        assert not shows(str(tmp_path / harmless), str(data)), harmless
