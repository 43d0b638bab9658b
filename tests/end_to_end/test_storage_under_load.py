"""No lease is lost if the database fails or a copy is made while a server grants leases."""

import contextlib
import os
import shlex
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from disks import fill
from served import Server, ask_message, cluster, invoke, ran, serving, tell, until
from websockets.exceptions import ConnectionClosed

from moorage.storage.base import FENCING_SKIP
from moorage.testing.daemon_process import Running, child, serve_command, serve_variables

pytestmark = [pytest.mark.heavy, pytest.mark.postgres]

HOUR = {"ttl_seconds": 3_600}


FLEET = cluster("east", nodes=1_000, gpus=8)


class Load:
    """Clients that request leases until the server is gone; `leases` holds the granted ones."""

    def __init__(self, server: Server) -> None:
        self.leases: dict[str, int] = {}
        self._server = server
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=self._request) for _ in range(4)]
        for thread in self._threads:
            thread.start()

    def _request(self) -> None:
        message = ask_message(resources={"gpus": 1}, lease=HOUR)
        with contextlib.suppress(ConnectionClosed, OSError), self._server.socket() as socket:
            while not self._stopping.is_set():
                reply = tell(socket, message)
                if reply["success"]:
                    self.leases[reply["lease"]["id"]] = reply["lease"]["fencing"]

    def reach(self, number: int = 100) -> None:
        wanted = len(self.leases) + number
        until(lambda: len(self.leases) >= wanted)

    def end(self) -> dict[str, int]:
        self._stopping.set()
        for thread in self._threads:
            thread.join(60)
        return self.leases


@contextlib.contextmanager
def start(data: Path, address: str) -> Iterator[tuple[subprocess.Popen[str], Server]]:
    log = data.with_suffix(".log")
    variables = {**serve_variables(), "MOORAGE_STORAGE": address}
    with child(serve_command(data), log, variables) as (process, ready):
        server = Server(Running(ready["ws"], ready["http"], process.pid, log))
        with contextlib.closing(server):
            yield process, server


def check(server: Server, leases: dict[str, int], later: dict[str, int] | None = None) -> None:
    """Check that each lease exists, and that the next fencing number is above all of them."""
    there = set[str]()
    more: dict[str, str] | None = {}
    while more is not None:
        page = server.say({"op": "leases", "limit": 1_000, **more})[0]["data"]
        there |= {each["id"] for each in page["leases"]}
        more = {"next": page["next"]} if page.get("next") else None
    assert leases.keys() <= there
    assert len(set(leases.values())) == len(leases)
    new = server.ask(resources={"gpus": 1}, lease=HOUR)["lease"]
    assert new["fencing"] > max((later or leases).values())


def test_no_lease_is_lost_when_the_database_ends_sessions(postgres, tmp_path: Path):
    """If the session of ledger or lock ends, the server ends; it opens other sessions again."""
    address, data = postgres.database(), str(postgres.folder / "data")
    leases: dict[str, int] = {}

    def end_sessions(name: str) -> None:
        postgres.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE application_name ~ %s AND datname = %s",
            values=(f"moored {name} ", address.rpartition("/")[2]),
        )

    for lost in (("catalog", "tokens", "reader", "ledger"), ("lock",), ("restart",)):
        with start(tmp_path / "data", address) as (process, server):
            if leases:
                check(server, leases)
            else:
                server.fill(FLEET)
            load = Load(server)
            load.reach()
            *others, last = lost
            for name in others:
                end_sessions(name)
                load.reach()
            assert process.poll() is None
            if last == "restart":
                log = str(postgres.folder / "log")
                postgres.run("pg_ctl", "-D", data, "-l", log, "-m", "immediate", "-w", "restart")
            else:
                end_sessions(last)
            until(lambda process=process: process.poll() is not None)
            assert process.returncode == 70, last
            assert "moored: ended to avoid wrong answers" in server.log()
            leases |= load.end()
    with start(tmp_path / "data", address) as (_, server):
        check(server, leases)


