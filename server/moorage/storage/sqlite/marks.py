"""Files beside the databases: marks that reveal lost commits, and disk space in reserve.

SQLite reads a write-ahead log up to the first damaged frame and does not report the rest. So a
small file, the mark, repeats how many facts or changes the database must have.
"""

import contextlib
import os
import shutil
import struct
import time
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from moorage.storage.sqlite.files import OWNER_ONLY, read_file, sync_directory

SYNC_SECONDS: Final = 1.0
"""Seconds between syncs of a mark. A sync per commit would cut the rate of commits by a third."""
RESERVE_BYTES: Final = 16 << 20
"""Bytes in reserve on the disk: enough for ten thousand releases and renewals on a full disk."""
LOW_BYTES: Final = 256 << 10
"""Free bytes below which the disk counts as full, even if no write has failed: so an idle server
notices when other programs fill the disk."""
ENOUGH_BYTES: Final = 1 << 20
"""Free bytes from which the disk no longer counts as full."""
REFILL_SECONDS: Final = 2.0
_SLOT_BYTES: Final = 4096
"""Bytes for each of the two copies of a mark: a disk block, so that no torn write damages both."""
_RECORD: Final = struct.Struct(">8sQQQ")
_SUM: Final = struct.Struct(">I")


@dataclass(frozen=True, slots=True)
class Found:
    """The contents of a mark.

    Args:
        exists: Whether the file exists.
        first: The first number; 0 if nothing can be read.
        writes: How often the mark was written; 0 if neither copy can be read.
        doubt: The damage of the mark, as a text; empty: none.
    """

    exists: bool
    first: int = 0
    second: int = 0
    writes: int = 0
    doubt: str = ""

    @property
    def known(self) -> bool:
        """Whether at least one copy of the mark is undamaged."""
        return self.writes > 0


def read_mark(path: Path, label: str) -> Found:
    """Return the contents of a mark; damage raises no error.

    Raises:
        OSError: The file exists and cannot be read.
    """
    try:
        content = read_file(path)
    except FileNotFoundError:
        return Found(exists=False, doubt=f"{path.name} is missing")
    copies = [_unpack(content[start : start + _SLOT_BYTES], label) for start in (0, _SLOT_BYTES)]
    good = [copy for copy in copies if copy is not None]
    if not good:
        return Found(exists=True, doubt=f"neither copy in {path.name} can be read")
    writes, first, second = max(good)
    doubt = "" if len(good) == len(copies) else f"one of the two copies in {path.name} is damaged"
    return Found(exists=True, first=first, second=second, writes=writes, doubt=doubt)


def _unpack(slot: bytes, label: str) -> tuple[int, int, int] | None:
    record, end = slot[: _RECORD.size], _RECORD.size + _SUM.size
    if len(slot) < end or _SUM.unpack(slot[_RECORD.size : end])[0] != zlib.crc32(record):
        return None
    name, writes, first, second = _RECORD.unpack(record)
    return (writes, first, second) if name.rstrip(b"\0") == label.encode() else None


class DurableMark:
    """A mark that this process writes, for one thread at a time.

    Args:
        path: The mark's file; a missing file is created.
        label: Up to eight letters that name the marked database.
        first: Initial value of the first number.
        writes: How often the mark was written before.

    Attributes:
        unsynced: Whether a power cut may undo the last write.

    Raises:
        OSError: The file cannot be written.
    """

    def __init__(self, path: Path, label: str, first: int, second: int, writes: int) -> None:
        self._label = label.encode()
        self._writes = writes
        self._synced_at = time.monotonic()
        self.unsynced = False
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, OWNER_ONLY)
        try:
            os.fchmod(self._descriptor, OWNER_ONLY)
            self.write_both(first, second)
            sync_directory(path.parent)
        except BaseException:
            self.close()
            raise

    def write(self, first: int, second: int) -> None:
        """Replace the older copy by new numbers. They survive a power cut only after `sync`."""
        self._writes += 1
        record = _RECORD.pack(self._label, self._writes, first, second)
        slot = record + _SUM.pack(zlib.crc32(record))
        os.pwrite(self._descriptor, slot.ljust(_SLOT_BYTES, b"\0"), self._writes % 2 * _SLOT_BYTES)
        self.unsynced = True

    def sync(self) -> None:
        """Wait until written data is on the disk."""
        if self.unsynced:
            os.fdatasync(self._descriptor)
            self.unsynced = False
            self._synced_at = time.monotonic()

    def sync_in_time(self) -> float | None:
        """Sync if the last sync is `SYNC_SECONDS` ago; return in how many seconds to call again."""
        if time.monotonic() - self._synced_at >= SYNC_SECONDS:
            self.sync()
        return SYNC_SECONDS if self.unsynced else None

    def write_both(self, first: int, second: int) -> None:
        """Write both copies, one after the other, each durable before the next."""
        for _ in range(2):
            self.write(first, second)
            self.sync()

    def close(self) -> None:
        """Close the file. A second call does nothing."""
        if self._descriptor >= 0:
            with contextlib.suppress(OSError):  # The loss is that of a power cut.
                self.sync()
            os.close(self._descriptor)
            self._descriptor = -1


class Reserve:
    """Disk space in reserve: on a full disk, granted leases can still end.

    Args:
        path: File that occupies the reserved space; the file is deleted when the disk is full.

    Attributes:
        spent: Whether the space was freed, or the disk has no room for it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.spent = not self._fill()
        self._low = False
        self._tried_at = time.monotonic()

    @property
    def is_full(self) -> bool:
        """Whether the disk is full or almost full."""
        return self.spent or self._low

    def spend(self) -> bool:
        """Free the reserved space; return whether space was reserved."""
        if self.spent:
            return False
        self.close()
        self.spent = True
        return True

    def refill(self) -> float:
        """Measure the free space, and reserve space again if there is enough.

        Returns:
            Seconds until the next measurement is due.
        """
        now = time.monotonic()
        if now - self._tried_at >= REFILL_SECONDS:
            self._tried_at = now
            self.spent = self.spent and not self._fill()
            self._low = self._is_low()
        return REFILL_SECONDS

    def close(self) -> None:
        """Free the reserved space."""
        self._path.unlink(missing_ok=True)

    def _is_low(self) -> bool:
        try:
            found = os.statvfs(self._path.parent)
        except OSError:
            return self._low
        blocks = found.f_bavail if os.geteuid() else found.f_bfree  # Some blocks are for root only.
        return blocks * found.f_frsize < (ENOUGH_BYTES if self._low else LOW_BYTES)

    def _fill(self) -> bool:
        try:
            if shutil.disk_usage(self._path.parent).free < 2 * RESERVE_BYTES:
                return False
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
            descriptor = os.open(self._path, flags, OWNER_ONLY)
            try:
                os.posix_fallocate(descriptor, 0, RESERVE_BYTES)
            finally:
                os.close(descriptor)
        except OSError:
            return False
        return True
