"""The jail of a cell: rlimits, an unprivileged user, Landlock and the seccomp filter.

The zygote calls `lock_down` in each fresh fork, before any policy source exists in the process.
Every step is one-way. seccomp is the wall; the other layers help if the wall has a hole.
"""

import ctypes
import os
import platform
import resource
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from moorage.sandbox.cell import syscalls

NOBODY: Final = 65534
"""Id of the user and the group of a cell, where the server may choose them."""
PURGED: Final = (
    "ctypes",
    "ctypes._endian",
    "_ctypes",
    "socket",
    "_socket",
    "select",
    "selectors",
    "fcntl",
    "mmap",
)
"""Modules that are removed from a cell, to leave an attacker less; they are not a boundary."""

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP = 1, 4, 22
_PR_SET_NO_NEW_PRIVS, _PR_SET_MDWE, _PR_CAPBSET_DROP = 38, 65, 24
_MDWE_REFUSE_EXEC_GAIN: Final = 1
_SECCOMP_MODE_FILTER: Final = 2
_LANDLOCK_CREATE, _LANDLOCK_RESTRICT = 444, 446
_CAPSET: Final = {"x86_64": 126, "aarch64": 91}
_CAPABILITY_VERSION: Final = 0x20080522
_KILL, _SETGID, _SETUID, _SYS_NICE = 5, 6, 7, 23
_MIB: Final = 1 << 20
# Rights known to each Landlock ABI: files (cumulative bits), TCP bind and connect, scopes.
_FILE_BITS: Final = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
_TCP_SINCE, _SCOPE_SINCE = 4, 6


class LockDownError(Exception):
    """A required layer of the jail could not be applied."""

    def __init__(self, layer: str, reason: str) -> None:
        super().__init__(f"{layer}: {reason}")
        self.layer = layer
        self.reason = reason


@dataclass(frozen=True, slots=True)
class JailPlan:
    """The choices that the zygote makes for all its cells.

    Args:
        unsafe: Whether to leave out Landlock, the user change and seccomp.
        memory_mib: Address space on top of what the fork starts with.
        cpu_seconds: The limit of a cell's CPU time (RLIMIT_CPU).
        parent: Process id of the zygote, to notice that it died before PDEATHSIG was set.
    """

    unsafe: bool
    memory_mib: int
    cpu_seconds: int
    parent: int


_libc: Any = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


class _RulesetAttribute(ctypes.Structure):
    _fields_ = (
        ("files", ctypes.c_uint64),
        ("network", ctypes.c_uint64),
        ("scoped", ctypes.c_uint64),
    )


def system_call(number: int, *arguments: object) -> int:
    """Make a raw system call (for the lock-down and the self-test) and return its result.

    Raises:
        OSError: The kernel refused the call.
    """
    widened = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    result = int(_libc.syscall(ctypes.c_long(number), *widened))
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def _prctl(option: int, *arguments: object) -> None:
    filled = [ctypes.c_ulong(a) if isinstance(a, int) else a for a in arguments]
    filled += [ctypes.c_ulong(0)] * (4 - len(filled))
    if _libc.prctl(option, *filled) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def die_with_parent(parent: int) -> None:
    """Make the kernel kill this process when its parent dies; end it now if the parent is dead.

    The signal follows the parent *thread*, and a change of user clears it. So call this after that
    change; the parent's thread must stay alive.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def hide() -> None:
    """Make this process non-dumpable: other processes of its user cannot read or trace it."""
    _prctl(_PR_SET_DUMPABLE, 0)


def lock_down(plan: JailPlan) -> dict[str, str]:
    """Apply every layer to the calling process; return the names of the applied layers.

    Raises:
        LockDownError: A layer without which no policy may run could not be applied.
    """
    layers: dict[str, str] = {}
    _attempt(layers, "oom_score", _raise_oom_score)
    _limit_resources(plan, layers)
    if not plan.unsafe:
        _drop_privileges(layers)
    die_with_parent(plan.parent)
    hide()
    layers["hidden"] = "non-dumpable, dies with its parent"
    try:
        _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    except OSError as error:
        raise LockDownError("no_new_privs", str(error)) from error
    layers["no_new_privs"] = "set"
    if plan.unsafe:
        return layers
    _attempt(layers, "mdwe", _refuse_exec_gain)
    _attempt(layers, "landlock", _landlock)
    layers["seccomp"] = _seccomp()
    return layers


def hide_tools() -> None:
    """Remove the functions that build the jail from every module except this one.

    Done once in the zygote: a fork that walks through all modules copies all their pages.
    """
    for name, module in list(sys.modules.items()):
        if name != __name__ and vars(module).get("ctypes") is ctypes:
            module.ctypes = None  # type: ignore[attr-defined]  # numpy has its own reference.


def forget_tools() -> None:
    """Make the functions that build the jail unreachable for the policy's code."""
    for name in PURGED:
        sys.modules.pop(name, None)
    for name in ("ctypes", "_libc", "_Program", "_RulesetAttribute"):
        globals().pop(name, None)


