"""Hides the daemon's data folder from workloads, which run as the same user as the daemon.

The supervisor calls `confine` in the child process that becomes a workload. The daemon calls it in
the child that becomes a command beside a workload. A `Confinement` has the method, which `find` has
tested. The supervisor may use only the standard library, so this module does, too.

Landlock can only allow paths, not forbid them, so this module has two methods:

- `mounts`, as root: an empty folder is mounted over the data folder, for the workload alone. The
  workload cannot mount or unmount anything, so it cannot undo this.
- `siblings`, for other users: all siblings of the data folder, and of each of its parent folders,
  are allowed. Later files directly in these parents are not, so a confined process cannot create
  any there. A confined process can list the data folder, but open nothing in the folder.

With either method, a confined process cannot inspect an unconfined one: its memory, variables or
root. On kernels from 6.12 on, a workload cannot signal an unconfined process either.
"""

import ctypes
import os
import stat
import sys

TYPE_CHECKING = False  # To import `typing` would take longer than all the rest.
if TYPE_CHECKING:
    from typing import Any

CREATE, ADD, RESTRICT = 444, 445, 446
"""Numbers of Landlock's system calls; they are the same on all architectures."""
FILES = {2: 14, 3: 15, 4: 15, 5: 16}
"""Number of file rights in each version of Landlock. Version 1 is missing: it forbids renames."""
FILES_SINCE, SIGNALS_SINCE = 2, 6
SCOPE_SIGNAL = 1 << 1
ABOUT_ONE_FILE = 0b1100_0000_0000_0111
"""Landlock rights that apply to plain files: execute, write, read, truncate, device control."""
LIST = 1 << 3
"""Landlock's right to list a folder. It is not restricted: programs list parents of `hidden`."""
NO_NEW_PRIVILEGES = 38
NEW_MOUNTS = 0x20000
READ_ONLY, NO_SETUID, NO_DEVICES, REMOUNT, BIND, RECURSIVE, SLAVE = (
    1,
    2,
    4,
    32,
    4096,
    16384,
    1 << 19,
)
SYS_ADMIN = 21
TRIAL_SECONDS_MAX = 30.0

libc: "Any" = ctypes.CDLL(None, use_errno=True)


class Confinement:
    """A folder that is hidden from workloads, and the method that hides it.

    Args:
        hidden: The folder, without links in its path.
        way: `mounts` or `siblings`; empty if nothing is hidden.
        detail: A sentence about the method, or the reason why no method works.
    """

    def __init__(self, hidden: str = "", way: str = "", detail: str = "") -> None:
        self.hidden = hidden
        self.way = way
        self.detail = detail

    def environment(self, variables: "dict[str, str]", work: str) -> "dict[str, str]":
        """Return variables in which HOME and TMPDIR are `work` if their folders are hidden."""
        named = dict(variables)
        if self.way and _leads(self.hidden, named.get("HOME", "")):
            named["HOME"] = work
        if self.way == "siblings" and _leads(named.get("TMPDIR", "/tmp"), self.hidden):  # noqa: S108  # The default of programs.
            named["TMPDIR"] = work
        return named


def find(hidden: str) -> Confinement:
    """Return a method that hides a folder from workloads, after a process has tested the method."""
    import subprocess  # noqa: PLC0415  # Slow to load, and supervisors never need it.

    hidden = os.path.realpath(hidden)
    ways = ("mounts", "siblings") if _is_admin() else ("siblings",)
    cause = ""
    for way in ways:
        command = [sys.executable, "-I", "-S", __file__, way, hidden]
        tried = subprocess.run(  # noqa: S603  # Runs this file.
            command, check=False, capture_output=True, text=True, timeout=TRIAL_SECONDS_MAX
        )
        if tried.returncode == 0:
            return Confinement(hidden, way, _detail(hidden, way))
        cause = tried.stderr.strip().rpartition("\n")[2]
    return Confinement(detail=f"workloads can read and write {hidden}: {cause}")


