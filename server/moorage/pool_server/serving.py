"""Serves a pool over a Unix socket or a loopback port, until a stop signal.

`moorage pool serve` runs this module. Only the user who runs the server may use its Unix socket. A
lock file beside the socket stops a second server at the same path, so no slot is checked out twice.
"""

import asyncio
import contextlib
import errno
import fcntl
import os
import signal
import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import uvicorn

from moorage.pool_server.app import create_app
from moorage.pool_server.holdings import Holdings, Note
from moorage.slots import ResourcePool
from moorage_client.pool.addresses import Tcp, Uds

TTL_SECONDS: Final = 86_400.0
"""Seconds that a checkout lasts if its request names neither a process nor a time."""
DRAIN_SECONDS: Final = 5
"""Maximum seconds that open requests may continue after the stop signal."""
CONNECTIONS_MAX: Final = 1024
"""Maximum open connections; a request over a further connection is answered 503."""
BACKLOG: Final = 1024


async def serve(
    pool: ResourcePool,
    address: Uds | Tcp,
    ready: Callable[[Uds | Tcp], None],
    note: Note,
    ttl_seconds: float = TTL_SECONDS,
) -> None:
    """Serve a pool until SIGTERM or SIGINT.

    Args:
        pool: The pool.
        address: The address to listen at; port 0: a free port.
        ready: Called with the address when the server answers requests.
        note: Called with a sentence about slots that the server took back, and why.
        ttl_seconds: Seconds that a checkout lasts if its request names neither a process nor a
            time.

    Raises:
        OSError: The address cannot be used, or a pool is served there already.
    """
    holdings = Holdings(pool, ttl_seconds, note)
    with _listening(address) as (listener, bound):
        server = _Server(
            uvicorn.Config(
                create_app(holdings, on_port=isinstance(address, Tcp)),
                http="h11",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                limit_concurrency=CONNECTIONS_MAX,
                timeout_graceful_shutdown=DRAIN_SECONDS,
            ),
            lambda: ready(bound),
        )
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, server.stop)
        try:
            await server.serve([listener])
        finally:
            holdings.close()


class _Server(uvicorn.Server):
    """A uvicorn server that reports when it is ready; the caller handles stop signals."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready

    def stop(self) -> None:
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.contextmanager
def _listening(address: Uds | Tcp) -> Iterator[tuple[socket.socket, Uds | Tcp]]:
    """Yield a listening socket, and its address."""
    with contextlib.ExitStack() as stack:
        match address:
            case Uds(path=path):
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                address.check()
                stack.enter_context(_hold_lock(path))
                _remove_stale_socket(path)
                listener = stack.enter_context(socket.socket(socket.AF_UNIX))
                before = os.umask(0o177)
                try:
                    listener.bind(str(path))
                finally:
                    os.umask(before)
                stack.callback(_remove_own, path, _identity(path))
                bound: Uds | Tcp = address
            case Tcp(host=host, port=port):
                family, kind, protocol, _, where = socket.getaddrinfo(
                    host, port, type=socket.SOCK_STREAM
                )[0]
                listener = stack.enter_context(socket.socket(family, kind, protocol))
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind(where)
                bound = Tcp(host, listener.getsockname()[1])
        listener.listen(BACKLOG)
        listener.setblocking(False)  # noqa: FBT003  # The socket module's own signature.
        yield listener, bound


@contextlib.contextmanager
def _hold_lock(path: Path) -> Iterator[None]:
    # The lock file stays: if it were removed, two servers could lock two different files. It is
    # never written to, and no link is followed: its name can be guessed.
    lock = path.with_name(f"{path.name}.lock")
    try:
        file = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(
                error.errno, "is a link, which is not followed; remove it", lock
            ) from error
        raise
    try:
        seen = os.fstat(file)
        if not stat.S_ISREG(seen.st_mode) or seen.st_uid != os.geteuid():
            raise OSError(errno.EPERM, "the lock is not a file of this user; remove it", str(lock))
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise OSError(error.errno, f"a pool is served at {path} already") from error
        yield
    finally:
        os.close(file)


def _remove_stale_socket(path: Path) -> None:
    """Remove the socket of a killed server; the caller has the lock, and no server answers.

    Raises:
        OSError: The file is not a socket, or another program's socket.
    """
    try:
        seen = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(seen.st_mode):
        raise OSError(
            errno.EEXIST, "is not a socket, and was not changed; give another path", str(path)
        )
    with socket.socket(socket.AF_UNIX) as caller:
        caller.setblocking(False)  # noqa: FBT003  # The socket module's own signature.
        try:
            caller.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except BlockingIOError:
            pass  # The socket's queue is full, so a server uses it.
    raise OSError(errno.EADDRINUSE, "another program listens there; give another path", str(path))


def _identity(path: Path) -> tuple[int, int]:
    seen = path.lstat()
    return seen.st_dev, seen.st_ino


def _remove_own(path: Path, identity: tuple[int, int]) -> None:
    """Remove the socket that this server made, unless another file has its name now."""
    with contextlib.suppress(FileNotFoundError):
        if _identity(path) == identity:
            path.unlink()