def _attempt(layers: dict[str, str], name: str, put_up: Callable[[], str]) -> None:
    """Apply a layer that this machine may lack; the report then omits the layer."""
    try:
        layers[name] = put_up()
    except OSError:
        return


def _raise_oom_score() -> str:
    # Files of a non-dumpable process belong to root, so the process is dumpable for this write.
    _prctl(_PR_SET_DUMPABLE, 1)
    with open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:  # noqa: PTH123  # pathlib costs each fork more.
        file.write("1000")
    return "1000"


def _limit_resources(plan: JailPlan, layers: dict[str, str]) -> None:
    with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123  # As above.
        mapped = int(file.read().split()[0]) * resource.getpagesize()
    limits = {
        resource.RLIMIT_AS: mapped + plan.memory_mib * _MIB,
        resource.RLIMIT_CPU: plan.cpu_seconds,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_SIGPENDING: 0,
        resource.RLIMIT_NPROC: 0,
    }
    try:
        for kind, value in limits.items():
            resource.setrlimit(kind, (value, value))
    except (OSError, ValueError) as error:
        if not plan.unsafe:
            raise LockDownError("rlimits", str(error)) from error
        return
    layers["rlimits"] = f"{plan.memory_mib} MiB on top of {mapped // _MIB}, no files, no children"


def _drop_privileges(layers: dict[str, str]) -> None:
    """Drop all capabilities; become user 65534 if the host may still signal the process.

    The host must still be able to signal and demote the cell. Without the capabilities to do so for
    another user, the cell keeps the server's user.
    """
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:  # noqa: PTH123  # As above.
        effective = next(int(line.split()[1], 16) for line in file if line.startswith("CapEff"))
    if all(effective >> bit & 1 for bit in (_KILL, _SETGID, _SETUID, _SYS_NICE)):
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    none = (ctypes.c_uint32 * 6)()
    system_call(_CAPSET[platform.machine()], header, none)
    layers["user"] = f"uid {os.getuid()}, no capabilities"


def _refuse_exec_gain() -> str:
    _prctl(_PR_SET_MDWE, _MDWE_REFUSE_EXEC_GAIN)
    return "memory never becomes executable"


def _landlock() -> str:
    """Deny every file and TCP port, and outside signals and abstract sockets if possible."""
    abi = system_call(_LANDLOCK_CREATE, None, 0, 1)
    attribute = _RulesetAttribute(files=(1 << _FILE_BITS.get(abi, 16)) - 1)
    size = 8
    if abi >= _TCP_SINCE:
        attribute.network, size = 0b11, 16
    if abi >= _SCOPE_SINCE:
        attribute.scoped, size = 0b11, 24
    ruleset = system_call(_LANDLOCK_CREATE, ctypes.byref(attribute), size, 0)
    try:
        system_call(_LANDLOCK_RESTRICT, ruleset, 0)
    finally:
        os.close(ruleset)
    return f"abi {abi}: no files, no TCP" + (", no signals out" if abi >= _SCOPE_SINCE else "")


def _seccomp() -> str:
    """Install the filter as the last step, since the filter forbids its own installation.

    Landlock needed a descriptor, so only now is the number of descriptors limited to none.
    """
    machine = syscalls.MACHINES.get(platform.machine())
    if machine is None:
        known = ", ".join(syscalls.MACHINES)
        found = platform.machine()
        raise LockDownError("seccomp", f"this release supports {known}, but not {found!r}")
    code = syscalls.assemble(machine)
    buffer = ctypes.create_string_buffer(code, len(code))
    program = _Program(len(code) // 8, ctypes.cast(buffer, ctypes.c_void_p))
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))
    try:
        _prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program))
    except OSError as error:
        raise LockDownError("seccomp", str(error)) from error
    return f"filter, {len(code) // 8} instructions"
