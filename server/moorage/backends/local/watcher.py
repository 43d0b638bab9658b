"""Waits in one thread for the ends of processes, which need not be child processes."""

import contextlib
import os
import select
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class _Watch:
    pid: int
    ended: Callable[[], None]


class Watcher:
    """Calls functions, in its own thread, when processes have ended."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll.register(self._wake, select.EPOLLIN)
        self._watches: dict[int, _Watch] = {}
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False

    def watch(self, descriptor: int, pid: int, ended: Callable[[], None]) -> None:
        """Call `ended` once when the process behind a pidfd has ended; then close the pidfd."""
        with self._lock:
            self._watches[descriptor] = _Watch(pid, ended)
            self._epoll.register(descriptor, select.EPOLLIN)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="watcher", daemon=True)
                self._thread.start()

    def lives(self, descriptor: int, pid: int) -> bool:
        """Return whether the process of a watched pidfd still runs."""
        with self._lock:  # Else the descriptor may be reused meanwhile.
            watch = self._watches.get(descriptor)
            if self._closed or watch is None or watch.pid != pid:
                return False
            return _runs(descriptor)

    def signal(self, descriptor: int, pid: int, number: int) -> None:
        """Signal the process behind a watched pidfd, unless the process has ended."""
        with self._lock, contextlib.suppress(ProcessLookupError):  # As above.
            watch = self._watches.get(descriptor)
            if not self._closed and watch is not None and watch.pid == pid:
                signal.pidfd_send_signal(descriptor, number)

    def close(self) -> None:
        """Stop watching. The processes continue to run. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        os.eventfd_write(self._wake, 1)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        with self._lock:
            for descriptor in self._watches:
                os.close(descriptor)
            self._watches.clear()
        self._epoll.close()
        os.close(self._wake)

    def _run(self) -> None:
        while not self._closed:
            for descriptor, _ in self._epoll.poll():
                if descriptor != self._wake:
                    self._note_end(descriptor)

    def _note_end(self, descriptor: int) -> None:
        with self._lock:
            watch = self._watches.pop(descriptor)
            self._epoll.unregister(descriptor)
        os.close(descriptor)
        with contextlib.suppress(ChildProcessError):  # An earlier daemon may have started it.
            os.waitpid(watch.pid, os.WNOHANG)
        watch.ended()


def lives(pid: int) -> bool:
    """Return whether a process still runs; a zombie does not count as running."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    try:
        return _runs(descriptor)
    finally:
        os.close(descriptor)


def _runs(descriptor: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return not poll.poll(0)
