"""Counts connections by address, for the limits of both ports.

`gateway` and `web` each count their busy and their idle connections, in separate `Peers`. Beyond a
limit, the two close the connection that has been idle for the longest time.
"""

import ipaddress
from collections import defaultdict
from functools import lru_cache
from typing import Generic, TypeVar

T = TypeVar("T")


class Peers(Generic[T]):
    """Members, e.g. connections, in the order of their arrival: all of them, and by address."""

    def __init__(self) -> None:
        self._address: dict[T, str] = {}
        self._members: defaultdict[str, dict[T, None]] = defaultdict(dict)

    def __len__(self) -> int:
        return len(self._address)

    def add(self, member: T, address: str) -> None:
        """Add a member at the end; an existing member keeps its place."""
        place = _place(address)
        self._address.setdefault(member, place)
        self._members[place][member] = None

    def remove(self, member: T) -> None:
        """Remove a member, if it exists."""
        place = self._address.pop(member, None)
        if place is not None:
            del self._members[place][member]
            if not self._members[place]:
                del self._members[place]

    def count(self, address: str) -> int:
        """Return the number of members of an address."""
        return len(self._members.get(_place(address), ()))

    def oldest(self, address: str | None = None) -> T | None:
        """Return the first member, of all members or of an address."""
        members = self._address if address is None else self._members.get(_place(address), {})
        return next(iter(members), None)


def most_of_one(limit: int) -> int:
    """Return three quarters of a limit, rounded up: the maximum for one address."""
    return -(-limit * 3 // 4)


@lru_cache(maxsize=1024)  # Called several times per request.
def _place(address: str) -> str:
    """Return the address that counts as one peer: an IPv4 address, or an IPv6 network."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:  # No network: a socket of this machine.
        return address
    if isinstance(found, ipaddress.IPv4Address):
        return str(found)
    return str(found.ipv4_mapped or ipaddress.ip_network((int(found), 64), strict=False))
