"""The sources of a policy's `code`: the text itself, an archive in it, a path or a URL.

The embedded catalog calls `CodeSources.fetch` and `CodeSources.files`. A path is read only below
the operator's folder, a URL only from public addresses or from the operator's listed hosts.
`catalog.documents.archives` then checks the bytes or files.
"""

import asyncio
import base64
import binascii
import contextlib
import os
import re
import socket
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Final

from moorage.catalog.documents.archives import (
    ENTRY,
    FILES_BYTES_MAX,
    bad_code,
    collect,
    is_archive,
    policy_files,
    read_archive,
)
from moorage.lazy import LazyModule
from moorage.model import Code
from moorage.protocol.faults import ServiceError

if TYPE_CHECKING:
    import httpx
else:  # httpx is slow to import, and few servers use it.
    httpx = LazyModule("httpx")

CODE_BYTES_MAX: Final = 8 * 1024 * 1024
"""Maximum bytes of source text or an archive, as uploaded or fetched."""
FETCH_SECONDS_MAX: Final = 30.0
"""Longest download in seconds, including redirects."""
CONNECT_SECONDS_MAX: Final = 5.0
"""Longest seconds to connect to one address of a host; then the next one is tried."""
REDIRECTS_MAX: Final = 3

Files = dict[str, bytes]

_CREDENTIALS: Final = re.compile(r"^(https?://)[^/?#]*@", re.IGNORECASE)
"""Matches the credentials of a URL, up to its host (RFC 3986, section 3.2.1)."""

# The first bytes of .zip, .tar.gz and .tar.xz in base64.
_ARCHIVE_IN_BASE64: Final = ("UEsDB", "H4sI", "/Td6WFoA")
_CLASS: Final = b"AIOSv1PolicyRule"
_PATH: Final = re.compile(r"[^\s=#(){}\[\]<>\"';,]+")
_EXPECTED: Final = (
    "Python source text, a base64 archive (.zip, .tar.gz, .tar.xz), a data: or http(s) URL,"
    " or a path under the configured folder"
)


_NOT_PUBLIC_4: Final = tuple(
    map(
        IPv4Network,
        (
            "0.0.0.0/8",  # Addresses of this machine.
            "10.0.0.0/8",
            "100.64.0.0/10",  # Carrier-grade NAT; one cloud's metadata service.
            "127.0.0.0/8",
            "168.63.129.16/32",  # A cloud's service for its machines, at a public address.
            "169.254.0.0/16",  # Link-local; most clouds' metadata services.
            "172.16.0.0/12",
            "192.0.0.0/24",  # Protocol assignments; one cloud's metadata service.
            "192.0.2.0/24",
            "192.88.99.0/24",  # 6to4 relays.
            "192.168.0.0/16",
            "198.18.0.0/15",
            "198.51.100.0/24",
            "203.0.113.0/24",
            "224.0.0.0/3",  # Multicast, reserved, broadcast.
        ),
    )
)
_UNICAST_6: Final = IPv6Network("2000::/3")
"""All global unicast addresses: not loopback, link-local, unique local or multicast."""
_NOT_PUBLIC_6: Final = tuple(
    map(
        IPv6Network,
        (
            "2001::/23",  # Protocol assignments, among them Teredo, which tunnels to IPv4.
            "2001:db8::/32",
            "2002::/16",  # 6to4, which tunnels to IPv4, too.
            "3fff::/20",
        ),
    )
)
_NAT64: Final = IPv6Network("64:ff9b::/96")
"""IPv6 addresses that stand for IPv4 addresses, in networks without IPv4 (NAT64)."""


