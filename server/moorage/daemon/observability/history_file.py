"""The samples of the last day on the disk, so that a restart does not begin the day again."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, Generic, TypeVar

import msgspec

MODE: Final = 0o600
Sample = TypeVar("Sample")


class HistoryFile(Generic[Sample]):
    """One line of JSON a sample; twice as many lines as are wanted at most.

    It calls the disk: from a thread of its own, not from the event loop. What cannot be read is
    left out, as the line that a crash cut short or one of another release.

    Args:
        path: Of the file, which need not exist.
        kind: What a line is read as.
        most: How many samples are wanted.
    """

    def __init__(self, path: Path, kind: type[Sample], most: int) -> None:
        self._path = path
        self._most = most
        self._decoder = msgspec.json.Decoder(kind)
        self._lines = 0

    def read(self) -> list[Sample]:
        """Return the last samples, oldest first; the file then has these alone.

        Raises:
            OSError: The disk does not do it.
        """
        found = list(self._readable())[-self._most :]
        self._write(found)
        return found

    def append(self, sample: Sample) -> None:
        """Add a sample.

        Raises:
            OSError: The disk does not do it.
        """
        if self._lines >= 2 * self._most:
            self._write(list(self._readable())[-self._most :])
        self._path.touch(MODE)
        with self._path.open("ab") as file:
            file.write(_line(sample))
        self._lines += 1

    def _readable(self) -> Iterator[Sample]:
        lines = self._path.read_bytes().splitlines() if self._path.exists() else ()
        for line in lines:
            try:
                yield self._decoder.decode(line)
            except msgspec.DecodeError:
                continue

    def _write(self, samples: Iterable[Sample]) -> None:
        lines = list(map(_line, samples))
        beside = self._path.with_suffix(".new")
        beside.touch(MODE)
        beside.write_bytes(b"".join(lines))
        beside.replace(self._path)
        self._lines = len(lines)


def _line(sample: object) -> bytes:
    return msgspec.json.encode(sample) + b"\n"
