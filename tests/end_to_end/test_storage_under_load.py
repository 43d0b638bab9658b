"""Databases that fail, and copies that are made, while a server grants: no lease goes missing."""

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
from served import Server, ask_message, cluster, moored, ran, serving, tell, until
from websockets.exceptions import ConnectionClosed

from moorage.testing.daemon_process import Running, child, serve_command, serve_variables

pytestmark = [pytest.mark.heavy, pytest.mark.postgres]

HOUR = {"ttl_seconds": 3_600}


class Load:
    """Clients that ask for leases until the server is gone, and remember what it acknowledged."""

    def __init__(self, server: Server) -> None:
        self.leases: dict[str, int] = {}
        self._server = server
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=self._ask) for _ in range(4)]
        for thread in self._threads:
            thread.start()

    def _ask(self) -> None:
        message = ask_message(resources={"gpus": 1}, lease=HOUR)
        with contextlib.suppress(ConnectionClosed, OSError), self._server.socket() as socket:
            while not self._stopping.is_set():
                reply = tell(socket, message)
                if reply["success"]:
                    self.leases[reply["lease"]["id"]] = reply["lease"]["fencing"]

    def reach(self, number: int) -> None:
        wanted = len(self.leases) + number
        until(lambda: len(self.leases) >= wanted)

    def end(self) -> dict[str, int]:
        self._stopping.set()
        for thread in self._threads:
            thread.join(60)
        return self.leases


@contextlib.contextmanager
def started(data: Path, address: str, log: Path) -> Iterator[tuple[subprocess.Popen[str], Server]]:
    variables = {**serve_variables(), "MOORAGE_STORAGE": address}
    with child(serve_command(data), log, variables) as (process, ready):
        server = Server(Running(ready["ws"], ready["http"], process.pid, log))
        with contextlib.closing(server):
            yield process, server


def check(server: Server, leases: dict[str, int]) -> None:
    """Look for each lease, and at the fencing number of the next."""
    there, page = set[str](), server.say({"op": "leases", "limit": 1_000})[0]["data"]
    there |= {each["id"] for each in page["leases"]}
    while page.get("next"):
        page = server.say({"op": "leases", "limit": 1_000, "next": page["next"]})[0]["data"]
        there |= {each["id"] for each in page["leases"]}
    assert leases.keys() <= there
    assert len(set(leases.values())) == len(leases)
    new = server.ask(resources={"gpus": 1}, lease=HOUR)["lease"]
    assert new["fencing"] > max(leases.values())


@pytest.mark.parametrize("how", ["restart", "ledger", "catalog", "lock", "tokens", "reader"])
def test_no_lease_is_lost_where_the_database_ends_sessions(postgres, tmp_path: Path, how: str):
    address, log = postgres.database(), tmp_path / "log"
    with started(tmp_path / "data", address, log) as (process, server):
        server.fill(cluster("east", nodes=2_000, gpus=8))
        load = Load(server)
        load.reach(200)
        if how == "restart":
            data = str(postgres.folder / "data")
            postgres.run(
                "pg_ctl",
                "-D",
                data,
                "-l",
                str(postgres.folder / "log"),
                "-m",
                "immediate",
                "-w",
                "restart",
            )
        else:
            postgres.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE application_name ~ %s AND datname = %s",
                values=(f"moored {how} ", address.rpartition("/")[2]),
            )
        if how in {"restart", "ledger", "lock"}:
            until(lambda: process.poll() is not None)
            assert process.returncode == 70
        else:
            load.reach(200)
        leases = load.end()
        print(how, len(leases), process.poll(), log.read_text()[-1500:])
    with started(tmp_path / "data", address, log) as (_, server):
        check(server, leases)


def test_a_dump_under_load_is_restored(postgres, tmp_path: Path):
    address, restored = postgres.database(), postgres.database()
    with started(tmp_path / "data", address, tmp_path / "log") as (_, server):
        server.fill(cluster("east", nodes=2_000, gpus=8))
        load = Load(server)
        load.reach(200)
        before = dict(load.leases)
        said = moored("backup", tmp_path / "backup", MOORAGE_STORAGE=address)
        dump = shlex.split(said.stderr.partition("while it runs: ")[2])
        assert ran(*dump, f"--file={tmp_path / 'dump'}").returncode == 0
        load.reach(200)
        later = load.end()
    assert ran("pg_restore", f"--dbname={restored}", tmp_path / "dump").returncode == 0
    said = moored("restore", tmp_path / "dump", MOORAGE_STORAGE=restored)
    postgres.execute(
        said.stderr.partition("before a server starts: ")[2], restored.rpartition("/")[2]
    )
    with started(tmp_path / "new", restored, tmp_path / "log") as (_, server):
        check(server, before)
        new = server.ask(resources={"gpus": 1}, lease=HOUR)["lease"]
        assert new["fencing"] > max(later.values())


def test_a_backup_under_load_is_restored(tmp_path: Path):
    data, restored = tmp_path / "data", tmp_path / "restored"
    with serving(data) as server:
        server.fill(cluster("east", nodes=2_000, gpus=8))
        load = Load(server)
        load.reach(200)
        before = dict(load.leases)
        done = moored("backup", tmp_path / "backup", "--data", data)
        assert done.returncode == 0, done.stderr
        refused = moored("restore", tmp_path / "backup", "--data", data)
        assert (refused.returncode, "has something in it" in refused.stderr) == (1, True)
        load.reach(200)
        later = load.end()
    assert moored("restore", tmp_path / "backup", "--data", restored).returncode == 0
    with serving(restored) as server:
        check(server, before)
        new = server.ask(resources={"gpus": 1}, lease=HOUR)["lease"]
        assert new["fencing"] > max(later.values())


@pytest.fixture
def disk() -> Iterator[Path]:
    """A small disk of its own, where the database's user gets in."""
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
    log = tmp_path / "log"
    try:
        with started(tmp_path / "data", address, log) as (process, server):
            server.fill(cluster("east", nodes=2_000, gpus=8))
            load = Load(server)
            load.reach(100)
            with contextlib.suppress(OSError), (disk / "filler").open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(4096))
            until(lambda: process.poll() is not None)
            leases = load.end()
            assert process.returncode == 70
            assert "No space left on device" in log.read_text()
        (disk / "filler").unlink()
        with started(tmp_path / "data", address, log) as (_, server):
            check(server, leases)
    finally:
        postgres.execute(f"DROP DATABASE {name} WITH (FORCE)")
        postgres.execute("DROP TABLESPACE small")


def test_a_backup_onto_a_full_disk_leaves_nothing(disk: Path, tmp_path: Path):
    data = tmp_path / "data"
    with serving(data) as server:
        server.fill(cluster("east", nodes=20_000, gpus=8))
        for _ in range(3):
            server.ask(resources={"gpus": 1}, lease=HOUR)
        with contextlib.suppress(OSError), (disk / "filler").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        done = moored("backup", disk / "backup", "--data", data)
        assert (done.returncode, "is full" in done.stderr or "No space left" in done.stderr) == (
            1,
            True,
        )
        assert [each.name for each in disk.iterdir()] == ["filler"]
        (disk / "filler").write_bytes(b"")
        assert moored("backup", disk / "backup", "--data", data).returncode == 0
