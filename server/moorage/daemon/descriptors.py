"""File descriptors of the daemon: limits their number and reserves the last ones.

A connection uses one descriptor, and any client can open many. So connections get all descriptors
but `RESERVED`, which are left to the ledger, the catalog, cells and workloads. Requests that would
open files are refused while fewer than `SPARE` descriptors are free.
"""

import os
import resource
from dataclasses import dataclass
from typing import Final

from moorage.web.connections import CONNECTIONS_MAX

RESERVED: Final = 128
"""Descriptors that connections may not use; if the system allows few, half of all."""
SPARE: Final = 32
"""Descriptors that neither connections nor requests may use."""


def raise_limit() -> None:
    """Raise the limit of open files to the most allowed: shells set 1,024, too few for sessions."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """The maximum of connections per port with which `RESERVED` descriptors stay free."""

    web: int
    gateway: int


def connection_limits() -> ConnectionLimits:
    """Return the limits on this system; HTTP gets at most a quarter of the connections."""
    limit = _limit()
    most = limit - min(RESERVED, limit // 2)
    web = min(CONNECTIONS_MAX, most // 4)
    return ConnectionLimits(web, most - web)


def too_few(sessions_max: int) -> str:
    """Return the warning if fewer sessions fit than the settings allow."""
    most = connection_limits().gateway
    reason = (
        f"sessions_max is {sessions_max}, and the system lets this process open {_limit()} files"
    )
    return (
        f"{reason}: at most {most} sessions fit; raise the limit (LimitNOFILE) or lower the setting"
    )


def spare() -> bool:
    """Return whether a request may open files."""
    try:
        lowest = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)  # The system gives the lowest.
    except OSError:
        return False
    os.close(lowest)
    return lowest < _limit() - SPARE


def _limit() -> int:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return limit
