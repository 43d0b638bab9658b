"""Finds the address of a client behind proxies: one rule for both ports.

A proxy adds the address from which a request came to `X-Forwarded-For`, at the right end. A client
may send this header, too, so only what a trusted proxy added counts: from the right, the first
address that is not a trusted proxy's is the client's.
"""

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from moorage.protocol.origins import authority_of

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

FORWARDED_FOR: Final = "x-forwarded-for"
# `1.2.3.4`, `1.2.3.4:5`, `::1`, `[::1]` or `[::1]:5`; without a zone, which only its machine knows.
_HOP: Final = re.compile(
    r"\[([0-9a-f:.]{2,45})\](?::[0-9]{1,5})?|([0-9.]{7,15}):[0-9]{1,5}|([0-9a-f:.]{2,45})",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Proxies:
    """The proxies whose `X-Forwarded-For` is believed.

    Args:
        networks: Their addresses and networks; empty: the header is never believed.
    """

    networks: tuple[Network, ...] = ()

    def client_of(self, peer: str, forwarded: Iterable[str]) -> str | None:
        """Return the address of the client that a trusted proxy names.

        Args:
            peer: The address at the other end of the connection.
            forwarded: The values of all headers `X-Forwarded-For`, the first one first.

        Returns:
            The address without a port. None: the peer is not trusted, or names no address.
        """
        if not self.networks or not self._trusts(_address(peer.partition("%")[0])):
            return None
        client = None
        for text in reversed(",".join(forwarded).split(",")):
            if text.strip():  # A list may have empty parts (RFC 9110, 5.6.1).
                hop = _HOP.fullmatch(text.strip())
                client = None if hop is None else _address(hop[hop.lastindex or 0])
                if not self._trusts(client):
                    break
        return None if client is None else str(client)

    def _trusts(self, address: Address | None) -> bool:
        return address is not None and any(address in each for each in self.networks)


def read_proxies(texts: Iterable[str]) -> Proxies:
    """Return the proxies at addresses such as `10.0.0.1` and in networks such as `10.0.0.0/8`.

    Raises:
        ValueError: A text is neither, or its address has bits beyond the prefix.
    """
    return Proxies(tuple(map(ipaddress.ip_network, texts)))


def remote_text(address: str, port: int) -> str:
    """Return a client's address with its port; only the address if the port is unknown (0)."""
    return authority_of(address, port) if port else address


def _address(text: str) -> Address | None:
    """Return an address, that of IPv4 within IPv6 as IPv4; None if it is malformed."""
    try:
        found = ipaddress.ip_address(text)
    except ValueError:
        return None
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return mapped or found
