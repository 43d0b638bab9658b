"""Runs a PostgreSQL with default settings, which syncs each commit before it answers."""

import asyncio
import contextlib
import os
import pwd
import subprocess
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, Final

from benchmarks.peers.servers import (
    POLL_SECONDS,
    find_program,
    folder,
    free_port,
    library,
    program,
    version_of,
)
from moorage.bench.placements import UNDER_WAY, Booking

USER: Final = "moorage"
INSTALL: Final = "apt-get install postgresql; pip install asyncpg"
_PROGRAMS: Final = "/usr/lib/postgresql/*/bin/"


def version() -> str | None:
    """Return the version of the server; None unless it and its Python client are installed."""
    return (
        version_of(find_program("postgres", f"{_PROGRAMS}postgres")) if library("asyncpg") else None
    )


@contextlib.asynccontextmanager
async def server() -> AsyncIterator[tuple[int, Any, Any]]:
    """Run a server until the block ends.

    Yields:
        The server's process id, a pool of connections for requests, and one for notifications.
    """
    import asyncpg  # noqa: PLC0415  # This peer's alone.

    init, serve = (find_program(name, f"{_PROGRAMS}{name}") for name in ("initdb", "postgres"))
    assert init is not None
    assert serve is not None
    with folder() as home:
        data, port, become = home / "data", free_port(), []
        if os.geteuid() == 0:  # PostgreSQL refuses to run as root.
            owner = pwd.getpwnam("postgres")
            os.chown(home, owner.pw_uid, owner.pw_gid)
            become = ["setpriv", "--reuid=postgres", "--regid=postgres", "--init-groups", "--"]
        flags = ["-A", "trust", "-U", USER, "--no-locale", "-E", "UTF8", "--no-instructions"]
        flags += ["--no-sync"]  # `initdb` need not sync; the server does.
        command = [*become, init, "-D", str(data), *flags]
        await asyncio.to_thread(subprocess.run, command, check=True, capture_output=True, cwd="/")
        where = ["-h", "127.0.0.1", "-p", str(port), "-k", str(home)]
        sizes = ["-c", "max_connections=100", "-c", "shared_buffers=256MB"]
        command = [*become, serve, "-D", str(data), *where, *sizes]
        async with program(command, port, home / "log") as pid:
            url = f"postgresql://{USER}@127.0.0.1:{port}/postgres"
            while True:
                try:
                    listener = await asyncpg.connect(url)
                    break
                except asyncpg.CannotConnectNowError:  # The server's port answers before it serves.
                    await asyncio.sleep(POLL_SECONDS)
            async with asyncpg.create_pool(url, min_size=UNDER_WAY, max_size=UNDER_WAY) as pool:
                try:
                    yield pid, pool, listener
                finally:
                    await listener.close()


@dataclass
class PostgresSession:
    """Books and releases GPUs at a server with the statements of a peer.

    Args:
        book: Statement that books a GPU and returns a row about it, or no row.
        any_free: Statement that returns a row if a GPU is free.
        release_one: Statement that frees the GPU of a booking's handle, and notifies `freed`.
        read: Turns a row of `book` into a booking.
    """

    pids: list[int]
    pool: Any
    listener: Any
    book: str
    any_free: str
    release_one: str
    read: Callable[[Any], Booking]

    async def place(self) -> Booking | None:
        """Book a GPU; None if all are taken."""
        while (row := await self.pool.fetchrow(self.book)) is None:
            if await self.pool.fetchrow(self.any_free) is None:
                return None
        return self.read(row)

    async def release(self, booking: Booking) -> None:
        """Release a GPU."""
        assert await self.pool.fetchrow(self.release_one, *booking.handle) is not None

    async def wait(self, parked: asyncio.Event) -> Booking:
        """Book a GPU; while all are taken, try again at each notification of a release."""
        freed = asyncio.Event()

        def notice(*_: Any) -> None:
            freed.set()

        await self.listener.add_listener("freed", notice)
        try:
            while (booking := await self.place()) is None:
                parked.set()
                await freed.wait()
                freed.clear()
            return booking
        finally:
            await self.listener.remove_listener("freed", notice)
