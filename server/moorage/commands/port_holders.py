"""Finds the process that listens at a port, and its open files, for `moored doctor`.

This module asks the kernel. A server could report its folder itself, but not to a client without a
certificate, and it would report it to every stranger.
"""

import contextlib
import os
import struct
from collections.abc import Iterator
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import Final, NamedTuple

_TABLES: Final = ("/proc/net/tcp", "/proc/net/tcp6")
_LISTENS: Final = "0A"
"""The kernel's text for the state of a listening socket."""
_WORD_DIGITS: Final = 8
"""Digits of 32 bits of an address, which the kernel prints as a number of this machine."""

Listening = tuple[IPv4Address | IPv6Address, int]
"""The address and the port of a listening socket."""


class Listeners(NamedTuple):
    """The listening sockets of this machine whose programs this user may examine.

    Args:
        own: Those of the server that has the data folder open.
        others: Ports of all other programs.
    """

    own: list[Listening]
    others: set[int]


def find_listeners(folder: Path) -> Listeners:
    """Return the listening sockets, divided by whether their program has a data folder open.

    A program that a server started may have a file of the folder open, but not the folder itself.
    """
    own, found = os.path.realpath(folder), Listeners([], set())
    for sockets, files in _programs():
        if own in files:
            found.own.extend(sockets)
        else:
            found.others.update(port for _, port in sockets)
    return found


def _programs() -> Iterator[tuple[list[Listening], set[str]]]:
    """Yield the listening sockets and the open files of each program that listens."""
    listening = {f"socket:[{inode}]": place for inode, place in _listening()}
    for process in Path("/proc").glob("[0-9]*/fd"):
        files = set(_open_files(process))
        if there := listening.keys() & files:
            yield [listening[each] for each in there], files


def _listening() -> Iterator[tuple[str, Listening]]:
    """Yield the inode and the place of each listening socket."""
    for table in _TABLES:
        with contextlib.suppress(OSError):  # This kernel may have no IPv6.
            for row in Path(table).read_text().splitlines()[1:]:
                fields = row.split()
                if fields[3] == _LISTENS:
                    address, _, port = fields[1].rpartition(":")
                    yield fields[9], (_read(address), int(port, 16))


def _read(address: str) -> IPv4Address | IPv6Address:
    words = [address[at : at + _WORD_DIGITS] for at in range(0, len(address), _WORD_DIGITS)]
    return ip_address(struct.pack(f"={len(words)}I", *(int(each, 16) for each in words)))


def _open_files(folder: Path) -> Iterator[str]:
    with contextlib.suppress(OSError):  # Another user's process, or it has ended.
        for each in folder.iterdir():
            with contextlib.suppress(OSError):  # The file was closed meanwhile.
                yield str(each.readlink())
