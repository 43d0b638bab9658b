"""The system calls of a cell, as a seccomp filter assembled by hand. Only `jail` calls this module.

The filter has three answers. A call that a cell needs is allowed, some only with harmless
arguments. A call that innocent code attempts (`open`, `socket`, starting a thread) fails with
EPERM, which Python shows as a readable PermissionError. A call that innocent code never makes ends
the process.

The tables are the kernel's: `arch/x86/entry/syscalls/syscall_64.tbl` and, for aarch64,
`include/uapi/asm-generic/unistd.h`. The aarch64 table has not been run on such a machine.
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

CHANNEL_FD: Final = 3
"""The one descriptor of a cell besides /dev/null on 0 to 2."""

_RET_ALLOW: Final = 0x7FFF0000
_RET_EPERM: Final = 0x00050000 | 1
_RET_KILL_PROCESS: Final = 0x80000000

_LOAD: Final = 0x20  # BPF_LD | BPF_W | BPF_ABS
_JUMP_EQUAL: Final = 0x15
_JUMP_AT_LEAST: Final = 0x35
_JUMP_ABOVE: Final = 0x25
_JUMP_ANY_BIT: Final = 0x45
_RETURN: Final = 0x06

_OFFSET_NUMBER: Final = 0
_OFFSET_ARCHITECTURE: Final = 4
_PROT_EXEC: Final = 0x4
_MAP_HUGETLB: Final = 0x40000
_X32_BIT: Final = 0x40000000
_OTHERS_CLOCK: Final = 0x80000000
"""Clock ids from here on are CPU clocks of processes, by number (see clock_getcpuclockid(3))."""
_BY_CLOCK: Final = frozenset({"clock_gettime", "clock_getres", "clock_nanosleep"})
_BY_PROCESS: Final = frozenset({"sched_getaffinity"})


def _argument(number: int) -> int:
    """Return the offset of the low half of an argument (both machines are little-endian)."""
    return 16 + 8 * number


@dataclass(frozen=True, slots=True)
class Machine:
    """The system calls of one architecture, by the filter's answer.

    Args:
        audit: The kernel's AUDIT_ARCH value; another value in a call means another ABI.
        x32: Whether calls with bit 30 set belong to a second ABI, which must be refused.
        on_channel: read and write: allowed on descriptors 0 to 3.
        mapping: mmap: allowed without PROT_EXEC and huge pages.
        protecting: mprotect: allowed without PROT_EXEC.
        allowed: Calls that a cell needs, or that reveal nothing. Those in `_BY_CLOCK` and
            `_BY_PROCESS` would tell a cell which other processes run and how busy they are: these
            calls are allowed on the system's clocks and on the caller itself.
        deadly: Calls that innocent code never makes.
    """

    audit: int
    x32: bool
    on_channel: Mapping[str, int]
    mapping: int
    protecting: int
    allowed: Mapping[str, int]
    deadly: Mapping[str, int]


MACHINES: Final[Mapping[str, Machine]] = {
    "x86_64": Machine(
        audit=0xC000003E,
        x32=True,
        on_channel={"read": 0, "write": 1},
        mapping=9,
        protecting=10,
        allowed={
            "munmap": 11, "brk": 12, "mremap": 25, "madvise": 28, "futex": 202,
            "getrandom": 318, "clock_gettime": 228, "clock_getres": 229,
            "clock_nanosleep": 230, "nanosleep": 35, "gettimeofday": 96, "time": 201,
            "rt_sigaction": 13, "rt_sigprocmask": 14, "rt_sigreturn": 15, "sigaltstack": 131,
            "restart_syscall": 219, "sched_yield": 24, "sched_getaffinity": 204,
            "getpid": 39, "gettid": 186, "getppid": 110, "getuid": 102, "geteuid": 107,
            "getgid": 104, "getegid": 108, "getrusage": 98, "times": 100, "uname": 63,
            "exit": 60, "exit_group": 231,
        },
        deadly={
            "execve": 59, "execveat": 322, "ptrace": 101, "process_vm_readv": 310,
            "process_vm_writev": 311, "process_madvise": 440, "kcmp": 312, "pidfd_getfd": 438,
            "pidfd_open": 434, "pidfd_send_signal": 424, "rt_sigqueueinfo": 129,
            "rt_tgsigqueueinfo": 297, "io_uring_setup": 425, "io_uring_enter": 426,
            "io_uring_register": 427, "io_setup": 206, "bpf": 321, "userfaultfd": 323,
            "perf_event_open": 298, "add_key": 248, "request_key": 249, "keyctl": 250,
            "unshare": 272, "setns": 308, "mount": 165, "umount2": 166, "pivot_root": 155,
            "chroot": 161, "open_tree": 428, "move_mount": 429, "fsopen": 430, "fsmount": 432,
            "open_by_handle_at": 304, "name_to_handle_at": 303, "memfd_create": 319,
            "memfd_secret": 447, "seccomp": 317, "personality": 135, "modify_ldt": 154,
            "arch_prctl": 158, "set_thread_area": 205, "ioperm": 173, "iopl": 172,
            "pkey_mprotect": 329, "remap_file_pages": 216, "splice": 275, "tee": 276,
            "vmsplice": 278, "shmget": 29, "shmat": 30, "semget": 64, "msgget": 68,
            "mq_open": 240, "init_module": 175, "finit_module": 313, "delete_module": 176,
            "kexec_load": 246, "kexec_file_load": 320, "reboot": 169, "swapon": 167,
            "swapoff": 168, "acct": 163, "settimeofday": 164, "clock_settime": 227,
            "sethostname": 170, "fanotify_init": 300, "vhangup": 153,
        },
    ),
    "aarch64": Machine(
        audit=0xC00000B7,
        x32=False,
        on_channel={"read": 63, "write": 64},
        mapping=222,
        protecting=226,
        allowed={
            "munmap": 215, "brk": 214, "mremap": 216, "madvise": 233, "futex": 98,
            "getrandom": 278, "clock_gettime": 113, "clock_getres": 114,
            "clock_nanosleep": 115, "nanosleep": 101, "gettimeofday": 169,
            "rt_sigaction": 134, "rt_sigprocmask": 135, "rt_sigreturn": 139,
            "sigaltstack": 132, "restart_syscall": 128, "sched_yield": 124,
            "sched_getaffinity": 123, "getpid": 172, "gettid": 178, "getppid": 173,
            "getuid": 174, "geteuid": 175, "getgid": 176, "getegid": 177, "getrusage": 165,
            "times": 153, "uname": 160, "exit": 93, "exit_group": 94,
        },
        deadly={
            "execve": 221, "execveat": 281, "ptrace": 117, "process_vm_readv": 270,
            "process_vm_writev": 271, "process_madvise": 440, "kcmp": 272, "pidfd_getfd": 438,
            "pidfd_open": 434, "pidfd_send_signal": 424, "rt_sigqueueinfo": 138,
            "rt_tgsigqueueinfo": 240, "io_uring_setup": 425, "io_uring_enter": 426,
            "io_uring_register": 427, "io_setup": 0, "bpf": 280, "userfaultfd": 282,
            "perf_event_open": 241, "add_key": 217, "request_key": 218, "keyctl": 219,
            "unshare": 97, "setns": 268, "mount": 40, "umount2": 39, "pivot_root": 41,
            "chroot": 51, "open_tree": 428, "move_mount": 429, "fsopen": 430, "fsmount": 432,
            "open_by_handle_at": 265, "name_to_handle_at": 264, "memfd_create": 279,
            "memfd_secret": 447, "seccomp": 277, "personality": 92, "pkey_mprotect": 288,
            "remap_file_pages": 234, "splice": 76, "tee": 77, "vmsplice": 75, "shmget": 194,
            "shmat": 196, "semget": 190, "msgget": 186, "mq_open": 180, "init_module": 105,
            "finit_module": 273, "delete_module": 106, "kexec_load": 104,
            "kexec_file_load": 294, "reboot": 142, "swapon": 224, "swapoff": 225, "acct": 89,
            "settimeofday": 170, "clock_settime": 112, "sethostname": 161,
            "fanotify_init": 262, "vhangup": 58,
        },
    ),
}  # fmt: skip


def assemble(machine: Machine) -> bytes:
    """Return the filter for `machine` as an array of `struct sock_filter`.

    Every rule is "equal? then this verdict, else skip it", so no jump is longer than a rule and the
    program can be read from top to bottom. The calls of every evaluation come first.
    """
    code: list[tuple[int, int, int, int]] = []

    def emit(operation: int, value: int, if_true: int = 0, if_false: int = 0) -> None:
        code.append((operation, if_true, if_false, value))

    def verdict(number: int, answer: int) -> None:
        emit(_JUMP_EQUAL, number, 0, 1)
        emit(_RETURN, answer)

    emit(_LOAD, _OFFSET_ARCHITECTURE)
    emit(_JUMP_EQUAL, machine.audit, 1, 0)
    emit(_RETURN, _RET_KILL_PROCESS)
    emit(_LOAD, _OFFSET_NUMBER)
    if machine.x32:
        emit(_JUMP_AT_LEAST, _X32_BIT, 0, 1)
        emit(_RETURN, _RET_KILL_PROCESS)
    for number in machine.on_channel.values():
        # The kernel reads a descriptor as 32 bits, so the low half is the whole truth.
        emit(_JUMP_EQUAL, number, 0, 4)
        emit(_LOAD, _argument(0))
        emit(_JUMP_ABOVE, CHANNEL_FD, 0, 1)
        emit(_RETURN, _RET_EPERM)
        emit(_RETURN, _RET_ALLOW)
    emit(_JUMP_EQUAL, machine.mapping, 0, 6)
    emit(_LOAD, _argument(2))
    emit(_JUMP_ANY_BIT, _PROT_EXEC, 2, 0)
    emit(_LOAD, _argument(3))
    emit(_JUMP_ANY_BIT, _MAP_HUGETLB, 0, 1)
    emit(_RETURN, _RET_EPERM)
    emit(_RETURN, _RET_ALLOW)
    emit(_JUMP_EQUAL, machine.protecting, 0, 4)
    emit(_LOAD, _argument(2))
    emit(_JUMP_ANY_BIT, _PROT_EXEC, 0, 1)
    emit(_RETURN, _RET_EPERM)
    emit(_RETURN, _RET_ALLOW)
    for name, number in machine.allowed.items():
        if name in _BY_CLOCK:
            emit(_JUMP_EQUAL, number, 0, 4)
            emit(_LOAD, _argument(0))
            emit(_JUMP_AT_LEAST, _OTHERS_CLOCK, 0, 1)
            emit(_RETURN, _RET_EPERM)
            emit(_RETURN, _RET_ALLOW)
        elif name in _BY_PROCESS:
            emit(_JUMP_EQUAL, number, 0, 4)
            emit(_LOAD, _argument(0))
            emit(_JUMP_EQUAL, 0, 0, 1)
            emit(_RETURN, _RET_ALLOW)
            emit(_RETURN, _RET_EPERM)
        else:
            verdict(number, _RET_ALLOW)
    for number in machine.deadly.values():
        verdict(number, _RET_KILL_PROCESS)
    emit(_RETURN, _RET_EPERM)
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in code)
