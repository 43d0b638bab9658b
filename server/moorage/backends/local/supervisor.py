"""Supervises one workload: starts it, waits for its end, and leaves no process behind.

`processes` runs it as a separate script with only the standard library, so it starts fast and stays
small. The supervisor outlives the daemon on purpose: the next daemon finds the supervisor by its
lock, reads the workload's state from its files, and stops it with SIGTERM.

Guarantees:
- The process that holds the lock of the workload's folder is its supervisor. A process that cannot
  take the lock ends. A process that takes the lock ends, too, if the command has begun before or
  must not begin. So an order that is carried out twice starts one workload only.
- When the command ends, all processes that it left behind are killed, also those in a session of
  their own: the supervisor is a subreaper, so it inherits them.
- If control groups are available, all processes of the workload are in one group and are killed
  through it, as are commands that run beside the workload.
- A workload whose processes together exceed its memory limit is ended, and this reason is stored.
- The command's output passes through the supervisor, so its file never exceeds its limit.
- If the agent has had no contact to its server for too long, the workload is ended. The supervisor
  reads the time of the last contact from the file named in `order.json`, so the agent need not run.
- `exit.json` is complete or absent.

Usage: supervisor.py FOLDER DESCRIPTOR, with `order.json` in the folder. The descriptor is a pipe,
which gets one line of JSON once the command runs or has failed to start.
"""

import _thread
import contextlib
import ctypes
import errno
import fcntl
import json
import os
import resource
import select
import signal
import stat
import sys
import time

