"""Stores orders, states and ends of this machine's workloads in folders.

A folder is created before its workload starts, and moved away when nothing of the workload is left.
So the next daemon finds all that a killed daemon had begun.

    ROOT/running/NAME/order.json     the supervisor's order
                     /lock           held by the supervisor while it lives
                     /process.json   written by the supervisor when the command runs
                     /ready.json     written by the backend when the workload answers
                     /exit.json      written by the supervisor when no process is left
                     /output.log     the workload's output, through its supervisor
                     /work           its working folder, unless the spec names another
                     /stop           created by the backend for a stop
                     /failed.json    written by the backend if it did not become ready
    ROOT/ended/NAME@ATTEMPT/         the last `ENDED_MAX` stopped ones, for their output
    ROOT/damaged/NAME/               unreadable at the start of the daemon

Without confinement, a workload may replace these files by anything. So they are opened without
following links and without blocking, and anything but a plain file counts as lost.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import stat
import struct
from collections.abc import Iterator
from numbers import Real
from pathlib import Path
from typing import Final
from urllib.parse import quote, unquote

from moorage.backends.base import (
    LOG_BYTES_MAX,
    LOG_TAIL_LINES,
    BackendError,
    Log,
    Phase,
    UnsupportedSpecError,
    WorkloadReport,
)
from moorage.backends.local import supervisor
from moorage.records.json_values import JsonMapping, JsonObject

ENDED_MAX: Final = 200
"""Maximum folders of stopped workloads, one per start, that stay for their output.

