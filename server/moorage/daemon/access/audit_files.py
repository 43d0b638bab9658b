"""Files of the audit log: JSON lines, each with a number and the hash of all before it.

`audit_log` appends, `moored audit` reads and verifies, also while the server runs.
"""

import ctypes
import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import msgspec
import structlog

from moorage.daemon.access.audit_chain import (
    ChainCheck,
    ChainEnd,
    ChainError,
    Sealed,
    chain_lines,
    encode_entries,
    is_beyond_end,
    origin_of,
)
from moorage.daemon.access.audit_mark import AuditMark, read_mark, write_mark
from moorage.records.audit import AuditEntry
from moorage.records.json_values import JsonObject
from moorage.storage.sqlite.files import open_regular, read_file

FOLDER: Final = "audit"
"""Name of the log's folder in the data folder."""
FILE_BYTES_MAX: Final = 16 << 20
"""Size at which a new file begins."""
PRUNE_SECONDS: Final = 60.0
"""Seconds between two marks of the log's end, and between two deletions of old files; a new file
also causes both."""
_TAIL_BYTES: Final = 1 << 20
"""Bytes read from the end of a file; no line is longer."""
_REMEDY: Final = (
    "keep a copy of this file and delete the damaged lines at its end; then the log goes on"
)
_SEQ_FIELD: Final = b',"seq":'

_flock: Final = ctypes.PyDLL(None).flock
"""`flock` that, unlike `fcntl.flock`, does not release the interpreter lock: beside a busy event
loop, regaining that lock costs more than a call that does not wait."""

log = structlog.get_logger("moored")


