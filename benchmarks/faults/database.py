"""A PostgreSQL server for the faults, on a free port of this machine."""

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.faults.disks import small_disk

PROGRAMS: Final = "/usr/lib/postgresql"
PGBOUNCER: Final = "/usr/sbin/pgbouncer"
_TRIES_MAX: Final = 600
_PAUSE_SECONDS: Final = 0.05
_INITDB: Final = [
    "--no-locale",
    "-E",
    "UTF8",
    "--no-sync",
    "--no-instructions",
    "-A",
    "trust",
    "-U",
    "moorage",
]


def find_programs() -> Path | None:
    """Return the folder of Debian's newest PostgreSQL; None if none is installed."""
    found = sorted(Path(PROGRAMS).glob("*/bin/initdb"))
    return found[-1].parent if found else None


def free_port() -> int:
    """Return a free port of loopback."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


class PostgresServer:
    """Runs a PostgreSQL in a folder; each call of `database()` creates a new database.

    Args:
        folder: Folder of the server, with a short path for its socket; the server's user needs
            access.

    Attributes:
        folder: Folder of the server.
        port: Port on loopback.
    """

    def __init__(self, folder: Path, programs: Path) -> None:
        self.folder, self._programs, self._made = folder, programs, 0
        self.port, self._standby_port = free_port(), 0
        self._data, self._standby, self._standbys = "data", "", 0
        self._lost = "", 0

    def as_user(self) -> list[str]:
        """Return the command prefix that runs a program as `postgres`, if this process is root."""
        user = ["setpriv", "--reuid=postgres", "--regid=postgres", "--init-groups"]
        return user if os.getuid() == 0 else []

    def run(self, program: str, *arguments: str) -> None:
        """Run one of PostgreSQL's programs."""
        command = [*self.as_user(), str(self._programs / program), *arguments]
        with (self.folder / "programs.log").open("ab") as log:  # The server would keep a pipe open.
            subprocess.run(  # noqa: S603  # Our own.
                command, check=True, stdin=subprocess.DEVNULL, stdout=log, stderr=log, timeout=120
            )

    def url(self, database: str, user: str = "moorage", port: int = 0) -> str:
        """Return the address of a database; `port` 0: the server's own port."""
        return f"postgresql://{user}@127.0.0.1:{port or self.port}/{database}"

    def execute(
        self, statement: str, database: str = "postgres", values: Sequence[object] = ()
    ) -> list[tuple[Any, ...]]:
        """Run one statement, and return its rows."""
        import psycopg  # noqa: PLC0415  # An extra.

        with psycopg.connect(self.url(database), autocommit=True) as connection:
            cursor = connection.execute(statement.encode(), values)
            return cursor.fetchall() if cursor.description else []

    def database(self) -> str:
        """Make a database and return its address."""
        self._made += 1
        self.execute(f"CREATE DATABASE d{self._made}")
        return self.url(f"d{self._made}")

    def start(self) -> None:
        """Create the database files, and start the server."""
        self.run("initdb", "-D", str(self.folder / self._data), *_INITDB)
        with (self.folder / self._data / "postgresql.conf").open("a") as file:
            # Without syncs, a kill of processes loses nothing.
            file.write(
                f"listen_addresses='127.0.0.1'\nport={self.port}\nfsync=off\n"
                f"full_page_writes=off\nunix_socket_directories='{self.folder}'\n"
                "shared_buffers=64MB\n"
            )
        self._control(self._data, "start")

    def add_standby(self) -> None:
        """Start a synchronous standby; from then on, each commit waits for it."""
        self._standbys += 1
        name = f"standby{self._standbys}"
        data = self.folder / name
        source = ["-h", "127.0.0.1", "-p", str(self.port), "-U", "moorage", "-D", str(data)]
        copied = ["-R", "-X", "stream", "-c", "fast", "-C", "-S", name, "--no-sync"]
        self.run("pg_basebackup", *source, *copied)
        self._standby, self._standby_port = name, free_port()
        followed = data / "postgresql.auto.conf"
        named = f"application_name={name} user=moorage"
        followed.write_text(followed.read_text().replace("user=moorage", named))
        with (data / "postgresql.conf").open("a") as file:
            file.write(f"port={self._standby_port}\n")
        self._control(name, "start")
        self._wait_for_standbys(name)

    def promote(self) -> None:
        """Kill the primary, and promote its standby; the new primary has no standby."""
        self._control(self._data, "stop", "-m", "immediate")
        self._control(self._standby, "promote")
        self._lost = self._data, self.port
        self._data, self.port, self._standby = self._standby, self._standby_port, ""
        self._wait_for_standbys("")

    def forget_lost(self) -> None:
        """Remove the files of the lost primary."""
        shutil.rmtree(self.folder / self._lost[0])

    @contextlib.contextmanager
    def without_standby(self) -> Iterator[None]:
        """Stop the standby until the end of the block, so that commits wait."""
        self._control(self._standby, "stop", "-m", "immediate")
        try:
            yield
        finally:
            self._control(self._standby, "start")

    @contextlib.contextmanager
    def revived(self) -> Iterator["PostgresServer"]:
        """Start the lost primary with its old data until the end of the block."""
        lost = PostgresServer(self.folder, self._programs)
        lost._data, lost.port = self._lost
        lost._control(lost._data, "start")
        try:
            yield lost
        finally:
            lost.stop()

    def _wait_for_standbys(self, names: str) -> None:
        self.execute(f"ALTER SYSTEM SET synchronous_standby_names = '{names}'")
        self.execute("SELECT pg_reload_conf()")

    def restart(self) -> None:
        """Kill the server, and start it again."""
        self._control(self._data, "restart", "-m", "immediate")

    def mend(self) -> None:
        """Restart the database servers that ended, and wait until the primary answers."""
        import psycopg  # noqa: PLC0415  # An extra.

        for _ in range(_TRIES_MAX):
            for each in filter(None, (self._data, self._standby)):
                try:
                    self._control(each, "status")
                except subprocess.CalledProcessError:
                    self._control(each, "start")
            with contextlib.suppress(psycopg.OperationalError):  # The server recovers.
                self.execute("SELECT 1")
                return
            time.sleep(_PAUSE_SECONDS)  # The server sends no event when it has recovered.

    @contextlib.contextmanager
    def pooler(self, mode: str) -> Iterator[int]:
        """Run a PgBouncer in front of the database until the block ends; yield its port.

        Raises:
            FileNotFoundError: PgBouncer is not installed.
        """
        port, file = free_port(), self.folder / "pgbouncer.ini"
        file.write_text(
            f"[databases]\n* = host=127.0.0.1 port={self.port} user=moorage\n[pgbouncer]\n"
            f"listen_addr=127.0.0.1\nlisten_port={port}\nunix_socket_dir=\nauth_type=any\n"
            f"pool_mode={mode}\n"
        )
        with subprocess.Popen([*self.as_user(), PGBOUNCER, "-q", str(file)]) as running:  # noqa: S603  # Our own.
            try:
                for _ in range(_TRIES_MAX):
                    with (
                        contextlib.suppress(OSError),
                        socket.create_connection(("127.0.0.1", port)),
                    ):
                        break
                    time.sleep(_PAUSE_SECONDS)  # PgBouncer sends no event when it listens.
                yield port
            finally:
                running.terminate()

    def stop(self) -> None:
        """Stop all database servers."""
        for each in filter(None, (self._standby, self._data)):
            self._control(each, "stop", "-m", "immediate")

    def _control(self, data: str, verb: str, *options: str) -> None:
        folder = self.folder / data
        log = ["-l", f"{folder}.log"] if verb != "stop" else []
        self.run("pg_ctl", "-D", str(folder), *log, *options, "-w", verb)


@contextlib.contextmanager
def running_postgres(programs: Path, disk_mebibytes: int = 0) -> Iterator[PostgresServer]:
    """Run a PostgreSQL until the block ends, on a small disk if `disk_mebibytes` is not 0."""
    with contextlib.ExitStack() as stack:
        # The path of a socket must be short.
        place = tempfile.TemporaryDirectory(prefix="moorage-pg-", dir="/tmp")
        folder = Path(stack.enter_context(place))
        if disk_mebibytes:
            stack.enter_context(small_disk(folder, disk_mebibytes))
        if os.getuid() == 0:
            shutil.chown(folder, "postgres", "postgres")
        folder.chmod(0o755)
        server = PostgresServer(folder, programs)
        server.start()
        try:
            yield server
        finally:
            server.stop()
