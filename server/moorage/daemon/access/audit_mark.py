"""The mark of the audit log's files: a small file that reveals lines removed at either end.

The mark is beside the log's folder, so it also reveals that the whole folder is missing.
"""

from pathlib import Path
from typing import Final

import msgspec

from moorage.daemon.access.audit_chain import ChainEnd
from moorage.storage.sqlite.files import open_regular, write_durably

FILE: Final = "audit.mark"
"""Name of the mark in the data folder."""
_REMEDY: Final = (
    "put back a copy of this file; else the server makes it again at its next start and notes that "
    "in an entry `audit.mark_lost`, and entries that were removed before then are not found"
)
_BYTES_MAX: Final = 4_096
"""Maximum bytes that are read; a mark is much smaller."""


class AuditMark(msgspec.Struct, frozen=True):
    """What the log must have.

    Args:
        deleted: The last line that the server deleted by age or size; 0: no line.
        end: A line that was once the last one.
    """

    deleted: ChainEnd
    end: ChainEnd


def read_mark(folder: Path) -> AuditMark | None:
    """Return the mark in a data folder; None: the log is new, or of a release without marks.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file is no mark.
    """
    path = folder / FILE
    try:
        with open_regular(path) as file:
            content = file.read(_BYTES_MAX)
    except FileNotFoundError:
        return None
    try:
        return msgspec.json.decode(content, type=AuditMark)
    except msgspec.MsgspecError as error:
        raise ValueError(f"{path} is damaged: {error}; {_REMEDY}") from None


def write_mark(folder: Path, mark: AuditMark) -> None:
    """Replace the mark in a data folder, durably.

    Raises:
        OSError: The file cannot be written; then the former mark stays.
    """
    write_durably(folder / FILE, msgspec.json.encode(mark))