class AuditFiles:
    """Appends lines to the audit files of one server; several processes may append, one at a time.

    Args:
        folder: The data folder.
        keep_seconds: Files whose last line is older are deleted.
        keep_bytes: Maximum bytes of all files; beyond this, the oldest files are deleted.
    """

    def __init__(self, folder: Path, keep_seconds: float, keep_bytes: int) -> None:
        self._folder = folder / FOLDER
        self._keep_seconds = keep_seconds
        self._keep_bytes = keep_bytes
        self._end = ChainEnd()
        self._pruned_at = 0.0
        self._has_lost_mark = False
        """Whether a damaged mark was found that the log does not mention yet."""
        self._seen: tuple[Path, int, int] | None = None
        """The current file, its inode, and its size after the last line that `_end` covers."""
        self._lock: int | None = None
        self._file: int | None = None
        """The current file; it stays open, like the lock, until another process writes."""

    def append(self, entries: Sequence[AuditEntry], now: float) -> None:
        """Append entries; see `append_lines`."""
        self.append_lines(encode_entries(entries), now)

    def append_lines(self, encoded: bytes, now: float) -> None:
        """Append entries as JSON lines, and delete lines that are too old or too many.

        Raises:
            OSError: The entries cannot be written; then none of them is stored.
        """
        with self._hold_lock():
            noted = self._end
            if self._seen is None:  # Lines may also have been cut before this process began.
                mark = self._mark()
                noted = max(noted, mark.end, key=_by_number) if mark else noted
            path, inode, size = self._seen or self._catch_up()
            begun, is_cut = not size, self._end.number < noted.number
            if lost_mark := self._has_lost_mark:
                encoded = encode_entries([AuditEntry(now, "audit.mark_lost", "moored")]) + encoded
            if is_cut:
                about = {"last": self._end.number, "noted": noted.number, "noted_hash": noted.hash}
                log.error("audit_cut", **about)
                cut = AuditEntry(now, "audit.cut", "moored", about=about)
                encoded = encode_entries([cut]) + encoded
            chain, end = chain_lines(encoded, self._end)
            lines = b"".join(chain)
            self._write(lines, size)
            self._end, self._seen = end, (path, inode, size + len(lines))
            is_due = not 0 <= now - self._pruned_at < PRUNE_SECONDS
            if begun or is_cut or lost_mark or is_due:
                self._pruned_at = now
                self._keep_bounds(now)
            self._has_lost_mark &= not lost_mark

    def last_seq(self) -> int | None:
        """Return the number of the last fact with an audit entry; None: no fact has an entry.

        Raises:
            OSError: The files cannot be read.
            ValueError: A line is not an audit entry.
        """
        for path in reversed(_files(self._folder)):
            for line in reversed(read_file(path).splitlines(keepends=True)):
                if _SEQ_FIELD in line and line.endswith(b"\n"):
                    seq = msgspec.json.decode(line, type=_AboutFact).seq
                    if seq is not None:
                        return seq
        return None

    def close(self) -> None:
        """Mark the log's end, and close the open file; `append` opens it again."""
        if self._lock is not None:
            with suppress(OSError), self._hold_lock():  # Without, the mark is a little older.
                mark = self._mark()
                if mark is not None and mark.end.number < self._end.number:
                    self._write_mark(mark.deleted)
        self._release()

    def _release(self) -> None:
        for each in filter(None, (self._file, self._lock)):
            os.close(each)
        self._file = self._lock = self._seen = None

    @contextmanager
    def _hold_lock(self) -> Iterator[None]:
        """Hold the lock of the folder; close the open file if it has changed or is full."""
        if self._lock is not None:
            _take(self._lock)
            if not self._is_seen():
                self._release()
        if self._lock is None:
            self._lock = _open_lock(self._folder)
            _take(self._lock)
        try:
            yield
        except BaseException:
            self._release()  # Closing the file also frees the lock.
            raise
        _flock(self._lock, fcntl.LOCK_UN)

    def _is_seen(self) -> bool:
        """Return whether the file is unchanged since the last write and has room for more lines."""
        if self._seen is None or self._seen[2] >= FILE_BYTES_MAX:
            return False
        path, *seen = self._seen
        try:
            status = path.stat()
        except FileNotFoundError:  # No process begins another file before this one is full.
            return False
        return [status.st_ino, status.st_size] == seen

    def _catch_up(self) -> tuple[Path, int, int]:
        """Find the last line that another process wrote, and open the file to append to."""
        files = _files(self._folder)
        path = files[-1] if files else self._folder / _name(1)
        if files and _drop_torn_line(path) >= FILE_BYTES_MAX:
            path = self._folder / _name(_number(path) + 1)
        self._end = _last(files)
        self._file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
        status = os.fstat(self._file)
        return path, status.st_ino, status.st_size

    def _write(self, lines: bytes, size: int) -> None:
        """Write lines at the end of the file, all or none."""
        assert self._file is not None
        try:
            view = memoryview(lines)
            while view:
                view = view[os.write(self._file, view) :]
        except OSError:
            os.ftruncate(self._file, size)
            raise

    def _keep_bounds(self, now: float) -> None:
        """Mark the log's end, and delete old files; the mark has the last deleted line before."""
        files = _files(self._folder)
        try:
            gone = self._surplus(files, now)
            mark, origin = self._mark(), _origin(files)
            # A log that begins with entry 1, or has no mark yet, is taken as it is.
            deleted = origin if mark is None or not origin.number else mark.deleted
            self._write_mark(_last(gone) if gone else deleted)
            for each in gone:
                each.unlink()
        except (OSError, ValueError) as error:  # The lines are written: the caller must not repeat.
            log.error("audit_failed", reason=f"no old entry is deleted: {error}")  # noqa: TRY400  # A traceback says no more.

    def _surplus(self, files: Sequence[Path], now: float) -> list[Path]:
        """Return the oldest files, which are too old or too many; the current file stays."""
        gone, total = list[Path](), sum(each.stat().st_size for each in files)
        for each in files[:-1]:
            status = each.stat()
            if now - status.st_mtime <= self._keep_seconds and total <= self._keep_bytes:
                break
            gone.append(each)
            total -= status.st_size
        return gone

    def _mark(self) -> AuditMark | None:
        """Return the mark; None if it is missing or damaged."""
        try:
            return read_mark(self._folder.parent)
        except (OSError, ValueError) as error:
            self._has_lost_mark = isinstance(error, ValueError)
            log.error("audit_failed", reason=str(error))  # noqa: TRY400  # A traceback says no more.
            return None

    def _write_mark(self, deleted: ChainEnd) -> None:
        """Mark the end of the log, once all lines up to it are durable."""
        if self._file is not None:
            os.fdatasync(self._file)
        write_mark(self._folder.parent, AuditMark(deleted, self._end))


def read_lines(folder: Path, after: int = 0) -> Iterator[JsonObject]:
    """Yield the lines of a data folder as JSON objects, the oldest first.

    Args:
        folder: The data folder.
        after: Lines up to this number are left out.

    Raises:
        ChainError: A line is not a JSON object.
    """
    files = _files_after(folder / FOLDER, after)
    for path in files:
        try:
            opened = open_regular(path)
        except FileNotFoundError:  # The server has deleted the oldest file meanwhile.
            continue
        with opened as file:
            for count, line in enumerate(file, 1):
                if _is_being_written(line, path, files, count):
                    return
                try:
                    entry = json.loads(line)
                    number = entry["number"]
                except (ValueError, TypeError, KeyError) as error:
                    raise ChainError(f"{path.name}:{count}: not an audit entry: {error}") from None
                if number > after:
                    yield entry


