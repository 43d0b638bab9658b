"""Captures the output and the logs of a policy, up to a cap per evaluation. For `worker` alone."""

import io
import logging
import sys


class Capture(io.TextIOBase):
    """A stream for stdout, stderr and logging.

    Args:
        bytes_max: Kept of one evaluation; the rest is counted and dropped.
    """

    def __init__(self, bytes_max: int) -> None:
        super().__init__()
        self._bytes_max = bytes_max
        self._parts: list[str] = []
        self._space = bytes_max
        self._dropped = 0

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, text: str) -> int:
        """Store `text`, cut to the room that is left."""
        size = len(text)
        # A character is up to four bytes; counting them so needs no encoding here.
        part = text if size * 4 <= self._space else text[: self._space // 4]
        self._space -= len(part) * 4
        self._dropped += size - len(part)
        if part:
            self._parts.append(str(part))
        return size

    def take(self) -> str:
        """Return the output since the last call, and empty the store."""
        if not self._parts and not self._dropped:
            return ""
        text = "".join(self._parts)
        if self._dropped:
            text += f"\n[{self._dropped} more characters were dropped]\n"
        self._parts.clear()
        self._space, self._dropped = self._bytes_max, 0
        return text.encode("utf-8", "replace").decode()

    def install(self) -> None:
        """Become stdout, stderr and the root logger's handler."""
        sys.stdout = sys.stderr = self
        for name in ("__stdout__", "__stderr__"):
            setattr(sys, name, self)  # The real ones are /dev/null.
        handler = logging.StreamHandler(self)
        handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
        logging.raiseExceptions = False
        logging.root.handlers[:] = [handler]
        logging.root.setLevel(logging.INFO)
