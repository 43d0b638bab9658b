"""Where a pool is served: `uds:PATH`, a Unix socket, or `tcp:HOST:PORT` on this machine."""

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from moorage.protocol.origins import is_loopback

__all__ = ["ENVIRONMENT", "Tcp", "Uds", "address_here", "parse_address"]

ENVIRONMENT: Final = ("MOORAGE_POOL_ADDRESS", "CANARY_RESOURCE_POOL_ADDR")
"""Variables that name the address; the first that is set. The second is the documented one."""

_PORT_MAX: Final = 65535


@dataclass(frozen=True, slots=True)
class Uds:
    """A Unix socket."""

    path: Path

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
        ValueError: It is neither; or it is not of this machine, where there is nobody to ask who
            somebody is.

    """
    kind, _, rest = text.partition(":")
    if kind == "uds" and rest:
        return Uds(Path(rest).absolute())
    host, _, port = rest.rpartition(":")
    if kind != "tcp" or not host or not port.isdecimal() or int(port) > _PORT_MAX:
        raise ValueError(f"{text!r}: expected uds:PATH or tcp:HOST:PORT")
    if not is_loopback(host.strip("[]")):
        raise ValueError(f"{text!r}: a pool is served to this machine only; expected a loopback")
    return Tcp(host.strip("[]"), int(port))


def address_here(environment: Mapping[str, str]) -> Uds | Tcp:
    """Return the address that the environment names, else this user's own socket.

    Raises:
        ValueError: What the environment names is no address.

    """
    for name in ENVIRONMENT:
        if text := environment.get(name):
            try:
                return parse_address(text)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error
    if folder := environment.get("XDG_RUNTIME_DIR"):
        return Uds(Path(folder) / "moorage" / "pool.sock")
    return Uds(Path(tempfile.gettempdir()) / f"moorage-{os.getuid()}" / "pool.sock")
