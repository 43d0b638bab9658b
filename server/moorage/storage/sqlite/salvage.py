"""Reads the intact frames of a write-ahead log after a damaged place.

SQLite reads up to this place. Each frame has one page, and its checksum continues that of the frame
before: so later frames can be checked, too. `verify` and `repair` read a copy with these frames.
"""

import contextlib
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from moorage.storage.sqlite.files import (
    LOG_FRAME_BYTES,
    LOG_HEADER_BYTES,
    find_log_damage,
    log_damage,
    log_sums,
)

_PAGE_BYTES = range(512, 65_537)


class _Frame(NamedTuple):
    """A frame of the current round of the log.

    Args:
        page: Number of the page that the frame has.
        pages: Number of the database's pages after the commit that this frame ends; 0: it ends no
            commit.
        whole: Whether the frame is undamaged.
    """

    page: int
    pages: int
    body: bytes
    whole: bool


@contextlib.contextmanager
def readable(database: Path, *, lacking: bool) -> Iterator[Path]:
    """Yield a database with all readable frames of its log: the file, or a copy if it is damaged.

    Args:
        database: The database file, which is not changed.
        lacking: Whether durable changes are known to be missing in the file.

    Raises:
        OSError: The disk has no room for a copy.
    """
    damaged = find_log_damage(database) or (lacking and log_damage(database))
    frames = _frames(database) if damaged else []
    last = max((at for at, each in enumerate(frames) if each.whole and each.pages), default=-1)
    if last < 0:
        yield database
        return
    with tempfile.TemporaryDirectory(prefix="moorage-") as folder:
        copy = Path(folder) / database.name
        _write(database, copy, frames[: last + 1])
        yield copy


def _write(database: Path, copy: Path, frames: list[_Frame]) -> None:
    page_bytes = len(frames[0].body)
    pages: dict[int, bytes] = {}
    content = database.read_bytes()
    for each in frames:
        if each.whole:
            pages[each.page] = each.body
        elif each.page * page_bytes > len(content):
            pages.setdefault(each.page, each.body)  # The page has no other version.
    with copy.open("wb") as new:
        new.write(content)
        for number, body in pages.items():
            if number <= frames[-1].pages:
                new.seek((number - 1) * page_bytes)
                new.write(body)
        new.truncate(frames[-1].pages * page_bytes)


def _frames(database: Path) -> list[_Frame]:
    """Return the frames of the last round, in order; [] if the size of a page is unknown.

    The log's header and the database's header both name the size, so one of them may be damaged.
    """
    log = database.with_name(database.name + "-wal")
    content = log.read_bytes() if log.is_file() else b""
    if len(content) <= LOG_HEADER_BYTES:
        return []
    header = content[:LOG_HEADER_BYTES]
    for page_bytes in dict.fromkeys((*struct.unpack(">I", header[8:12]), _page_bytes(database))):
        if page_bytes not in _PAGE_BYTES or page_bytes & (page_bytes - 1):
            continue
        starts = range(LOG_HEADER_BYTES, len(content), LOG_FRAME_BYTES + page_bytes)
        cut = [content[at : at + LOG_FRAME_BYTES + page_bytes] for at in starts]
        salts = header[16:24] if any(each[8:16] == header[16:24] for each in cut) else cut[0][8:16]
        for order in ("<2I", ">2I"):
            frames = _check(cut, salts, header[24:32], struct.Struct(order))
            if any(each.whole for each in frames):
                return frames
    return []


def _check(cut: list[bytes], salts: bytes, sums: bytes, word_pair: struct.Struct) -> list[_Frame]:
    """Return the frames with these salts, each checked against the stored checksum before it."""
    frames: list[_Frame] = []
    for frame in cut:
        if len(frame) < len(cut[0]):
            break
        page, pages = struct.unpack(">2I", frame[:8])
        found = log_sums(word_pair, frame[:8] + frame[LOG_FRAME_BYTES:], struct.unpack(">2I", sums))
        sums = frame[16:24]
        if frame[8:16] == salts and page:
            whole = struct.pack(">2I", *found) == sums
            frames.append(_Frame(page, pages, frame[LOG_FRAME_BYTES:], whole))
    return frames


def _page_bytes(database: Path) -> int:
    with database.open("rb") as file:
        file.seek(16)
        given = int.from_bytes(file.read(2))
    return 65_536 if given == 1 else given
