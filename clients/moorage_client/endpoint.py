"""URL, token, proxy and trusted authorities of a server, alike for its WebSocket and its HTTP.

`Client` and the clients of `services` make one of what they were given and of the environment.

* White space at the ends of a URL, a token or a path is left out: files end with a line break.
* A proxy of the environment is used, but never to this machine: it cannot reach our loopback.
* An authority that is named is trusted in place of all that are known here.
"""

import ipaddress
import os
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from moorage_client.errors import SettingRefused
from moorage_client.lazy import LazyModule

if TYPE_CHECKING:
    import ssl
else:
    ssl = LazyModule("ssl")

__all__ = [
    "HTTP_URL_DEFAULT",
    "URL_DEFAULT",
    "Endpoint",
    "checked_token",
    "read_token",
    "setting",
    "tls_reason",
]

URL_DEFAULT: Final = "ws://127.0.0.1:8765"
HTTP_URL_DEFAULT: Final = "http://127.0.0.1:8080"
"""Where `moored serve` answers HTTP; it stands in for the documents' `http://<server-url>:3000`
and `:8888`, since one Moorage server embeds both services."""

CA_FILE_VARIABLES: Final = (
    *("MOORAGE_CA_FILE", "SSL_CERT_FILE"),
    *("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
)
"""The first that is set names the CA file; the last two are those of `requests`."""

_LOOPBACK_NAMES: Final = frozenset(
    {"localhost", "localhost.localdomain", "ip6-localhost", "ip6-loopback"}
)
_UNKNOWN_AUTHORITY: Final = frozenset({2, 18, 19, 20, 21})
"""OpenSSL's codes (X509_V_ERR_…) for a chain that ends at no trusted authority."""
NO_TLS_ADVICE: Final = "this port speaks no TLS: use http://, or ws:// for the WebSocket"
CA_PARAMETER: Final = "`ca_file=`"
"""How messages call the clients' parameter; the command line calls it by its option."""
_NO_TLS: Final = frozenset({"WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "UNEXPECTED_MESSAGE"})


def setting(given: str | None, *variables: str, default: str = "") -> str:
    """Return what was given, else the first variable that is set, without white space around it."""
    values = (given, *map(os.environ.get, variables))
    return next((text for each in values if each and (text := each.strip())), default)


@dataclass(frozen=True)
class Endpoint:
    """One side of a server.

    Args:
        url: `ws://`, `wss://`, `http://` or `https://`.
        token: Who we are; None shows nothing, or what `moorage login` stored.
        ca_file: Given by the caller; empty: as the environment says.
        signs_in: Whether what `moorage login` stored is shown.

    """

    url: str
    token: str | None = field(repr=False)
    ca_file: str = ""
    signs_in: bool = False

    @classmethod
    def of_socket(cls, url: str | None, token: str | None, ca_file: str | None) -> "Endpoint":
        """Return the WebSocket endpoint by arguments, else environment, else defaults.

        Raises:
            SettingRefused: The environment's URL is of something else, or the token cannot be sent.

        """
        found = _read_url(url, "MOORAGE_URL", URL_DEFAULT, ("ws://", "wss://"))
        return cls(found, read_token(token), setting(ca_file), signs_in=True)

    @classmethod
    def of_http(cls, url: str | None, token: str | None, ca_file: str | None) -> "Endpoint":
        """Return the HTTP endpoint, likewise."""
        schemes = ("http://", "https://")
        found = _read_url(url, "MOORAGE_HTTP_URL", HTTP_URL_DEFAULT, schemes)
        return cls(found.rstrip("/"), read_token(token), setting(ca_file), signs_in=True)

    @property
    def shown(self) -> str:
        """The URL for messages: without credentials."""
        return _without_credentials(self.url)

    @property
    def is_here(self) -> bool:
        """Whether it is this machine."""
        try:
            host = urlsplit(self.url).hostname or ""
        except ValueError:  # No URL: connecting says so.
            return False
        name = host.removesuffix(".").partition("%")[0]
        if name in _LOOPBACK_NAMES or name.endswith(".localhost"):
            return True
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return False
        mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
        return (mapped or address).is_loopback or (mapped or address).is_unspecified

    @cached_property
    def tls(self) -> "ssl.SSLContext | None":
        """The TLS context to verify the server with; None for a URL without TLS.

        Raises:
            SettingRefused: The file of the authorities cannot be used.

        """
        if not self.url.lower().startswith(("wss:", "https:")):
            return None
        of_environment = next(filter(partial(setting, None), CA_FILE_VARIABLES), "")
        named = "ca_file" if self.ca_file else of_environment
        if not named:
            import certifi  # noqa: PLC0415  # Only where it is needed.

            context = ssl.create_default_context()  # Some systems have no store that it finds.
            context.load_verify_locations(certifi.where())
            return context
        path = self.ca_file or setting(None, named)
        is_folder = os.path.isdir(path)  # noqa: PTH112  # As OpenSSL takes it.
        try:
            if is_folder:
                return ssl.create_default_context(capath=path)
            return ssl.create_default_context(cafile=path)
        except ssl.SSLError as error:
            raise SettingRefused(named, f"{path} has no certificate in PEM format") from error
        except (OSError, ValueError) as error:
            cause = getattr(error, "strerror", None) or str(error)
            raise SettingRefused(named, f"cannot read {path}: {cause}") from error

    @cached_property
    def proxy(self) -> str | None:
        """The environment's proxy for this URL, if any: of HTTP for `ws:`, of HTTPS for `wss:`."""
        from urllib.request import getproxies  # noqa: PLC0415  # Slow to import.

        known = {} if self.is_here else getproxies()
        scheme = "https" if self.url.lower().startswith(("wss:", "https:")) else "http"
        found = known.get(scheme) or known.get("all")
        if not found:
            return None
        from requests.utils import should_bypass_proxies  # noqa: PLC0415  # Likewise.

        return None if should_bypass_proxies(self.url, no_proxy=None) else found

    @property
    def through(self) -> str:
        """The part of an error message that names the proxy; empty without one."""
        if not self.proxy:
            return ""
        host, proxy = urlsplit(self.url).hostname, _without_credentials(self.proxy)
        return f" (through the proxy {proxy}; NO_PROXY={host} does without)"


def _read_url(given: str | None, variable: str, default: str, schemes: tuple[str, ...]) -> str:
    """Return the URL to use.

    Raises:
        SettingRefused: The variable's has another scheme; connecting says so of one that is given.

    """
    found = setting(given, variable, default=default)
    if not setting(given) and not found.lower().startswith(schemes):
        raise SettingRefused(variable, f"expected a URL that begins with {' or '.join(schemes)}")
    return found


def read_token(given: str | None) -> str | None:
    """Return the token to show, if any.

    Raises:
        SettingRefused: No header can carry it.

    """
    named = "token" if setting(given) else "MOORAGE_TOKEN"
    return checked_token(setting(given, "MOORAGE_TOKEN"), named) or None


def checked_token(token: str, named: str) -> str:
    """Return a token that a header can carry.

    Args:
        token: May be empty.
        named: Where it is from, for the error: the token itself is a secret.

    Raises:
        SettingRefused: No header can carry it.

    """
    try:
        sendable = token.encode("iso-8859-1").decode("iso-8859-1").isprintable()
    except UnicodeEncodeError:
        sendable = False
    if not sendable:
        wanted = "expected one token, of printable characters that a header of HTTP can carry"
        raise SettingRefused(named, wanted)
    return token


def tls_reason(error: "ssl.SSLError") -> str:
    """Return why TLS failed, and what to do about it."""
    if isinstance(error, ssl.SSLCertVerificationError):
        if error.verify_code in _UNKNOWN_AUTHORITY:
            return (
                "its certificate is signed by an authority that is not known here "
                f"({error.verify_message}); name a file with the authority's certificate in "
                f"{CA_PARAMETER} or MOORAGE_CA_FILE"
            )
        return f"its certificate is refused: {error.verify_message}"
    plain = f"; {NO_TLS_ADVICE}" if error.reason in _NO_TLS else ""
    return f"TLS failed: {error.reason or error}{plain}"


def _without_credentials(url: str) -> str:
    scheme, separator, rest = url.rpartition("://")
    authority, slash, path = rest.partition("/")
    return scheme + separator + authority.rpartition("@")[2] + slash + path
