"""The single-writer lock of a ledger in files, which `SqliteFacts` takes.

The lock is a `flock` on a file beside the database: the kernel releases it when the process ends,
even by a kill. SQLite's own locks last only for one transaction. The descriptor is close-on-exec,
so that no program started by the server keeps the lock. The server never deletes the file:
otherwise two processes could each lock a file of their own. If a user deletes the file, the lock on
the database itself still holds.
"""

import contextlib
import fcntl
import os
from pathlib import Path

from moorage.storage.base import StorageError, StorageLocked

_PID_BYTES = 32


class WriterLock:
    """A lock on a ledger's file; only one process of the machine can have it.

    Args:
        path: The ledger's file; the lock's file is beside it and has the suffix `.lock`.
    """

    def __init__(self, path: Path) -> None:
        self._ledger = path
        self._path = path.with_name(path.name + ".lock")
        self._descriptors: list[int] = []

    def acquire(self) -> None:
        """Take the lock without waiting, and write this process's id to the file.

        Raises:
            StorageLocked: Another process, or another ledger of this process, has the lock.
            StorageError: The file cannot be created.
        """
        flags = os.O_RDWR | os.O_CLOEXEC
        try:
            descriptor = os.open(self._path, flags | os.O_CREAT, 0o600)
        except OSError as no:
            raise StorageError(
                f"cannot make {self._path}: {no.strerror}. The data directory must be a "
                "directory that this user may write to."
            ) from no
        self._lock(descriptor)
        # Closing the file would drop SQLite's locks on it in this process, so the file stays open.
        with contextlib.suppress(FileNotFoundError):
            self._lock(os.open(self._ledger, flags))
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)

    def _lock(self, descriptor: int) -> None:
        self._descriptors.append(descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._descriptors[0], _PID_BYTES, 0).decode(errors="replace").strip()
            self.release()
            raise StorageLocked(
                f"the ledger {self._ledger}", int(holder) if holder.isdecimal() else None
            ) from None
        except OSError as no:
            self.release()
            raise StorageError(
                f"cannot lock {self._path}: {no.strerror}. Use a file system with file locks."
            ) from no

    def release(self) -> None:
        """Release the lock: closing the descriptors drops it."""
        while self._descriptors:
            os.close(self._descriptors.pop())
