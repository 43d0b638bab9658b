"""The attacks by which the host tests its own jail before it serves requests.

`attack` runs in a jailed cell that holds no policy yet; `REFUSED` and `DEADLY` tell the host what
to expect. If the cell can, for example, read a file that any process may read, open a socket or
fork, the server does not start.
"""

import mmap
import os
import platform
import signal
import socket
from collections.abc import Callable, Mapping
from typing import Final

from moorage.sandbox.cell import jail, syscalls

DEADLY: Final = (
    "ptrace", "execve", "io_uring_setup", "bpf", "unshare", "memfd_create", "process_vm_readv",
    "pidfd_open", "keyctl", "userfaultfd", "x32",
)  # fmt: skip
"""Attacks at which the kernel must end the attacking cell."""


def attack(name: str) -> str:
    """Try one attack; return `refused: …` or `BREACH: …`, unless the kernel kills the process."""
    try:
        result = _ATTEMPTS[name]() if name in _ATTEMPTS else _raw(name)
    except (OSError, RuntimeError, ValueError) as error:
        # RuntimeError is how Python reports that a thread could not be started.
        return f"refused: {type(error).__name__}"
    return f"BREACH: {name} returned {result!r}"


def _raw(name: str) -> object:
    """Make a forbidden system call without arguments; a kernel that lacks the call refuses, too."""
    machine = syscalls.MACHINES[platform.machine()]
    if name == "x32":
        if not machine.x32:
            os.kill(os.getpid(), signal.SIGKILL)
            os._exit(0)
        return jail.system_call(0x40000000 + 39)
    return jail.system_call(machine.deadly[name], 0, 0, 0, 0, 0)


def _fork() -> int:
    child = os.fork()
    if child == 0:
        os._exit(0)
    return child


def _thread() -> int:
    import _thread  # noqa: PLC0415  # Only this attack needs it.

    return _thread.start_new_thread(lambda: None, ())


def _open(path: str, flags: int = os.O_RDONLY) -> int:
    return os.open(path, flags)


def _executable_page() -> object:
    return mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)


def _make_page_executable() -> int:
    import ctypes  # noqa: PLC0415  # Gone once a policy is loaded.

    page = mmap.mmap(-1, 4096)
    address = ctypes.addressof(ctypes.c_char.from_buffer(page))
    machine = syscalls.MACHINES[platform.machine()]
    return jail.system_call(machine.protecting, address, 4096, 0x5)


def _set_limit(name: str) -> None:
    import resource  # noqa: PLC0415  # Only these attacks need it.

    resource.setrlimit(getattr(resource, name), (1 << 40, 1 << 40))


_ATTEMPTS: Final[Mapping[str, Callable[[], object]]] = {
    "open": lambda: _open("/etc/passwd"),
    "list": lambda: os.listdir("/"),  # noqa: PTH208  # The bare system call.
    "write": lambda: _open("/tmp/moorage-breach", os.O_CREAT | os.O_WRONLY),  # noqa: S108  # Must fail.
    "environ": lambda: _open("/proc/self/environ"),
    "socket": lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM),
    "unix_socket": lambda: socket.socket(socket.AF_UNIX, socket.SOCK_STREAM),
    "fork": _fork,
    "thread": _thread,
    "kill_parent": lambda: os.kill(os.getppid(), 0),
    "kill_all": lambda: os.kill(-1, 0),
    "exec_memory": _executable_page,
    "exec_protect": _make_page_executable,
    "more_files": lambda: _set_limit("RLIMIT_NOFILE"),
    "more_memory": lambda: _set_limit("RLIMIT_AS"),
    "priority": lambda: os.setpriority(os.PRIO_PROCESS, 0, -20),
    "other_channel": lambda: os.read(syscalls.CHANNEL_FD + 1, 1),
}
REFUSED: Final = tuple(_ATTEMPTS)
"""Attacks that must fail with an error; the attacking cell keeps running."""
