"""Decides who may send HTTP requests: programs and the server's pages, but no other site's page.

`gateway`, `web` and served slot pools call `Origins.refusal` for every request, also for handshakes
of WebSockets. A browser reaches every port of its machine, and any page can make the browser send
requests there: a form or a WebSocket needs no permission. Three headers, which no page can set,
reveal such requests:

* `Host` is the name in the URL (RFC 9110, 7.2). If the owner of a page lets its name point to
127.0.0.1 (DNS rebinding), the browser lets the page read answers, as if it were this server's page;
only the name reveals the page. An address cannot be rebound, so the address that the request came
to is accepted, too.
* `Origin` is where the page comes from (RFC 6454, 7). Browsers send it with WebSockets and with all
requests that change something; programs rarely do. An `Origin` is accepted if it names the same
server as `Host`, or the port of the server's pages. `null`, a page that hides its origin, is not.
* `Sec-Fetch-Site` (W3C, Fetch Metadata) gives the same information for requests without `Origin`:
images, links, frames. `same-site` is another port of this machine, and so another origin.

The port in `Host` does not count: tunnels change it, and it protects nothing. A request without
`Host` is HTTP/1.0, which no browser speaks.
"""

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NamedTuple

_PORTS: Final = {"http": 80, "https": 443}
_AUTHORITY: Final = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::([0-9]{0,5}))?", re.IGNORECASE)
_OWN_SITES: Final = frozenset({"same-origin", "none"})
"""`none`: the user typed the address."""


class WebOrigin(NamedTuple):
    """The origin of a page."""

    scheme: str
    name: str
    port: int


@dataclass(frozen=True, slots=True)
class Foreign:
    """The reason why a request from a page of another site is refused.

    Args:
        header: The name of the header with the foreign origin.
        reason: A sentence for the sender.
        setting: The daemon's setting that would allow it; empty: no setting does.
    """

    header: str
    reason: str
    setting: str = ""

    @property
    def advice(self) -> str:
        """The reason, and the remedy for the operator of a daemon."""
        return f"{self.reason}; setting `{self.setting}` allows it" if self.setting else self.reason


@dataclass(frozen=True, slots=True)
class Origins:
    """The host names and origins that a server accepts.

    Args:
        hosts: The server's names, in addition to loopback names: the host that it listens on, and
            names that operators set.
        origins: Other sites whose pages may send requests, each in the form of `read_origin`.
        pages_port: The port of the server's own pages; 0: only this port.
    """

    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    pages_port: int = 0

    def refusal(
        self, target: str, headers: Iterable[tuple[str, str]], here: str = ""
    ) -> Foreign | None:
        """Return why a request is refused, or None if it is accepted.

        Args:
            target: The target in the request line; a host in it is checked, too.
            headers: All headers, with names in lower case.
            here: The address of this machine that the request came to.
        """
        found: dict[str, list[str]] = {"host": [], "origin": [], "sec-fetch-site": []}
        for name, value in headers:
            if name in found:
                found[name].append(value)
        hosts, origins = found["host"], found["origin"]
        if not target.startswith("/") and "://" in target:
            hosts.append(re.split("[/?#]", target.partition("://")[2])[0])
        names = {_plain(each) for each in (*self.hosts, here) if each}
        for host in hosts:
            place = _place("", host, 0)
            if place is None or not _is_ours(place.name, names):
                reason = f"Host: {host!r} is not a name of this server; a web page may have sent it"
                return Foreign("host", reason, "allowed_hosts")
        for origin in origins:
            if not self._may_ask(origin, hosts, names):
                reason = f"Origin: a page of {origin!r} may not send requests to this server"
                return Foreign("origin", reason, "" if origin == "null" else "allowed_origins")
        if not origins and not _OWN_SITES.issuperset(found["sec-fetch-site"]):
            reason = "Sec-Fetch-Site: a page of another site may not send requests to this server"
            return Foreign("sec-fetch-site", reason)
        return None

    def _may_ask(self, text: str, hosts: list[str], names: set[str]) -> bool:
        origin = read_origin(text)
        if origin is None:
            return False
        if origin.port == self.pages_port and _is_ours(origin.name, names):
            return True
        # A proxy that ends TLS speaks http to us and https to the page: the scheme does not count.
        if origin in (_place(origin.scheme, host, _PORTS[origin.scheme]) for host in hosts):
            return True
        return origin in map(read_origin, self.origins)


def read_origin(text: str) -> WebOrigin | None:
    """Return the origin in a text such as `https://host:port`; None if there is none."""
    scheme, _, authority = text.partition("://")
    default = _PORTS.get(scheme.lower())
    return None if default is None else _place(scheme.lower(), authority, default)


def authority_of(host: str, port: int) -> str:
    """Return `host:port` as in a URL, with IPv6 addresses in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@lru_cache(maxsize=64)  # Requests have the same few hosts.
def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach `host`: a loopback address or `localhost`."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _is_ours(name: str, names: set[str]) -> bool:
    return is_loopback(name) or name in names


def _place(scheme: str, authority: str, default_port: int) -> WebOrigin | None:
    found = _AUTHORITY.fullmatch(authority)
    if found is None:
        return None
    name, port = found.groups()
    return WebOrigin(scheme, _plain(name), int(port) if port else default_port)


@lru_cache(maxsize=64)
def _plain(name: str) -> str:
    """Return the canonical form of a name or an address, for comparisons."""
    name = name.strip("[]").lower().removesuffix(".")
    try:
        address = ipaddress.ip_address(name.partition("%")[0])  # A zone is local.
    except ValueError:
        return name
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)