The same number of damaged folders may stay.
"""
RECORD_BYTES_MAX: Final = 16 * 1024 * 1024
"""Longest JSON file in bytes; a longer one was not written by Moorage."""
_ALIEN: Final = frozenset({errno.ELOOP, errno.ENXIO, errno.EISDIR, errno.EACCES, errno.ENOTDIR})
"""Errors of opening a path that is a link, a socket or a folder instead of a file."""
_NAME_MAX: Final = 150
"""Longest folder name; longer ones are cut and get a digest, as file systems take 255 bytes."""
_TAIL_BYTES: Final = 16 * 1024
_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW
_FLOCK: Final = "hhqqi"
"""`struct flock` of 64-bit Linux: type, whence, start, length, pid."""


class WorkloadStore:
    """Stores workloads in folders below one root.

    Args:
        root: Created if missing; readable only by this user.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._running = root / "running"
        self._ended = root / "ended"
        self._damaged = root / "damaged"
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        for folder in (root, self._running, self._ended, self._damaged):
            folder.mkdir(exist_ok=True, mode=0o700)
            folder.chmod(0o700)  # An earlier release made some readable by others.
        self.quarantined = tuple(filter(None, map(self._tidy, sorted(self._running.iterdir()))))
        """Messages about unreadable folders that were moved to `damaged`."""

    def _tidy(self, folder: Path) -> str:
        """Remove a folder without an order; move an unreadable one away and return a message."""
        plain = not folder.is_symlink() and folder.is_dir()
        if plain and not os.path.lexists(folder / "order.json"):
            shutil.rmtree(folder, ignore_errors=True)  # A daemon was killed before the order.
        elif not plain or _sound(folder) is None:
            place = self._damaged / folder.name
            _remove(place)
            folder.rename(place)
            _prune(self._damaged)
            return f"{folder} is not a valid record of a workload; it was moved to {place}"
        return ""

    def folder(self, workload: str) -> Path:
        """Return the path of the folder of a running workload."""
        return self._running / _file_name(workload)

    def name_of(self, folder: Path) -> str | None:
        """Return the name of a folder's workload; None if the folder's name is shortened."""
        name = unquote(folder.name)
        return name if self.folder(name) == folder else None

    def order(self, workload: str) -> JsonObject | None:
        """Return the order of a workload; None if the order is missing or unreadable."""
        return _sound(self.folder(workload))

    def has(self, workload: str) -> bool:
        """Return whether a workload was started and not stopped."""
        return self.order(workload) is not None

    def keeps(self, workload: str) -> bool:
        """Return whether a workload has a folder, even if it was stopped."""
        return bool(self.attempts(workload))

    def attempts(self, workload: str) -> tuple[int, ...]:
        """Return the numbers of a workload's starts whose folders still exist, in order."""
        order = self.order(workload)
        found = set() if order is None else {int(order.get("attempt", 1))}
        for folder in self._ended.iterdir():
            name, _, attempt = folder.name.rpartition("@")  # `_file_name` escapes "@".
            if name == _file_name(workload) and attempt.isdecimal():
                found.add(int(attempt))
        return tuple(sorted(found))

    def names(self) -> Iterator[str]:
        """Yield the names of all workloads that were started and not stopped."""
        for folder in sorted(self._running.iterdir()):
            order = _sound(folder)
            if order is not None:
                yield str(order["id"])

    def devices(self) -> dict[str, JsonObject]:
        """Return the devices of all workloads that were started and not stopped, by workload."""
        held = {}
        for name in self.names():
            order = self.order(name) or {}
            held[name] = dict(order.get("devices") or {})
        return held

    def look(self, workload: str) -> WorkloadReport | None:
        """Return the report of a workload from its stored files; None without files."""
        folder = self.folder(workload)
        if self.order(workload) is None:
            return None
        # Read the lock first: a supervisor writes `exit.json` before it releases the lock.
        held = holder(folder) is not None
        ended = read(folder / "exit.json")
        if ended is not None and not held:
            return _end_report(workload, ended, tail(folder))
        if held or not (folder / "process.json").exists():
            ready = read(folder / "ready.json")
            if ready is None or not held:
                return WorkloadReport(workload, Phase.STARTING)
            return WorkloadReport(workload, Phase.READY, endpoint=ready["endpoint"])
        detail = "its supervisor was killed, and the workload with it"
        return WorkloadReport(workload, Phase.FAILED, detail=detail, log_tail=tail(folder))

    def forbid(self, workload: str) -> None:
        """Mark a workload, so that no supervisor starts it from now on."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # The folder may be gone.
            flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            os.close(os.open(self.folder(workload) / "stop", flags, 0o600))

    def forbidden(self, workload: str) -> bool:
        """Return whether `forbid` marked a workload."""
        return (self.folder(workload) / "stop").exists()

    def fail(self, workload: str, fencing: str, reason: str) -> None:
        """Store the failure of a start in the workload's folder, before the folder is archived.

        A daemon may be killed before it stores the failure in its ledger. When it repeats the order
        after a restart, it finds this record and does not start the workload again.
        """
        folder = self.folder(workload)
        if not self.has(workload):
            return
        ended = read(folder / "exit.json") or {}
        code = ended.get("code") if ended.get("started", True) else None
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            note = {"fencing": fencing, "reason": reason, "code": code}
            write(folder / "failed.json", note)

    def failure(self, workload: str, attempt: int, fencing: str) -> WorkloadReport | None:
        """Return the stored failure of one start of a workload; None if that start did not fail."""
        for folder in (self.folder(workload), self._archive_path(workload, attempt)):
            note = read(folder / "failed.json")
            if note is not None and note["fencing"] == fencing:
                reason, code = note["reason"], note["code"]
                return WorkloadReport(
                    workload, Phase.FAILED, detail=reason, exit_code=code, log_tail=tail(folder)
                )
        return None

    def archive(self, workload: str) -> None:
        """Move the folder of a stopped workload into the archive."""
        order = self.order(workload)
        if order is None:  # Without an order, the attempt is unknown.
            _remove(self.folder(workload))
            return
        place = self._archive_path(workload, int(order.get("attempt", 1)))
        _remove(place)
        with contextlib.suppress(FileNotFoundError):  # E.g. two stops at a time.
            self.folder(workload).rename(place)
        _prune(self._ended)

    def log(self, workload: str, offset: int, attempt: int = 0) -> Log | None:
        """Read output from a byte offset on, even of stopped workloads.

        Args:
            workload: Name of the workload.
            offset: Byte offset; a negative one counts from the end.
            attempt: Number of the start; 0: the last one.

        Returns:
            A piece of the output; None if no folder of the workload is left.
        """
        # Look into `running` first: a stop moves the folder to the archive, so one of both has it.
        found = _piece(self.folder(workload), offset, attempt, over=False)
        if found is None and not attempt:
            archives = [self._archive_path(workload, each) for each in self.attempts(workload)]
            last = max(archives, key=_change_time, default=None)
            return None if last is None else _piece(last, offset, attempt, over=True)
        return found or _piece(self._archive_path(workload, attempt), offset, attempt, over=True)

    def work(self, workload: str, attempt: int = 0) -> int | None:
        """Open the working folder of a start, also of a stopped workload.

        Args:
            workload: Name of the workload.
            attempt: Number of the start; 0: the last one.

        Returns:
            A descriptor; None if no folder of the workload is left.

        Raises:
            UnsupportedSpecError: The workload did not run in a folder of its own.
        """
        # Look into `running` first, then into the archive, as in `log`.
        archives = [self._archive_path(workload, each) for each in self.attempts(workload)]
        last = sorted(archives, key=_change_time, reverse=True)
        for folder in (self.folder(workload), *last, self._archive_path(workload, attempt)):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                opened = os.open(folder, _FOLDER)
                try:
                    order = read(Path("order.json"), opened)
                    if order is None or attempt not in {0, order.get("attempt", 1)}:
                        continue
                    # Open the folder by its descriptor, since a stop may have moved it meanwhile.
                    there = os.access("work", os.F_OK, dir_fd=opened, follow_symlinks=False)
                    if order.get("workdir") or not there:
                        raise UnsupportedSpecError(
                            "the workload did not run in a folder of its own, but in a container or"
                            " in its `workdir`"
                        )
                    return os.open("work", _FOLDER, dir_fd=opened)
                finally:
                    os.close(opened)
        return None

    def _archive_path(self, workload: str, attempt: int) -> Path:
        return self._ended / f"{_file_name(workload)}@{attempt}"


def _piece(folder: Path, offset: int, attempt: int, *, over: bool) -> Log | None:
    """Read a piece of a start's output from a folder; None if another start owns the folder.

    The folder is opened first, since its path may soon belong to another start: a stop moves the
    folder, and the next start creates its own.
    """
    try:
        opened = os.open(folder, _FOLDER)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        order = read(Path("order.json"), opened)
        if order is None or attempt not in {0, order.get("attempt", 1)}:
            return None
        ended = read(Path("exit.json"), opened)  # Read before the output, which is then complete.
        code = None if ended is None else ended["code"]
        over = over or ended is not None
        output = _open(Path("output.log"), opened)
        if output is None:
            if os.path.lexists(folder / "output.log"):
                raise BackendError("the output cannot be read: output.log is no longer a file")
            return Log("", 0, over, code)
    finally:
        os.close(opened)
    with open(output, "rb") as file:  # noqa: PTH123  # Opens a descriptor.
        size = os.fstat(output).st_size
        start = max(0, size + offset) if offset < 0 else offset
        start = start if start <= size else 0  # The log was shortened since.
        file.seek(start)
        data = file.read(LOG_BYTES_MAX)
        end = file.tell()
    return Log.of(data, start, over=over and end >= size, exit_code=code)


def read(path: Path, folder: int | None = None) -> JsonObject | None:
    """Return the object in a JSON file; None if the file is missing, incomplete or has no object.

    Args:
        path: The file.
        folder: Descriptor of the folder that the path is relative to.

    Raises:
        OSError: The file cannot be read now, e.g. as no descriptor is left.
    """
    opened = _open(path, folder)
    if opened is None:
        return None
    with open(opened, "rb") as file:  # noqa: PTH123  # Opens a descriptor.
        data = file.read(RECORD_BYTES_MAX + 1)
    try:
        document = json.loads(data) if len(data) <= RECORD_BYTES_MAX else None
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None


def _open(path: Path, folder: int | None = None) -> int | None:
    """Open a plain file for reading; None if the path is missing or not a plain file."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        opened = os.open(path, flags, dir_fd=folder)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno in _ALIEN:
            return None
        raise
    if stat.S_ISREG(os.fstat(opened).st_mode):
        return opened
    os.close(opened)
    return None


