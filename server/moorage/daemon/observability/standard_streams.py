"""Standard output and error streams whose writers never wait and never fail.

`moored serve` replaces the descriptor by a pipe. One thread empties the pipe, another writes to the
original stream. So this covers all that a process prints: its log, those of its libraries,
warnings, tracebacks, and the programs that inherit the descriptor. Lines that cannot be written are
dropped and counted. The mode of the descriptor is not changed, since other processes share it.
"""

import atexit
import fcntl
import os
import select
import struct
import termios
import threading
from collections import deque
from collections.abc import Callable
from typing import Final, NoReturn

BACKLOG_BYTES_MAX: Final = 4 << 20
"""Maximum bytes (some 20,000 log lines) that wait for a slow reader; later lines are dropped."""
FLUSH_SECONDS_MAX: Final = 2.0
"""Seconds that the process waits at its end until everything is written."""
RETRY_SECONDS: Final = 1.0
"""After a failed write, seconds between two attempts to write again."""
_CHUNK_BYTES: Final = 64 << 10
_PARTIAL_MILLISECONDS: Final = 100
"""Milliseconds after which a line without its newline is written as it is."""


class StandardStream:
    """One of the two output streams of this process, from now until it ends.

    Args:
        descriptor: 1 or 2; it must be open.

    Attributes:
        report: Makes the line that reports the number of dropped lines once writing works again;
            None: drops are not reported.
        dropped: Number of dropped lines since the start.
        is_terminal: Whether the stream is a terminal.

    Raises:
        OSError: There are no descriptors left.
    """

    def __init__(self, descriptor: int) -> None:
        self.report: Callable[[int], bytes] | None = None
        self.dropped = 0
        self.is_terminal = os.isatty(descriptor)
        self._descriptor = descriptor
        self._real = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 3)
        self._pipe, write_end = os.pipe()
        os.dup2(write_end, descriptor)
        os.close(write_end)
        self._changed = threading.Condition()
        # Pending lines, each with the number of lines dropped just before it.
        self._backlog: deque[tuple[bytes, int]] = deque()
        self._backlog_bytes = 0
        self._dropped_last = 0
        self._partial = b""
        self._is_cut = False  # An error cut off a line.
        # Daemon threads: a reader that is slow must not keep the process from ending.
        for work in (self._read_forever, self._write_forever):
            threading.Thread(target=work, name=f"stream-{descriptor}", daemon=True).start()
        atexit.register(self._finish)

    def end_process(self, code: int) -> NoReturn:
        """Write the pending lines, and end this process without waiting for other threads."""
        self._finish()
        os._exit(code)

    def _finish(self) -> None:
        """Drop later lines; wait up to `FLUSH_SECONDS_MAX` until earlier ones are written."""
        nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        os.dup2(nowhere, self._descriptor)
        os.close(nowhere)
        with self._changed:
            self._changed.wait_for(self._is_idle, FLUSH_SECONDS_MAX)

    def _is_idle(self) -> bool:
        unread = struct.unpack("i", fcntl.ioctl(self._pipe, termios.FIONREAD, b"\0" * 4))[0]
        return not (unread or self._partial or self._backlog)

    # The thread that reads.

    def _read_forever(self) -> None:
        poll = select.poll()
        poll.register(self._pipe, select.POLLIN)
        while True:
            is_late = not poll.poll(_PARTIAL_MILLISECONDS if self._partial else None)
            with self._changed:  # `_finish` must not look between the pipe and the backlog.
                read = b"" if is_late else os.read(self._pipe, _CHUNK_BYTES)
                content = self._partial + read
                whole = content.rfind(b"\n") + 1
                if not read or len(content) - whole >= _CHUNK_BYTES:
                    whole = len(content)
                self._partial = content[whole:]
                if whole:
                    self._keep(content[:whole])
                self._changed.notify_all()
            if not (read or is_late):
                return  # No process has the descriptor any more.

    def _keep(self, lines: bytes) -> None:
        if self._backlog_bytes >= BACKLOG_BYTES_MAX:
            self._dropped_last += self._drop(lines)
            return
        self._backlog.append((lines, self._dropped_last))
        self._backlog_bytes += len(lines)
        self._dropped_last = 0

    def _drop(self, lines: bytes) -> int:
        count = lines.count(b"\n") or 1
        self.dropped += count
        return count

    # The thread that writes.

    def _write_forever(self) -> None:
        unreported = 0
        while True:
            with self._changed:
                again = RETRY_SECONDS if unreported and self.report else None
                self._changed.wait_for(self._has_work, again)
                if self._backlog:
                    lines, before = self._backlog[0]
                else:
                    lines, before, self._dropped_last = b"", self._dropped_last, 0
            unreported += before
            if unreported and self.report and not self._write(self.report(unreported)):
                unreported = 0
            rest = self._write(lines)
            with self._changed:
                if rest:
                    unreported += self._drop(rest)
                if lines:
                    self._backlog.popleft()
                    self._backlog_bytes -= len(lines)
                self._changed.notify_all()

    def _has_work(self) -> bool:
        return bool(self._backlog or self._dropped_last)

    def _write(self, content: bytes) -> bytes:
        """Write to the original stream, however long it takes; after a failure, return the rest."""
        try:
            if self._is_cut and content:
                self._write_some(b"\n")
                self._is_cut = False
            while content:
                written = self._write_some(content)
                self._is_cut = content[written - 1 : written] != b"\n"
                content = content[written:]
        except OSError:
            return content
        self._is_cut = False
        return b""

    def _write_some(self, content: bytes) -> int:
        while True:
            try:
                return os.write(self._real, content)
            except BlockingIOError:  # Another process has made it non-blocking.
                poll = select.poll()
                poll.register(self._real, select.POLLOUT)
                poll.poll()