def test_a_dump_of_the_database_under_load_can_be_restored(postgres, tmp_path: Path):
    address, restored = postgres.database(), postgres.database()
    with start(tmp_path / "data", address) as (_, server):
        server.fill(FLEET)
        load = Load(server)
        load.reach()
        before = dict(load.leases)
        said = invoke("backup", tmp_path / "backup", MOORAGE_STORAGE=address)
        dump = shlex.split(said.stderr.partition("while the server runs: ")[2])
        assert ran(*dump, f"--file={tmp_path / 'dump'}").returncode == 0
        load.reach()
        later = load.end()
    assert ran("pg_restore", f"--dbname={restored}", tmp_path / "dump").returncode == 0
    said = invoke("restore", tmp_path / "dump", MOORAGE_STORAGE=restored)
    skip = said.stderr.partition("before a server starts, run: ")[2]
    postgres.execute(skip, restored.rpartition("/")[2])
    with start(tmp_path / "new", restored) as (_, server):
        check(server, before, later)


def test_a_backup_under_load_can_be_restored(tmp_path: Path):
    data, backup, restored = (tmp_path / each for each in ("data", "backup", "restored"))
    with serving(data) as server:
        server.fill(FLEET)
        held = server.ask(resources={"gpus": 1}, lease=HOUR)["lease"]
        load = Load(server)
        load.reach()
        before = dict(load.leases)
        done = invoke("backup", backup, "--data", data)
        assert (done.returncode, "all undamaged" in done.stdout) == (0, True), done.stderr
        late = server.ask(resources={"gpus": 1}, lease=HOUR)["lease"]
        load.reach()
        later = load.end()
    again = invoke("backup", backup, "--data", data)
    assert (again.returncode, "is not empty" in again.stderr) == (1, True)
    done = invoke("restore", backup, "--data", restored)
    assert done.returncode == 0, done.stderr
    assert "are unknown here, and their GPUs may be granted again" in done.stdout
    with serving(restored) as server:
        renew = {"op": "renew", "lease": held["id"], "token": held["token"]}
        assert server.say(renew)[0]["lease"]["id"] == held["id"]
        assert not server.say({"op": "status", "lease": late["id"]})[0]["success"], "of later"
        new = server.ask(resources={"gpus": 1}, lease=HOUR)["lease"]
        assert new["fencing"] > late["fencing"] + FENCING_SKIP // 2
        check(server, before, later)
    for place in (data, restored):
        refused = invoke("restore", backup, "--data", place)
        assert (refused.returncode, "is not empty" in refused.stderr) == (1, True)


@pytest.fixture
def disk() -> Iterator[Path]:
    """A small disk for one test, on which the database's user may write."""
    place = Path(tempfile.mkdtemp(prefix="moorage-disk-", dir="/tmp"))
    mounted = ["mount", "-t", "tmpfs", "-o", "size=24m,mode=777", "none", str(place)]
    if os.getuid() != 0 or subprocess.run(mounted, check=False, capture_output=True).returncode:
        place.rmdir()
        pytest.skip("only root can make a small disk")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)
    place.rmdir()


def test_a_full_disk_of_the_database_loses_no_lease(postgres, disk: Path, tmp_path: Path):
    place = disk / "space"
    place.mkdir()
    shutil.chown(place, "postgres", "postgres")
    postgres.execute(f"CREATE TABLESPACE small LOCATION '{place}'")
    address = postgres.database()
    name = address.rpartition("/")[2]
    postgres.execute(f"ALTER DATABASE {name} SET TABLESPACE small")
    try:
        with start(tmp_path / "data", address) as (process, server):
            server.fill(FLEET)
            load = Load(server)
            load.reach()
            fill(disk / "filler")
            until(lambda: process.poll() is not None)
            leases = load.end()
            assert process.returncode == 70
            assert "No space left on device" in server.log()
        (disk / "filler").unlink()
        with start(tmp_path / "data", address) as (_, server):
            check(server, leases)
    finally:
        postgres.execute(f"DROP DATABASE {name} WITH (FORCE)")
        postgres.execute("DROP TABLESPACE small")


def test_a_backup_onto_a_full_disk_leaves_nothing_behind(disk: Path, tmp_path: Path):
    data = tmp_path / "data"
    with serving(data) as server:
        server.fill(FLEET)
        fill(disk / "filler")
        done = invoke("backup", disk / "backup", "--data", data)
        assert done.returncode == 1
        assert "is full" in done.stderr or "No space left" in done.stderr
        assert [each.name for each in disk.iterdir()] == ["filler"]
        (disk / "filler").write_bytes(b"")
        assert invoke("backup", disk / "backup", "--data", data).returncode == 0
