"""Reads files in a workload's working folder, and never follows a path out of it.

A workload may create anything in the folder at any time: links, pipes, endless folders. So each
part of a path is opened separately, without following links, and only plain files are read.
"""

import os
import stat
from typing import Final

from moorage.backends.base import (
    FILE_BYTES_MAX,
    RUN_FILES_MAX,
    FilePiece,
    RunFiles,
    UnknownFileError,
)

_DEPTH_MAX: Final = 32
_LEFT_OUT_MAX: Final = 100
_FLAGS: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_KINDS: Final = (
    (stat.S_ISLNK, "it is a link"),
    (stat.S_ISDIR, f"it is nested more than {_DEPTH_MAX} folders deep"),
)


def list_files(folder: int) -> RunFiles:
    """Return all plain files below a folder, and the entries left out. Blocks."""
    files: list[tuple[str, int]] = []
    left_out: list[tuple[str, str]] = []
    _walk(folder, "", files, left_out, _DEPTH_MAX)
    return RunFiles(tuple(files[:RUN_FILES_MAX]), tuple(left_out[:_LEFT_OUT_MAX]))


def _walk(
    folder: int,
    above: str,
    files: list[tuple[str, int]],
    left_out: list[tuple[str, str]],
    deep: int,
) -> None:
    for name in sorted(os.listdir(folder)):
        path = f"{above}{name}"
        if len(files) >= RUN_FILES_MAX:
            left_out.insert(0, (path, f"at most {RUN_FILES_MAX} files are fetched"))
            return
        reason = "it cannot be read"
        try:
            found = os.stat(name, dir_fd=folder, follow_symlinks=False)
            if stat.S_ISDIR(found.st_mode) and deep:
                inner = os.open(name, _FLAGS | os.O_DIRECTORY, dir_fd=folder)
                try:
                    _walk(inner, f"{path}/", files, left_out, deep - 1)
                finally:
                    os.close(inner)
                continue
            if not stat.S_ISREG(found.st_mode) or not _is_text(path):
                reasons = (why for is_kind, why in _KINDS if is_kind(found.st_mode))
                reason = next(reasons, "it is not a plain file with a name of UTF-8")
            elif os.access(name, os.R_OK, dir_fd=folder):
                files.append((path, found.st_size))
                continue
        except FileNotFoundError:  # Deleted meanwhile.
            continue
        except OSError as error:
            reason += f": {error.strerror}"
        left_out.append((path.encode(errors="replace").decode(), reason))


def piece(folder: int, path: str, offset: int) -> FilePiece:
    """Return a piece of one file below a folder. Blocks.

    Raises:
        UnknownFileError: The folder has no such plain file, or the path would leave it.
    """
    *above, name = path.split("/")
    if any(each in {"", ".", ".."} or "\0" in each for each in (*above, name)) or offset < 0:
        raise UnknownFileError(f"{path!r} is not a path within the run's folder")
    here = os.dup(folder)
    try:
        for each in above:
            inner = os.open(each, _FLAGS | os.O_DIRECTORY, dir_fd=here)
            os.close(here)
            here = inner
        file = os.open(name, _FLAGS, dir_fd=here)
    except OSError as error:
        raise UnknownFileError(f"{path!r} cannot be read: {error.strerror}") from error
    finally:
        os.close(here)
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise UnknownFileError(f"{path!r} is not a plain file")
        data = os.pread(file, FILE_BYTES_MAX, offset)
        end = offset + len(data)
        return FilePiece(data, end, over=not data or end >= os.fstat(file).st_size)
    finally:
        os.close(file)


def _is_text(path: str) -> bool:
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return len(path) <= 1024  # noqa: PLR2004  # As in `records.fields.RunPath`.
