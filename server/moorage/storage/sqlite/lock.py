"""The single-writer lock of a ledger in files, which `SqliteFacts` takes.

The lock is a `flock` on a file beside the database: the kernel releases it when the process ends,
even by a kill. SQLite's own locks last only for one transaction. The descriptor is close-on-exec,
so that no program started by the server keeps the lock. The server never deletes the file:
otherwise two processes could each lock a file of their own. If a user deletes the file, the lock on
the database itself still holds.

Servers that keep their data in a database elsewhere share the lock of their data folder, if they
use the same database. The file names the last process and its database.
"""

import contextlib
import fcntl
import os
import time
from pathlib import Path
from typing import Final

from moorage.storage.base import StorageError, StorageLocked

_SHARE_SECONDS_MAX: Final = 1.0
"""Maximum seconds until a server that shares the lock has named its database in the file."""


class WriterLock:
    """A lock on a ledger's file; only one process of the machine can have it.

    Args:
        path: The ledger's file; the lock's file is beside it and has the suffix `.lock`.
    """

    def __init__(self, path: Path) -> None:
        self._ledger = path
        self._path = _lock_path(path)
        self._descriptors: list[int] = []

    def acquire(self) -> None:
        """Take the lock without waiting, and write this process's id to the file.

        Raises:
            StorageLocked: Another process, or another ledger of this process, has the lock.
            StorageError: The file cannot be created.
        """
        descriptor = self._open()
        self._lock(descriptor)
        # Closing the file would drop SQLite's locks on it in this process, so the file stays open.
        with contextlib.suppress(FileNotFoundError):
            self._lock(os.open(self._ledger, os.O_RDWR | os.O_CLOEXEC))
        _write_note(descriptor, "")

    def share(self, database: str) -> None:
        """Take the lock together with all servers of a database that is elsewhere.

        Raises:
            StorageLocked: A process writes the ledger, or a server of another database has the
                lock.
            StorageError: The file cannot be created.
        """
        descriptor = self._open()
        self._descriptors.append(descriptor)
        if self._try(descriptor, fcntl.LOCK_EX):
            _write_note(descriptor, database)
        deadline = time.monotonic() + _SHARE_SECONDS_MAX
        while not self._try(descriptor, fcntl.LOCK_SH):
            if time.monotonic() > deadline:
                raise self._release_locked()
            time.sleep(0.01)  # flock has no timeout of its own.
        if _read_note(self._path)[1] != database:
            raise self._release_locked()

    def release(self) -> None:
        """Release the lock: closing the descriptors drops it."""
        while self._descriptors:
            os.close(self._descriptors.pop())

    def _open(self) -> int:
        try:
            return os.open(self._path, os.O_RDWR | os.O_CLOEXEC | os.O_CREAT, 0o600)
        except OSError as no:
            raise StorageError(
                f"cannot make {self._path}: {no.strerror}. The data directory must be a "
                "directory that this user may write to."
            ) from no

    def _lock(self, descriptor: int) -> None:
        self._descriptors.append(descriptor)
        if not self._try(descriptor, fcntl.LOCK_EX):
            raise self._release_locked()

    def _try(self, descriptor: int, kind: int) -> bool:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as no:
            self.release()
            raise StorageError(
                f"cannot lock {self._path}: {no.strerror}. Use a file system with file locks."
            ) from no
        return True

    def _release_locked(self) -> StorageLocked:
        self.release()
        holder, database = _read_note(self._path)
        folder = self._ledger.parent
        place = f"the data folder {folder}" if database else f"the ledger {self._ledger}"
        return StorageLocked(place, int(holder) if holder.isdecimal() else None)


def read_database(ledger: Path) -> str:
    """Return the database that the folder's last server used; empty: the ledger in the folder.

    Raises:
        OSError: The lock's file cannot be read.
    """
    return _read_note(_lock_path(ledger))[1]


def _lock_path(ledger: Path) -> Path:
    return ledger.with_name(ledger.name + ".lock")


def _write_note(descriptor: int, database: str) -> None:
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n{database}".encode(), 0)


def _read_note(path: Path) -> tuple[str, str]:
    """Return the process and the database that the lock's file names; empty: it names none."""
    with contextlib.suppress(FileNotFoundError):
        process, _, database = path.read_text(errors="replace").partition("\n")
        return process.strip(), database.strip()
    return "", ""
