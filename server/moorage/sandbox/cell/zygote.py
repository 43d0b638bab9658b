"""The process from which cells are forked: all imports are done; it has no secrets or threads.

The host starts it (`sandbox.host.zygote.Zygote`) with an empty environment and speaks to it over a
SEQPACKET
socket: a spawn order comes in, the host's end of a new channel and a pidfd go out. Forking from
here and never from the server is what keeps tokens and client objects out of every cell.
"""

import contextlib
import faulthandler
import gc
import json
import os
import resource
import signal
import socket
import sys
from typing import NoReturn

from moorage.sandbox.cell import jail, preload, worker
from moorage.sandbox.cell.syscalls import CHANNEL_FD
from moorage.sandbox.wire.orders import ORDER, REPORT, WHERE_SIGNAL


def main() -> NoReturn:
    """Serve spawn orders until the host goes away."""
    settings = json.loads(sys.argv[1])
    control = socket.socket(fileno=settings["control"])
    jail.die_with_parent(settings["host"])
    jail.hide()
    preload.preload()
    jail.hide_tools()
    sys.path[:] = []
    sys.path_importer_cache.clear()
    plan = jail.JailPlan(
        unsafe=settings["unsafe"],
        memory_mib=settings["memory_mib"],
        cpu_seconds=settings["cpu_seconds"],
        parent=os.getpid(),
    )
    os.environ.clear()
    sys.argv[:] = sys.orig_argv[:] = [""]
    gc.collect()
    gc.freeze()  # Forks then never write to these pages, so all cells share them.
    gc.enable()  # Off until here: no imported object is garbage.
    null = os.open(os.devnull, os.O_RDWR)
    start_kib = _private_kib()
    signal.signal(signal.SIGCHLD, lambda _signal, _frame: _reap(control, start_kib))
    with contextlib.suppress(ConnectionError):  # If the host is gone, no order comes.
        control.send(REPORT.pack(b"Z", 0, os.getpid(), 0, 0, 0))
    while True:
        try:
            order = control.recv(ORDER.size + 1)
        except ConnectionError:
            order = b""  # The host closed the socket and left reports unread.
        if len(order) != ORDER.size:
            os._exit(0)  # The host closed its end; the cells die with this process.
        _spawn(control, int(ORDER.unpack(order)[0]), plan, null)


def _spawn(control: socket.socket, order: int, plan: jail.JailPlan, null: int) -> None:
    ours, theirs = socket.socketpair()
    # A cell that died before its pidfd was taken must stay a zombie: its number would be reused.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    try:
        child = os.fork()
        if child == 0:
            _become_cell(theirs.fileno(), plan, null)
        pidfd = os.pidfd_open(child)
        report = REPORT.pack(b"R", order, child, 0, 0, 0)
        try:
            socket.send_fds(control, [report], [ours.fileno(), pidfd])
        finally:
            os.close(pidfd)
    except ConnectionError:
        os._exit(0)  # The host closed its end, as above.
    except OSError as error:
        control.send(REPORT.pack(b"E", order, error.errno or 0, 0, 0, 0))
    finally:
        ours.close()
        theirs.close()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})


def _become_cell(channel: int, plan: jail.JailPlan, null: int) -> NoReturn:
    """Turn this fork into a cell: close all but /dev/null and the channel, then enter the jail."""
    status = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        # The channel may already be one of 0 to 3, so it is moved out of the way first.
        safe = os.dup(channel) if channel <= CHANNEL_FD else channel
        for number in range(CHANNEL_FD):
            os.dup2(null, number)
        os.dup2(safe, CHANNEL_FD)
        os.closerange(CHANNEL_FD + 1, 1 << 30)
        # The host sends this signal once, before it kills: the plain text ends the channel.
        faulthandler.register(WHERE_SIGNAL, file=CHANNEL_FD, all_threads=False)
        worker.live(plan)
        status = 0
    finally:
        os._exit(status)


def _private_kib() -> int:
    """Return the KiB of this process's anonymous memory, which each fork inherits."""
    with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123  # As in `jail`.
        _, resident, shared, *_ = map(int, file.read().split())
    return (resident - shared) * resource.getpagesize() >> 10


def _reap(control: socket.socket, start_kib: int) -> None:
    """Collect ended cells, and report to the host how they ended."""
    with contextlib.suppress(ChildProcessError):
        while True:
            child, status, used = os.wait4(-1, os.WNOHANG)
            if child == 0:
                return
            held_kib = max(0, used.ru_maxrss - start_kib)
            cpu_ms = round((used.ru_utime + used.ru_stime) * 1000)
            try:
                control.send(REPORT.pack(b"X", 0, child, status, held_kib, cpu_ms))
            except OSError:
                os._exit(0)  # There is no reader left.