def verify(folder: Path, noted: ChainEnd | None = None) -> tuple[int, ChainEnd]:
    """Check every line of a data folder; return the number of the first line, and the end.

    Args:
        folder: The data folder.
        noted: The end of the log as an earlier call returned it; the log must still contain this
            last line.

    Raises:
        ChainError: A line was changed, or lines are missing.
        OSError: A file cannot be read.
    """
    while True:
        files = _files(folder / FOLDER)
        try:
            return _verify(folder, files, noted)
        except FileNotFoundError:
            if files == _files(folder / FOLDER):
                raise
            # The server has deleted an old file meanwhile: begin again.


def _verify(folder: Path, files: Sequence[Path], noted: ChainEnd | None) -> tuple[int, ChainEnd]:
    # The server may append and delete lines meanwhile, and changes the mark before a deletion.
    mark = _known_mark(folder)
    check = ChainCheck(noted, mark.end if mark else None)
    for path in files:
        with open_regular(path) as file:
            for count, line in enumerate(file, 1):
                if _is_being_written(line, path, files, count):
                    break
                check.add(line, f"{path.name}:{count}")
    mark = _known_mark(folder)
    check.finish(mark.deleted if mark else None)
    return check.first, check.end


def is_begin_known(folder: Path) -> bool:
    """Return whether `verify` finds lines that were removed at the beginning.

    Raises:
        ChainError: The mark is damaged.
    """
    return _known_mark(folder) is not None


def _known_mark(folder: Path) -> AuditMark | None:
    try:
        return read_mark(folder)
    except ValueError as error:
        raise ChainError(str(error)) from None


def _is_being_written(line: bytes, path: Path, files: Sequence[Path], count: int) -> bool:
    """Return whether a line is still being written: it lacks its newline.

    Raises:
        ChainError: The line can never be completed: a later file exists, or the newline was
            changed.
    """
    if line.endswith(b"\n"):
        return False
    if path != files[-1]:
        raise ChainError(f"{path.name}:{count}: the line has no newline, and a later file exists")
    if is_beyond_end(line):
        raise ChainError(f"{path.name}:{count}: the newline of the line was changed")
    return True


def read_end(folder: Path) -> ChainEnd:
    """Return where the log of a data folder ends.

    Raises:
        OSError: A file of the log cannot be read.
        ValueError: The last line is not an audit entry.
    """
    return _last(_files(folder / FOLDER))


def _files_after(folder: Path, number: int) -> list[Path]:
    """Return the files that may have lines after a number; `--follow` calls this twice a second."""
    files = _files(folder)
    for place in reversed(range(len(files))):
        with (
            suppress(msgspec.MsgspecError, FileNotFoundError),  # The server may have deleted it.
            open_regular(files[place]) as file,
        ):
            if msgspec.json.decode(file.readline(), type=Sealed).number <= number + 1:
                return files[place:]
    return files


class _AboutFact(msgspec.Struct):
    seq: int | None = None


def _last(files: Sequence[Path]) -> ChainEnd:
    """Return the end of the hash chain, read from the last complete line."""
    for path in reversed(files):
        lines = _tail(path).splitlines(keepends=True)
        line = next((each for each in reversed(lines) if each.endswith(b"\n")), None)
        if line is not None:
            try:
                sealed = msgspec.json.decode(line, type=Sealed)
            except msgspec.MsgspecError as error:
                reason = f"{path}: the last line is not an audit entry: {error}; {_REMEDY}"
                raise ValueError(reason) from None
            return ChainEnd(sealed.number, sealed.hash)
    return ChainEnd()


def _origin(files: Sequence[Path]) -> ChainEnd:
    """Return the end of the chain before the first line."""
    for path in files:
        with open_regular(path) as file:
            if line := file.readline():
                try:
                    return origin_of(line)
                except msgspec.MsgspecError as error:
                    raise ValueError(f"{path}:1: not an audit entry: {error}") from None
    return ChainEnd()


def _by_number(end: ChainEnd) -> int:
    return end.number


def _tail(path: Path) -> bytes:
    with open_regular(path) as file:
        file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        return file.read()


def _drop_torn_line(path: Path) -> int:
    """Cut off the piece of a line that a crash left; return the size of the file."""
    size = path.stat().st_size
    tail = _tail(path)
    if tail and not tail.endswith(b"\n"):
        size -= len(tail) - (tail.rfind(b"\n") + 1)
        os.truncate(path, size)
    return size


def _take(lock: int) -> None:
    """Lock the folder; wait until other writers release it."""
    if _flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB):
        fcntl.flock(lock, fcntl.LOCK_EX)


def _open_lock(folder: Path) -> int:
    path, flags = folder / "lock", os.O_CREAT | os.O_RDWR
    try:
        return os.open(path, flags, 0o600)
    except FileNotFoundError:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return os.open(path, flags, 0o600)


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("[0-9]*.jsonl"))


def _name(number: int) -> str:
    return f"{number:08}.jsonl"


def _number(path: Path) -> int:
    return int(path.stem)