def confine(way: str, hidden: str, work: str, *, signals: bool) -> None:
    """Hide a folder from the calling process until it ends, except for one folder inside it.

    Args:
        way: `mounts` or `siblings`.
        hidden: The folder to hide.
        work: The workload's folder, which stays visible; it may be inside `hidden`.
        signals: Whether the process may signal unconfined processes.

    Raises:
        OSError: The folder cannot be hidden.
    """
    work = os.path.realpath(work)
    abi = system_call(CREATE, None, 0, 1)
    if abi < FILES_SINCE:
        raise OSError(f"Landlock of this kernel has version {abi}; version 2 is needed")
    rights = ((1 << FILES.get(abi, 16)) - 1) & ~LIST
    scoped = SCOPE_SIGNAL if abi >= SIGNALS_SINCE and not signals else 0
    attribute = (ctypes.c_uint64 * 3)(rights, 0, scoped)
    size = 24 if abi >= SIGNALS_SINCE else 8
    if way == "mounts":
        _cover(hidden, work)
    ruleset = system_call(CREATE, attribute, size, 0)
    try:
        for place in ("/",) if way == "mounts" else _beside(hidden, work):
            _allow(ruleset, place, rights)
        try:
            system_call(RESTRICT, ruleset, 0)
        except PermissionError:  # Other users than root must first give up setuid programs.
            if libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0) != 0:
                raise
            system_call(RESTRICT, ruleset, 0)
    finally:
        os.close(ruleset)


def system_call(number: int, *arguments: "object") -> int:
    """Make a system call; raise OSError if it fails."""
    widened = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    return _check(libc.syscall(ctypes.c_long(number), *widened))


def _check(result: int) -> int:
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def _cover(hidden: str, work: str) -> None:
    """Mount an empty folder over `hidden`, for this process alone; only `work` is visible."""
    _check(libc.unshare(NEW_MOUNTS))
    _mount(None, "/", RECURSIVE | SLAVE)
    folder_fd = os.open(work, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _mount("tmpfs", hidden, NO_SETUID | NO_DEVICES, "tmpfs", "mode=0755")
        if _leads(hidden, work):
            os.makedirs(work)
            _mount(f"/proc/self/fd/{folder_fd}", work, BIND)
        _mount(None, hidden, REMOUNT | BIND | READ_ONLY | NO_SETUID | NO_DEVICES)
    finally:
        os.close(folder_fd)


def _mount(source: "str | None", place: str, flags: int, kind: str = "", data: str = "") -> None:
    texts = [None if not text else os.fsencode(text) for text in (source, place, kind, data)]
    source_, place_, kind_, data_ = texts
    _check(libc.mount(source_, place_, kind_, ctypes.c_ulong(flags), data_))


def _beside(hidden: str, work: str) -> "list[str]":
    """Return `work`, the siblings of `hidden`, and the siblings of its parent folders."""
    found = [work]
    here = "/"
    for part in hidden.strip("/").split("/"):
        found += [os.path.join(here, name) for name in os.listdir(here) if name != part]
        here = os.path.join(here, part)
    return found


def _allow(ruleset: int, place: str, rights: int) -> None:
    """Allow the given rights at a path; do nothing if the path is missing or a link."""
    try:
        opened = os.open(place, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return
    try:
        mode = os.fstat(opened).st_mode
        if not stat.S_ISLNK(mode):
            allowed = rights if stat.S_ISDIR(mode) else rights & ABOUT_ONE_FILE
            # `struct landlock_path_beneath_attr` has no padding.
            policy = allowed.to_bytes(8, sys.byteorder) + opened.to_bytes(4, sys.byteorder)
            system_call(ADD, ruleset, 1, policy, 0)
    finally:
        os.close(opened)


def _leads(folder: str, place: str) -> bool:
    """Return whether the path `place` is `folder`, or is in it."""
    return bool(folder) and f"{place}/".startswith(f"{folder.rstrip('/')}/")


def _is_admin() -> bool:
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        effective = next(int(line.split()[1], 16) for line in file if line.startswith("CapEff"))
    return bool(effective >> SYS_ADMIN & 1)


def _detail(hidden: str, way: str) -> str:
    if way == "mounts":
        return f"processes see an empty folder instead of {hidden}, and cannot mount anything"
    above = [hidden[:end] or "/" for end in range(len(hidden)) if hidden[end] == "/"]
    closed = ", ".join(each for each in above if os.access(each, os.W_OK))
    detail = f"Landlock keeps processes from opening what is in {hidden}"
    return f"{detail}; they cannot create anything directly in {closed}" if closed else detail


def main(way: str, hidden: str) -> int:
    """Test a method in this process; return the exit status: 0 if the method hides the folder."""
    confine(way, hidden, "/dev", signals=False)
    trial = os.path.join(hidden, f".trial-{os.getpid()}")
    try:
        os.close(os.open(trial, os.O_WRONLY | os.O_CREAT, 0o600))
    except OSError:
        return 0
    os.unlink(trial)
    sys.stderr.write("a test process could still read it\n")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2]))
