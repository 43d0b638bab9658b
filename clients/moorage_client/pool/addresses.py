"""The address of a served pool: `uds:PATH`, a Unix socket, or `tcp:HOST:PORT` on this machine."""

import errno
import os
import stat
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from moorage.protocol.origins import is_loopback

ENVIRONMENT: Final = ("MOORAGE_POOL_ADDRESS", "CANARY_RESOURCE_POOL_ADDR")
"""Variables that name the address; the first variable that is set is used. The second is the
documented one."""

_PORT_MAX: Final = 65535


@dataclass(frozen=True, slots=True)
class Uds:
    """A Unix socket.

    Args:
        path: The socket's file.
        own: Whether the path is the default one, of this user's own socket.
    """

    path: Path
    own: bool = field(default=False, compare=False)

    def check(self) -> None:
        """Refuse a folder that another user made or may change.

        Any user may create a folder of this name in the system's temporary directory.

        Raises:
            OSError: The folder is another user's, or another user may change it.
        """
        if not self.own:
            return
        folder = self.path.parent
        seen = folder.lstat()
        if not stat.S_ISDIR(seen.st_mode) or seen.st_uid != os.getuid() or seen.st_mode & 0o022:
            raise PermissionError(
                errno.EPERM,
                "expected a folder of yours that no other user may write to; remove this folder, "
                "or name another place with --address or MOORAGE_POOL_ADDRESS",
                str(folder),
            )

    def __str__(self) -> str:
        return f"uds:{self.path}"


@dataclass(frozen=True, slots=True)
class Tcp:
    """A port of a loopback address."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"tcp:{self.host}:{self.port}"


def parse_address(text: str) -> Uds | Tcp:
    """Read an address.

    Raises:
        ValueError: The text has neither form, or the address is not on this machine: the pool must
            know the user of a process.
    """
    kind, _, rest = text.partition(":")
    if kind == "uds" and rest:
        return Uds(Path(rest).absolute())
    host, _, port = rest.rpartition(":")
    if kind != "tcp" or not host or not port.isdecimal() or int(port) > _PORT_MAX:
        raise ValueError(f"{text!r}: expected uds:PATH or tcp:HOST:PORT")
    if not is_loopback(host.strip("[]")):
        raise ValueError(
            f"{text!r}: expected a loopback address, since only this machine may use the pool"
        )
    return Tcp(host.strip("[]"), int(port))


def address_here(environment: Mapping[str, str]) -> Uds | Tcp:
    """Return the address that the environment names, else this user's own socket.

    Raises:
        ValueError: The environment names an invalid address.
    """
    for name in ENVIRONMENT:
        if text := environment.get(name, "").strip():
            try:
                return parse_address(text)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error
    if folder := environment.get("XDG_RUNTIME_DIR"):
        return Uds(Path(folder) / "moorage" / "pool.sock", own=True)
    return Uds(Path(tempfile.gettempdir()) / f"moorage-{os.getuid()}" / "pool.sock", own=True)
