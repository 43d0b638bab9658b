"""The addresses of a running server's doors, in a file of its data folder, for `moored doctor`.

The kernel shows the sockets of a server to root only, since the server hides its memory. So the
server records its addresses in a file that only its owner can read. The server holds a lock on the
file, and the kernel releases the lock when the process ends, even by a kill: a record without a
lock is ignored. Processes in other containers see the lock, too.
"""

import fcntl
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

_FILE: Final = "doors.json"
_BYTES_MAX: Final = 4_096
"""Maximum bytes that are read; a record of a server is much smaller."""

Address = tuple[str, int]
"""A host as the settings have it, and the port that was bound."""


class DoorRecord(msgspec.Struct, frozen=True):
    """The doors of a server that runs.

    Args:
        network: The network namespace of the server; empty if unknown.
    """

    websocket: Address
    http: Address
    network: str = ""

    @property
    def is_here(self) -> bool:
        """Whether this process reaches the doors at these addresses."""
        return self.network == find_network()


def find_network() -> str:
    """Return the network namespace of this process; empty if unknown."""
    try:
        return str(Path("/proc/self/ns/net").readlink())
    except OSError:
        return ""


def write_doors(folder: Path, record: DoorRecord) -> Callable[[], None]:
    """Write the record, valid while this process runs; return a function that removes it.

    Raises:
        OSError: The file cannot be written or locked.
    """
    path = folder / _FILE
    new = path.with_name(f"{_FILE}.new")
    new.unlink(missing_ok=True)
    descriptor = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    def remove() -> None:
        with suppress(OSError):
            # A server of the same database may have replaced the record by its own.
            if os.path.samestat(path.stat(), os.fstat(descriptor)):
                path.unlink()
        os.close(descriptor)

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(descriptor, msgspec.json.encode(record) + b"\n")
        new.replace(path)
    except OSError:
        remove()
        raise
    return remove


def read_doors(folder: Path) -> DoorRecord | None:
    """Return the doors of the server that runs in a data folder; None: no server recorded them.

    Ignores the file of an ended server, a damaged file, and a file that this user cannot read.
    """
    with (
        suppress(OSError, msgspec.DecodeError),
        open(folder / _FILE, "rb", opener=_open_at_once) as file,  # Path.open has no opener.
    ):
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return msgspec.json.decode(file.read(_BYTES_MAX), type=DoorRecord)
    return None


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # Opening a pipe would wait for a writer.