def _sound(folder: Path) -> JsonObject | None:
    """Return the order in a folder; None if it is missing, invalid or of another folder."""
    order = read(folder / "order.json")
    if order is None:
        return None
    workload, attempt, devices = order.get("id"), order.get("attempt", 1), order.get("devices")
    sound = isinstance(workload, str) and _file_name(workload) == folder.name
    sound = sound and isinstance(attempt, int) and isinstance(order.get("stop_seconds", 0), Real)
    for rows in devices.values() if isinstance(devices, dict) else [devices or []]:
        sound = sound and isinstance(rows, list)
        sound = sound and all(isinstance(row, dict) and "id" in row for row in rows)
    return order if sound else None


def _prune(folder: Path) -> None:
    for old in sorted(folder.iterdir(), key=_change_time)[:-ENDED_MAX]:
        _remove(old)


def _remove(place: Path) -> None:
    """Remove a file, folder or link, without following the link."""
    with contextlib.suppress(OSError):
        place.unlink()
    shutil.rmtree(place, ignore_errors=True)


write: Final = supervisor.write


def holder(folder: Path) -> int | None:
    """Return the pid of the supervisor that holds the lock of a folder, or None.

    This function only queries the lock, so that it never keeps a supervisor from taking the lock.
    """
    descriptor = _open(folder / "lock")
    if descriptor is None:
        return None
    try:
        query = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind, _, _, _, pid = struct.unpack(_FLOCK, fcntl.fcntl(descriptor, fcntl.F_GETLK, query))
    finally:
        os.close(descriptor)
    return None if kind == fcntl.F_UNLCK else pid