@dataclass(frozen=True, slots=True)
class CodeSources:
    """The sources that `code` may name, and the limits for them.

    Args:
        root: Folder below which local paths are read; None refuses every path.
        hosts: Host names from which code may be fetched, at any address; None: all hosts, at public
            addresses only.
        store: Host name of the policy store, which is also allowed; empty: there is none.
    """

    root: Path | None = None
    hosts: frozenset[str] | None = None
    store: str = ""

    async def fetch(self, code: str) -> bytes | None:
        """Download `code` if it is an http(s) URL; None if it is not.

        Raises:
            ServiceError: `bad_policy`, `too_large`, or `unavailable` if the host fails.
        """
        if not is_url(code):
            return None
        shown = without_credentials(code)
        try:
            async with (
                asyncio.timeout(FETCH_SECONDS_MAX),
                httpx.AsyncClient(
                    headers={"accept-encoding": "identity"},
                    timeout=httpx.Timeout(FETCH_SECONDS_MAX, connect=CONNECT_SECONDS_MAX),
                    # Reuse no connection for another host at this address.
                    limits=httpx.Limits(max_keepalive_connections=0),
                    verify=httpx.create_ssl_context(),
                    trust_env=False,  # A proxy would resolve the host itself.
                ) as client,
            ):
                return await self._follow(client, code, shown)
        except UnicodeError as error:
            raise bad_code(f"{shown} has no host: {error}", "the name of a host") from error
        except (TimeoutError, httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            raise ServiceError(
                Code.UNAVAILABLE,
                f"code: {shown} could not be fetched: {_cause(error)};"
                f" expected an answer within {FETCH_SECONDS_MAX:g} seconds",
                field="code",
                expected=f"an answer within {FETCH_SECONDS_MAX:g} seconds",
            ) from error

    async def _follow(self, client: "httpx.AsyncClient", url: str, shown: str) -> bytes:
        for _ in range(REDIRECTS_MAX + 1):
            async with contextlib.aclosing(await self._get(client, url)) as response:
                if response.has_redirect_location:
                    url = urllib.parse.urljoin(url, response.headers["location"])
                    continue
                if not response.is_success:
                    raise bad_code(f"{shown} answered {response.status_code}", "200, with the code")
                content = bytearray()
                # Raw, so that a content-encoding cannot evade the limits of unpacking.
                async for chunk in response.aiter_raw():
                    content += chunk
                    if len(content) > CODE_BYTES_MAX:
                        raise _too_large()
                return bytes(content)
        raise bad_code(f"{shown} redirects too often", f"at most {REDIRECTS_MAX} redirects")

    async def _get(self, client: "httpx.AsyncClient", given: str) -> "httpx.Response":
        """Send a request to the host of a URL; connect only to addresses that were checked."""
        url = httpx.URL(given)
        if url.scheme not in {"http", "https"} or not url.host:
            raise bad_code(
                f"{without_credentials(given)} is not a URL to fetch from", "http://… or https://…"
            )
        login = httpx.BasicAuth(url.username, url.password) if url.userinfo else None
        addresses = await self._addresses(url)
        for number, address in enumerate(addresses, 1):
            request = client.build_request(
                "GET",
                url.copy_with(host=address, userinfo=b""),  # No credentials: the client logs it.
                headers={"host": url.netloc.decode("ascii")},
                extensions={"sni_hostname": url.raw_host.decode("ascii")},
            )
            try:
                return await client.send(request, stream=True, auth=login, follow_redirects=False)
            except (httpx.ConnectError, httpx.ConnectTimeout):
                if number == len(addresses):
                    raise
        raise OSError(f"the host {url.host} has no address")

    async def _addresses(self, url: "httpx.URL") -> list[str]:
        """Resolve the host of a URL once; refuse addresses that are not allowed."""
        trusted = url.host == self.store
        if self.hosts is not None and url.host not in self.hosts and not trusted:
            raise bad_code(
                f"the host {url.host} is not allowed",
                "one of " + (", ".join(sorted(self.hosts)) or "no host at all"),
            )
        port = url.port or (443 if url.scheme == "https" else 80)
        # The resolver knows all forms of an address: 127.1, 0x7f000001, 017700000001.
        found = await asyncio.get_running_loop().getaddrinfo(
            url.raw_host.decode("ascii"), port, type=socket.SOCK_STREAM
        )
        addresses = list(dict.fromkeys(str(at[0]) for *_, at in found))
        if self.hosts is None and not trusted and not all(map(is_public, addresses)):
            raise bad_code(
                f"the host {url.host} is not public",
                "a host with only public addresses, or a host in this server's setting "
                "`policy_code_hosts`",
            )
        return addresses

    def files(self, code: str, fetched: bytes | None) -> Files:
        """Return the files of `code`. This call blocks: use the catalog's thread.

        Raises:
            ServiceError: `bad_policy` or `too_large`.
        """
        if fetched is not None:
            return _decode(fetched, without_credentials(code))
        if code[:5].lower() == "data:":
            return _unpack(_from_data_url(code))
        if code.lstrip().startswith(_ARCHIVE_IN_BASE64):
            return _unpack(_from_base64("".join(code.split())))
        named = code if self.root is None else code.replace(" ", "_")
        if _CLASS.decode() in code or not _PATH.fullmatch(named):
            # Also for one line of text: a syntax error tells more than “it is not a path”.
            return _unpack(code.encode("utf-8", "surrogatepass"))
        return self._local(code)

    def _local(self, code: str) -> Files:
        scheme, is_url, _ = code.partition("://")
        if is_url:
            raise bad_code(f"code cannot be read from {scheme[:40]}:// URLs", _EXPECTED)
        if self.root is None:
            raise bad_code(
                "it is neither source text, an archive nor a URL, and this server has no"
                " `policy_code_root` from which paths are read",
                _EXPECTED,
            )
        try:
            root = self.root.resolve(strict=True)
            path = (root / code).resolve(strict=True)
            if not path.is_relative_to(root):
                raise bad_code(f"the path {code} leads out of {root}", f"a path under {root}")
            if path.is_dir():
                return policy_files(collect(_walk(path)))
            if not path.is_file():  # To open a pipe would block.
                raise bad_code(f"{path} is a special file", "a file or a folder")
            with path.open("rb") as file:
                return _unpack(file.read(CODE_BYTES_MAX + 1))
        except (OSError, ValueError) as error:
            raise bad_code(f"the path {code!r} cannot be read: {error}", _EXPECTED) from error


def without_credentials(code: str) -> str:
    """Return a URL without `user:password@`; return any other text unchanged."""
    return _CREDENTIALS.sub(r"\1", code)


def is_url(code: str) -> bool:
    """Return whether `code` is a URL, whose content must not be quoted in messages."""
    return code.lower().startswith(("http://", "https://"))


def _cause(error: Exception) -> str:
    """Return the reason for a failed download, without a quote of answers that are not HTTP."""
    if isinstance(error, OSError | httpx.ConnectError | httpx.InvalidURL):
        return str(error) or type(error).__name__
    return type(error).__name__


def _decode(content: bytes, shown: str) -> Files:
    """Return the files of downloaded content; the refusal of other content quotes nothing of it.

    The user may not be allowed to read what this server can download.
    """
    try:
        files = _unpack(content)
    except ServiceError as error:
        if error.code is Code.TOO_LARGE:
            raise
        files = {}
    if _CLASS not in files.get(ENTRY, b""):
        raise bad_code(
            f"{shown} serves no policy",
            f"a text or an archive that defines {_CLASS.decode()}; to learn what is"
            " wrong, put the code into the document itself, as text or in base64",
        )
    return files


def _walk(folder: Path) -> Iterator[tuple[str, bytes]]:
    for directory, _, names in os.walk(folder):
        for name in sorted(names):
            path = Path(directory, name)
            if path.is_symlink() or not path.is_file():
                raise bad_code(f"{path} is a link or a special file", "plain files and folders")
            with path.open("rb") as file:
                yield path.relative_to(folder).as_posix(), file.read(FILES_BYTES_MAX + 1)


def _unpack(content: bytes) -> Files:
    if len(content) > CODE_BYTES_MAX:
        raise _too_large()
    if is_archive(content):
        return read_archive(content)
    try:
        text = content.decode()
    except UnicodeDecodeError:
        raise bad_code("it is neither UTF-8 text nor a known archive", _EXPECTED) from None
    if "\0" in text or not text.strip():
        raise bad_code("it is empty or holds NUL characters", _EXPECTED)
    return {ENTRY: content}


def _from_data_url(code: str) -> bytes:
    head, comma, payload = code[5:].partition(",")
    if not comma:
        raise bad_code("the data: URL has no comma", "data:<media type>;base64,<content>")
    if head.lower().endswith(";base64"):
        return _from_base64("".join(urllib.parse.unquote(payload).split()))
    return urllib.parse.unquote_to_bytes(payload)


def _from_base64(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise bad_code(f"the base64 text is damaged: {error}", "base64 of an archive") from error


def _too_large() -> ServiceError:
    return ServiceError(
        Code.TOO_LARGE,
        f"code: it has more than {CODE_BYTES_MAX} bytes; omit files that the policy does not "
        "import",
        field="code",
        expected=f"at most {CODE_BYTES_MAX} bytes",
    )


def is_public(address: str) -> bool:
    """Return whether an address, as a resolver gives it, belongs to the public Internet.

    Python's own `is_global` is not enough: its result depends on Python's version, and an IPv6
    address may carry an IPv4 address.
    """
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
