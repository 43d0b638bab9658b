"""Decide whether an address belongs to the public Internet, or to this machine's networks.

`catalog.documents.sources` asks before it connects to a host that a client has named. Python's own
`is_global` is not enough: what it knows depends on its version, and an IPv6 address may carry an
IPv4 one.
"""

from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from typing import Final

_NOT_PUBLIC_4: Final = tuple(
    map(
        IPv4Network,
        (
            "0.0.0.0/8",  # This machine.
            "10.0.0.0/8",
            "100.64.0.0/10",  # Behind a carrier's NAT; one cloud has its metadata here.
            "127.0.0.0/8",
            "168.63.129.16/32",  # A cloud's own services for its machines, at a public address.
            "169.254.0.0/16",  # Link-local; most clouds have their metadata here.
            "172.16.0.0/12",
            "192.0.0.0/24",  # Protocol assignments; one cloud has its metadata here.
            "192.0.2.0/24",
            "192.88.99.0/24",  # Relays of 6to4.
            "192.168.0.0/16",
            "198.18.0.0/15",
            "198.51.100.0/24",
            "203.0.113.0/24",
            "224.0.0.0/3",  # Multicast, reserved, broadcast.
        ),
    )
)
_UNICAST_6: Final = IPv6Network("2000::/3")
"""All global unicast; loopback, link-local, unique local and multicast addresses lie outside."""
_NOT_PUBLIC_6: Final = tuple(
    map(
        IPv6Network,
        (
            "2001::/23",  # Protocol assignments, among them Teredo, which tunnels to IPv4.
            "2001:db8::/32",
            "2002::/16",  # 6to4, likewise.
            "3fff::/20",
        ),
    )
)
_NAT64: Final = IPv6Network("64:ff9b::/96")
"""IPv4 addresses as a network without IPv4 writes them."""


def is_public(address: str) -> bool:
    """Return whether an address, as a resolver gives it, is one of the public Internet."""
    found = ip_address(address.partition("%")[0])
    if isinstance(found, IPv6Address):
        carried = found.ipv4_mapped
        if found in _NAT64:
            carried = IPv4Address(found.packed[-4:])
        if carried is None:
            inside = any(found in network for network in _NOT_PUBLIC_6)
            return found in _UNICAST_6 and not inside and found.is_global
        found = carried
    return found.is_global and not any(found in network for network in _NOT_PUBLIC_4)