TYPE_CHECKING = False  # To import `typing` would take longer than all the rest.
if TYPE_CHECKING:
    from moorage.records.json_values import JsonMapping, JsonObject

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
MISSING = 127
"""Exit code if the program does not exist, as in shells."""
NOT_EXECUTABLE = 126
"""Exit code if the program exists but cannot be run, as in shells."""
BEGUN = ("process.json", "exit.json", "stop")
"""Names of files; if one of them exists, the command must not be started."""
IGNORED = (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""Signals that may be ignored in this process; commands get the default handling back."""
REASON_MAX = 500
"""Maximum characters of a program's name, or of an error, in a message."""
CHECK_SECONDS = 0.5
"""Seconds between two checks of the memory in use, and of whether the owner runs."""
CHUNK_BYTES = 65_536
"""Bytes of output that are read or moved at a time: the size of a pipe's buffer."""
OUTPUT_SECONDS_MAX = 1.0
"""Seconds to wait for more output after the workload's end, if a process holds the pipe open."""
OUTPUT_TRIES_MAX = 60
"""Maximum waits of `OUTPUT_SECONDS_MAX` while the pipe has data, as on a busy machine."""
UNHEARD = "its machine had not heard the server for too long"
"""The message about a workload's end if its agent had no contact to the server for too long."""
UNHEARD_STOP_SECONDS_MAX = 5.0
"""Longest time from SIGTERM to SIGKILL after lost contact, whatever the spec allows."""
KILL_SECONDS_MAX = 10.0
"""Seconds to wait until killed processes are gone; the kernel may block some for longer."""


def main(folder: str, pipe: int) -> int:
    """Supervise one workload until it ends; return the exit status of the supervisor."""
    os.chdir("/")
    os.setsid()
    if not take(folder):
        report(pipe, {"begun": True})
        return 1
    with open(os.path.join(folder, "order.json"), encoding="utf-8") as file:
        order = json.load(file)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    # `supervise` waits for signals, without handlers, so a signal may arrive at any moment.
    wanted = {signal.SIGTERM, signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, wanted | {signal.SIGINT, signal.SIGHUP})
    if unheard(order):
        finish(folder, None, UNHEARD, started=False)
        report(pipe, {"error": UNHEARD})
        return 1
    group = make_group(order)
    seen, written = os.pipe()
    try:
        child = start(order, folder, libc, group, written)
    except OSError as error:
        reason = f"{order['command'][0][:REASON_MAX]}: {error.strerror or error}"
        kill_rest(group)
        code = MISSING if error.errno in {errno.ENOENT, errno.ENOTDIR} else NOT_EXECUTABLE
        finish(folder, code if error.errno else None, reason, started=False)
        report(pipe, {"error": reason})
        return 1
    finally:
        os.close(written)
    output = Output(os.path.join(folder, "output.log"), order["log_bytes_max"])
    output.follow(seen)
    # If the folder is gone, the workload runs on until it is stopped.
    with contextlib.suppress(OSError):
        write(os.path.join(folder, "process.json"), {"pid": child, "supervisor": os.getpid()})
    report(pipe, {"pid": child})
    status, detail = supervise(folder, order, child, group, wanted)
    detail = detail or memory_kill_message(group)
    kill_rest(group)
    output.complete()
    code = os.waitstatus_to_exitcode(status)
    # An exit code 0 after lost contact is not a success: the workload was stopped.
    finish(folder, code or -signal.SIGTERM if detail == UNHEARD else code, detail)
    return 0


def take(folder: str) -> bool:
    """Lock a folder as its supervisor; False: another supervisor runs, or none is needed."""
    try:
        lock = os.open(os.path.join(folder, "lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        held, there = os.fstat(lock), os.stat(os.path.join(folder, "lock"))
    except OSError:  # Another supervisor holds it, or the folder is gone.
        return False
    begun = any(os.path.exists(os.path.join(folder, name)) for name in BEGUN)
    return held.st_ino == there.st_ino and not begun


def make_group(order: "JsonObject") -> str:
    """Make the workload's control group; return its path, or "" if none can be made."""
    group = str(order.get("group") or "")
    if not group:
        return ""
    try:
        for folder in (group, os.path.join(group, "main"), os.path.join(group, "exec")):
            with contextlib.suppress(FileExistsError):  # From a killed supervisor.
                os.mkdir(folder)
    except OSError:
        return ""
    if order["memory_bytes"]:
        for name, value in (
            ("memory.max", str(order["memory_bytes"])),
            ("memory.swap.max", "0"),
            ("memory.oom.group", "1"),
        ):
            with contextlib.suppress(OSError), open(os.path.join(group, name), "w") as file:
                file.write(value)
    return group


def enter(group: str) -> None:
    """Move this process into a control group; do nothing if `group` is empty."""
    if group:
        with (
            contextlib.suppress(OSError),
            open(os.path.join(group, "main", "cgroup.procs"), "w") as procs,
        ):
            procs.write("0")


def start(order: "JsonObject", folder: str, libc: ctypes.CDLL, group: str, output: int) -> int:
    """Start the command in its own session, and return its pid; raise OSError if that fails."""
    work = os.path.join(folder, "work")
    with contextlib.suppress(OSError):
        os.mkdir(work, 0o700)
    confinement = None
    if order["way"]:  # Not on the path in isolated mode.
        sys.path.append(os.path.dirname(__file__))
        confinement = __import__("confinement")
    seen, written = os.pipe()  # Exec closes it; data means that exec failed.
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        try:
            os.setsid()
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != parent:
                os._exit(1)
            detach(output, written)
            enter(group)
            if order["cpus"]:
                os.sched_setaffinity(0, order["cpus"])
            if order["memory_bytes"]:
                bound_data(0, order["memory_bytes"])
            if confinement is not None:
                confinement.confine(order["way"], order["hidden"], work, signals=False)
            become(order, order["workdir"] or work)
        except BaseException as error:  # noqa: BLE001  # Sent to the parent as text.
            number = error.errno if isinstance(error, OSError) and error.errno else 0
            os.write(
                written, f"{number} {str(error) or type(error).__name__}"[:REASON_MAX].encode()
            )
        finally:
            os._exit(127)
    os.close(written)
    with open(seen, "rb") as pipe:
        failure = pipe.read()
    if failure:
        os.waitpid(child, 0)
        first, _, reason = failure.decode(errors="replace").partition(" ")
        code = int(first)
        raise OSError(code, os.strerror(code) if code else reason)
    return child


def bound_data(pid: int, size: int) -> None:
    """Limit the memory of a process (pid 0: the calling one); raise OSError if that fails.

    The hard limit stays unchanged if possible, since a caller that may not raise hard limits can
    later raise the soft limit again.
    """
    hard = resource.prlimit(pid, resource.RLIMIT_DATA)[1]
    wide = hard == resource.RLIM_INFINITY or hard >= size
    try:
        resource.prlimit(pid, resource.RLIMIT_DATA, (size, hard if wide else size))
    except PermissionError as error:
        who = f"process {pid or os.getpid()}, whose hard limit of {hard >> 20} MiB stays"
        reason = f"the system refuses {size >> 20} MiB to {who}: {os.strerror(errno.EPERM)}"
        raise OSError(f"mem_limit: {reason}") from error


def detach(output: int, written: int) -> None:
    """Reset this process's signals, connect its output, and close all descriptors but `written`."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for ignored in IGNORED:  # A command would inherit ignored signals.
        signal.signal(ignored, signal.SIG_DFL)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    os.closerange(3, written)
    os.closerange(written + 1, 256)


def become(order: "JsonObject", place: str) -> None:
    """Replace this process by the command, in the folder `place`."""
    try:
        os.chdir(place)
    except OSError as error:
        raise ValueError(f"the workdir {place}: {error.strerror}") from error
    command = order["command"]
    os.execvpe(command[0], command, order["environment"])  # noqa: S606  # The user's own command.


def supervise(
    folder: str, order: "JsonObject", child: int, group: str, wanted: "set[signal.Signals]"
) -> "tuple[int, str]":
    """Wait until the command has ended; return its status, and why it was ended, or ""."""
    deadline = None
    status = None
    detail = ""
    while status is None:
        pause = CHECK_SECONDS if deadline is None else max(0.0, deadline - time.monotonic())
        received = signal.sigtimedwait(wanted, min(pause, CHECK_SECONDS))
        ordered = received is not None and received.si_signo == signal.SIGTERM
        ordered = ordered or (order["owner"] is not None and os.getppid() != order["owner"])
        if ordered and deadline is None:
            detail = "stopped"
            deadline = time.monotonic() + order["stop_seconds"]
            signal_group(child, signal.SIGTERM)
        if detail != UNHEARD and unheard(order):
            limit = time.monotonic() + min(order["stop_seconds"], UNHEARD_STOP_SECONDS_MAX)
            if deadline is None:
                signal_group(child, signal.SIGTERM)
            detail, deadline = UNHEARD, min(limit, deadline or limit)
        if deadline is not None and time.monotonic() >= deadline:
            signal_group(child, signal.SIGKILL)
        for pid, ended in reap():
            if pid == child:
                status = ended
        if status is None and received is None and not detail:
            detail = too_large(folder, group)
            if detail:
                kill_all(group)
    return status, detail


def unheard(order: "JsonObject") -> bool:
    """Return whether the agent has had no contact to its server for too long."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        with open(order["heard"], encoding="utf-8") as file:
            heard = json.load(file)
        return bool(time.clock_gettime(time.CLOCK_BOOTTIME) > heard["at"] + heard["seconds"])
    return False


def reap() -> "list[tuple[int, int]]":
    """Reap all child processes that have ended; return them as (pid, status)."""
    ended = []
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            ended.append((pid, status))
    return ended


def kill_rest(group: str) -> None:
    """Kill the command's remaining processes: descendants of this process, and group members.

    Then remove the group. If processes are blocked in the kernel, the group stays, and the stop of
    the workload tries again.
    """
    deadline = time.monotonic() + KILL_SECONDS_MAX
    while time.monotonic() < deadline and kill_all(group):
        signal.sigtimedwait({signal.SIGCHLD}, 0.05)
        reap()
    for folder, _, _ in os.walk(group, topdown=False) if group else ():
        with contextlib.suppress(OSError):
            os.rmdir(folder)


def kill_all(group: str) -> bool:
    """Kill all processes of the workload; return whether one was alive."""
    found = {*descendants(), *members(group)}
    if group and found:
        with contextlib.suppress(OSError), open(os.path.join(group, "cgroup.kill"), "w") as file:
            file.write("1")
    for pid in found:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    return bool(found)


def members(group: str) -> "list[int]":
    """Return the pids of all processes in a control group and in the groups below it."""
    found = []
    for folder, _, _ in os.walk(group) if group else ():
        with contextlib.suppress(OSError), open(os.path.join(folder, "cgroup.procs")) as file:
            found += [int(line) for line in file]
    return found


def too_large(folder: str, group: str) -> str:
    """Return a message if a workload exceeded its memory limit, else "".

    The limit is read each time, since it may change. The first sum counts shared memory once per
    process; only if it exceeds the limit, the exact sum is computed, which is slower.
    """
    with contextlib.suppress(OSError, ValueError):
        with open(os.path.join(folder, "order.json"), encoding="utf-8") as file:
            limit = json.load(file)["memory_bytes"]
        if limit:
            pids = {*descendants(), *members(group)}
            if sum(memory(pid, "status", ("RssAnon", "RssShmem")) for pid in pids) > limit:
                used = sum(memory(pid, "smaps_rollup", ("Pss_Anon", "Pss_Shmem")) for pid in pids)
                if used > limit:
                    return (
                        f"it was killed: its processes used {used >> 20} MiB of memory together, "
                        f"and its mem_limit is {limit >> 20} MiB"
                    )
    return ""


def memory(pid: int, name: str, fields: "tuple[str, ...]") -> int:
    """Return the sum of some fields of a file in /proc/PID, in bytes."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/{name}") as file:
        split = (line.partition(":") for line in file)
        return sum(int(value.split()[0]) << 10 for field, _, value in split if field in fields)
    return 0


def memory_kill_message(group: str) -> str:
    """Return a message if the kernel killed the workload at its group's memory limit, else ""."""
    if group:
        with (
            contextlib.suppress(OSError, ValueError),
            open(os.path.join(group, "memory.events")) as events,
            open(os.path.join(group, "memory.max")) as limit,
        ):
            counts = dict(line.split() for line in events)
            if int(counts.get("oom_kill", 0)):
                return (
                    "it was killed: its processes used more memory together than its mem_limit "
                    f"of {int(limit.read()) >> 20} MiB"
                )
    return ""


def descendants() -> "list[int]":
    """Return the pids of all descendants of this process."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                parent = int(file.read().rpartition(b")")[2].split()[1])
                children.setdefault(parent, []).append(int(name))
    found = []
    todo = [os.getpid()]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


def signal_group(child: int, number: int) -> None:
    """Send a signal to the command's whole process group, which the command leads."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child, number)


class Output:
    """The file of the command's output, of limited size: a full file loses its older half."""

    def __init__(self, path: str, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.file = None
        self.size = 0
        self.over = _thread.allocate_lock()
        self.taking = _thread.allocate_lock()
        self.source = -1
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with contextlib.suppress(OSError):  # Without a file, output is dropped.
            opened = os.open(path, flags, 0o600)
            seen = os.fstat(opened)
            if stat.S_ISREG(seen.st_mode):
                self.file, self.size = opened, seen.st_size

    def follow(self, source: int) -> None:
        """Start a thread that copies a pipe into the file until the pipe has no writer."""
        self.over.acquire()
        self.source = source
        _thread.start_new_thread(self.take_all, (source,))

    def complete(self) -> None:
        """Wait until the output is in the file, even if other processes hold the pipe open."""
        more = waiting_for(self.source)
        for _ in range(OUTPUT_TRIES_MAX):
            if self.over.acquire(timeout=OUTPUT_SECONDS_MAX):
                return
            with self.taking:  # All output read so far is in the file.
                if not more.poll(0):
                    return

    def take_all(self, source: int) -> None:
        """Copy the pipe into the file until the pipe has no writer; runs in `follow`'s thread."""
        more, data = waiting_for(source), b" "
        while data:
            more.poll()
            with self.taking:
                data = os.read(source, CHUNK_BYTES)
                with contextlib.suppress(OSError):  # E.g. the disk is full.
                    self.take(data)
        self.over.release()

    def take(self, data: bytes) -> None:
        """Append a piece of output to the file."""
        if self.file is None:
            return
        if self.size + len(data) > self.bytes_max:
            self.drop_older()
        while data:
            written = os.pwrite(self.file, data, self.size)
            self.size += written
            data = data[written:]

    def drop_older(self) -> None:
        """Shorten the file to its last bytes: half of `bytes_max`."""
        assert self.file is not None
        size_left = min(self.size, self.bytes_max // 2)
        for done in range(0, size_left, CHUNK_BYTES):
            piece = os.pread(
                self.file, min(CHUNK_BYTES, size_left - done), self.size - size_left + done
            )
            os.pwrite(self.file, piece, done)
        os.ftruncate(self.file, size_left)
        self.size = size_left


def waiting_for(source: int) -> "select.poll":
    """Return a new poll object that waits for input from a pipe; threads may not share it."""
    more = select.poll()
    more.register(source, select.POLLIN)
    return more


def finish(folder: str, code: "int | None", detail: str, *, started: bool = True) -> None:
    """Write the workload's end into `exit.json`. A negative code is a signal's number."""
    ended = {"code": code, "detail": detail, "started": started}
    with contextlib.suppress(OSError):  # The folder may be gone.
        write(os.path.join(folder, "exit.json"), ended)


def write(path: "str | os.PathLike[str]", document: "JsonMapping") -> None:
    """Write a file atomically, and sync it to the disk."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(f"{path}.new")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    with open(os.open(f"{path}.new", flags, 0o600), "w", encoding="utf-8") as file:
        json.dump(document, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(f"{path}.new", path)


def report(pipe: int, document: "JsonObject") -> None:
    """Send a report to the process that started this supervisor, if it still listens."""
    with contextlib.suppress(OSError):
        os.write(pipe, json.dumps(document).encode() + b"\n")
        os.close(pipe)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
