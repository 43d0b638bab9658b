"""Finds the process that listens at a port, and its open files, for `moored doctor`.

This module asks the kernel. A server could report its folder itself, but not to a client without a
certificate, and it would report it to every stranger.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_TABLES: Final = ("/proc/net/tcp", "/proc/net/tcp6")
_LISTENS: Final = "0A"
"""The kernel's text for the state of a listening socket."""


def has_folder_open(port: int, folder: Path) -> bool | None:
    """Return whether the process that listens at a port has a folder, or a file in it, open.

    None: this user may not see it, or the process is on another machine or in another container.
    """
    listening = {f"socket:[{inode}]" for inode in _listening(port)}
    own = os.path.realpath(folder)
    seen = False
    for process in Path("/proc").glob("[0-9]*/fd"):
        files = set(_open_files(process))
        if listening & files:
            seen = True
            if any(each == own or each.startswith(f"{own}/") for each in files):
                return True
    return False if seen else None


def _listening(port: int) -> Iterator[str]:
    """Yield the inodes of the sockets that listen at a port."""
    for table in _TABLES:
        with contextlib.suppress(OSError):  # This kernel may have no IPv6.
            for row in Path(table).read_text().splitlines()[1:]:
                fields = row.split()
                if fields[3] == _LISTENS and int(fields[1].rpartition(":")[2], 16) == port:
                    yield fields[9]


def _open_files(folder: Path) -> Iterator[str]:
    with contextlib.suppress(OSError):  # Another user's process, or it has ended.
        for each in folder.iterdir():
            with contextlib.suppress(OSError):  # The file was closed meanwhile.
                yield str(each.readlink())