def tail(folder: Path) -> tuple[str, ...]:
    """Return the last lines of a workload's output."""
    opened = _open(folder / "output.log")
    if opened is None:
        return ()
    with open(opened, "rb") as file:  # noqa: PTH123  # Opens a descriptor.
        file.seek(max(0, os.fstat(opened).st_size - _TAIL_BYTES))
        lines = file.read(_TAIL_BYTES).decode(errors="replace").splitlines()
    return tuple(lines[-LOG_TAIL_LINES:])


def _end_report(workload: str, ended: JsonMapping, lines: tuple[str, ...]) -> WorkloadReport:
    code, detail = ended["code"], ended["detail"]
    if not ended.get("started", True):
        code = None  # No program ran, so the code is not a program's.
    if detail == "stopped":
        return WorkloadReport(workload, Phase.STOPPED, detail=detail, exit_code=code)
    phase = Phase.SUCCEEDED if code == 0 else Phase.FAILED
    if code is None:
        text = f"it did not start: {detail}"
    elif detail:
        text = detail
    elif code < 0:
        text = f"it was killed by signal {-code}"
    else:
        text = f"it ended by itself with exit status {code}"
    return WorkloadReport(workload, phase, detail=text, exit_code=code, log_tail=lines)


def _file_name(workload: str) -> str:
    name = quote(workload, safe="")
    if name.strip(".") and len(name) <= _NAME_MAX and unquote(name) == workload:
        return name
    return f"{name[:_NAME_MAX].strip('.')}%{hashlib.sha256(workload.encode()).hexdigest()[:16]}"


def _change_time(folder: Path) -> float:
    try:
        return folder.lstat().st_mtime
    except FileNotFoundError:
        return 0.0
