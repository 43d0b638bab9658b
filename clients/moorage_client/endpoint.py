"""URL, token, proxy and trusted authorities of a server, for its WebSocket and its HTTP.

`Client` and the clients of `services` make one `Endpoint` for each address, from their arguments
and the environment; `addresses` chooses among them.

* White space at the ends of a URL, a token or a path is removed: files end with a line break.
* A proxy from the environment is used, except for this machine: a proxy cannot reach our loopback.
* A named authority is trusted in place of all authorities that this machine knows.
"""

import ipaddress
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from moorage.lazy import LazyModule
from moorage_client.errors import SettingRefused

if TYPE_CHECKING:
    import ssl
else:
    ssl = LazyModule("ssl")

URL_DEFAULT: Final = "ws://127.0.0.1:8765"
HTTP_URL_DEFAULT: Final = "http://127.0.0.1:8080"
"""The default HTTP address of `moored serve`. It replaces `http://<server-url>:3000` and `:8888` of
the documents, since one Moorage server embeds both services."""

ADDRESSES_MAX: Final = 16
"""Maximum addresses in one URL setting, separated by commas."""

TOKEN_CHARS_MAX: Final = 65_536
TOKEN_FILE_VARIABLE: Final = "MOORAGE_TOKEN_FILE"  # noqa: S105  # A name, no secret.
CA_FILE_VARIABLES: Final = (
    *("MOORAGE_CA_FILE", "SSL_CERT_FILE"),
    *("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
)
"""Variables, of which the first that is set names the CA file; the last two are those of
`requests`."""
CLIENT_CERT_VARIABLE: Final = "MOORAGE_CLIENT_CERT"
CLIENT_KEY_VARIABLE: Final = "MOORAGE_CLIENT_KEY"
"""Variables that name the PEM files of the client's certificate and key, for a server with
`tls_client_ca`. One file may contain both."""

_PROXY_SCHEMES: Final = ("http://", "https://", "socks4://", "socks4a://", "socks5")
_LOOPBACK_NAMES: Final = frozenset(
    {"localhost", "localhost.localdomain", "ip6-localhost", "ip6-loopback"}
)
_UNKNOWN_AUTHORITY: Final = frozenset({2, 18, 19, 20, 21})
"""OpenSSL's codes (X509_V_ERR_…) for a chain that ends at no trusted authority."""
NO_TLS_ADVICE: Final = "this port speaks no TLS: use http://, or ws:// for the WebSocket"
CA_PARAMETER: Final = "`ca_file=`"
"""Name of the parameter in messages; the command line replaces it by its option."""
_NO_TLS: Final = frozenset({"WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "UNEXPECTED_MESSAGE"})


def setting(given: str | None, *variables: str, default: str = "") -> str:
    """Return an argument, else the first variable that is set, without white space around it."""
    values = (given, *map(os.environ.get, variables))
    return next((text for each in values if each and (text := each.strip())), default)


@dataclass(frozen=True)
class Endpoint:
    """The WebSocket or the HTTP address of a server, with its credentials.

    Args:
        url: `ws://`, `wss://`, `http://` or `https://`.
        token: The caller's token; None: no token, or that of `token_file` or `moorage login`.
        ca_file: The caller's file of authorities; empty: as the environment says.
        token_file: File with the token, read for each connection and each request over HTTP.
        signs_in: Whether to send the token that `moorage login` stored.
        named_by: URL of the standby that named this address; the login stored for this standby is
            used. Empty: the user named this address.
    """

    url: str
    token: str | None = field(repr=False)
    ca_file: str = ""
    signs_in: bool = False
    named_by: str = ""
    token_file: str = ""

    @classmethod
    def of_socket(
        cls, url: str | None, token: str | None, ca_file: str | None
    ) -> tuple["Endpoint", ...]:
        """Return WebSocket endpoints from the arguments, else the environment, else the default.

        Raises:
            SettingRefused: The environment's URL has another scheme, a URL has a blank address or
                too many addresses, or no header can carry the token.
        """
        found = _read_urls(url, "url", "MOORAGE_URL", URL_DEFAULT, ("ws://", "wss://"))
        return cls._each(found, token, ca_file)

    @classmethod
    def of_http(
        cls, url: str | None, token: str | None, ca_file: str | None
    ) -> tuple["Endpoint", ...]:
        """Return HTTP endpoints from the arguments, else the environment, else the default."""
        schemes = ("http://", "https://")
        found = _read_urls(url, "http_url", "MOORAGE_HTTP_URL", HTTP_URL_DEFAULT, schemes)
        return cls._each([each.rstrip("/") for each in found], token, ca_file)

    @classmethod
    def _each(
        cls, urls: Sequence[str], token: str | None, ca_file: str | None
    ) -> tuple["Endpoint", ...]:
        shown, authorities = read_token(token), setting(ca_file)
        file = "" if shown else setting(None, TOKEN_FILE_VARIABLE)
        return tuple(
            cls(url, shown, authorities, signs_in=True, token_file=file)
            for url in dict.fromkeys(urls)
        )

    @property
    def shown(self) -> str:
        """The URL without credentials, for messages."""
        return _without_credentials(self.url)

    @property
    def no_token(self) -> str:
        """The part of a refusal that names the empty token file; empty without such a file."""
        file = self.token_file
        return f"; {TOKEN_FILE_VARIABLE} names {file}, which is empty" if file else ""

    @property
    def is_here(self) -> bool:
        """Whether the endpoint is on this machine."""
        try:
            host = urlsplit(self.url).hostname or ""
        except ValueError:  # Not a URL: connecting reports the fault.
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

    @property
    def tls(self) -> "ssl.SSLContext | None":
        """The TLS context that verifies the server; None for a URL without TLS.

        It reads the client's certificate from its files each time, since they may be renewed.

        Raises:
            SettingRefused: The file of the authorities, or of the certificate, cannot be used.
        """
        context = self._verifier
        certificate = setting(None, CLIENT_CERT_VARIABLE) if self.signs_in else ""
        if context is not None and certificate:
            key = setting(None, CLIENT_KEY_VARIABLE)
            files = f"{certificate} and {key}" if key else certificate
            try:
                # Give an empty passphrase, so that OpenSSL does not ask the user for one.
                context.load_cert_chain(certificate, key or None, password=str)
            except ssl.SSLError as error:
                expected = "expected a certificate and its key without a passphrase, as PEM"
                raise SettingRefused(CLIENT_CERT_VARIABLE, f"{files}: {expected}") from error
            except OSError as error:
                reason = f"cannot read {files}: {error.strerror}"
                raise SettingRefused(CLIENT_CERT_VARIABLE, reason) from error
        return context

    @cached_property
    def _verifier(self) -> "ssl.SSLContext | None":
        if not self.url.lower().startswith(("wss:", "https:")):
            return None
        named, path = self._authorities
        if not named:
            import certifi  # noqa: PLC0415  # Only where it is needed.

            context = ssl.create_default_context()
            context.load_verify_locations(certifi.where())  # Some systems lack a store.
            return context
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

    @property
    def _authorities(self) -> tuple[str, str]:
        """The setting that names the authorities' file, and that file; empty: the defaults."""
        if self.ca_file:
            return "ca_file", self.ca_file
        named = next(filter(partial(setting, None), CA_FILE_VARIABLES), "")
        return named, setting(None, named) if named else ""

    def tls_reason(self, error: "ssl.SSLError") -> str:
        """Return why TLS failed, and what to do about it."""
        if not isinstance(error, ssl.SSLCertVerificationError):
            plain = f"; {NO_TLS_ADVICE}" if error.reason in _NO_TLS else ""
            return f"TLS failed: {error.reason or error}{plain}"
        if error.verify_code not in _UNKNOWN_AUTHORITY:
            return f"its certificate is refused: {error.verify_message}"
        named, path = self._authorities
        where = f"is not in {path}" if named else "is not known here"
        by = CA_PARAMETER if named == "ca_file" else named
        advice = f"{by} names that file, but must name a file with that authority's certificate"
        if os.path.isdir(path):  # noqa: PTH112  # As in `tls`.
            advice = f"{by} names that folder; name a file, or prepare it with `openssl rehash`"
        if not named:
            ours = f"{CA_PARAMETER} or {CA_FILE_VARIABLES[0]}"
            advice = f"set {ours} to a file with the authority's certificate"
        elif named in CA_FILE_VARIABLES[1:]:
            advice += f"; {CA_FILE_VARIABLES[0]} overrides {named}"
        return (
            f"its certificate is signed by an authority that {where} ({error.verify_message});"
            f" {advice}"
        )

    @cached_property
    def _proxy(self) -> tuple[str, str]:
        """The environment's proxy for this URL, and the variable; empty for none."""
        from urllib.request import getproxies  # noqa: PLC0415  # Slow to import.

        known = {} if self.is_here else getproxies()
        scheme = "https" if self.url.lower().startswith(("wss:", "https:")) else "http"
        name = next((each for each in (scheme, "all") if known.get(each)), "")
        if not name:
            return "", ""
        from requests.utils import should_bypass_proxies  # noqa: PLC0415  # Likewise.

        if should_bypass_proxies(self.url, no_proxy=None):
            return "", ""
        variable = f"{name}_proxy" if os.environ.get(f"{name}_proxy") else f"{name}_proxy".upper()
        found = known[name] if "://" in known[name] else f"http://{known[name]}"  # As curl has it.
        if not found.lower().startswith(_PROXY_SCHEMES):
            expected = "expected a proxy, such as http://proxy:3128 or socks5h://proxy:1080"
            raise SettingRefused(variable, expected)
        return found, variable

    @property
    def proxy(self) -> str | None:
        """The environment's proxy for this URL, or None. For `ws:`, the proxy is that for HTTP.

        Raises:
            SettingRefused: The proxy's URL has an unsupported scheme.
        """
        return self._proxy[0] or None

    @property
    def through(self) -> str:
        """The part of an error message that names the proxy; empty without a proxy."""
        found, variable = self._proxy
        if not found:
            return ""
        host, proxy = urlsplit(self.url).hostname, _without_credentials(found)
        return f" (through the proxy {proxy} of {variable}; NO_PROXY={host} does without)"


def split_addresses(urls: str) -> list[str]:
    """Return the addresses of a URL that names several, separated by commas."""
    return [each.strip() for each in urls.split(",")]


def _read_urls(
    given: str | None, parameter: str, variable: str, default: str, schemes: tuple[str, ...]
) -> list[str]:
    """Return the URLs to use."""
    found = split_addresses(setting(given, variable, default=default))
    named = parameter if setting(given) else variable
    begins = f"begins with {' or '.join(schemes)}"
    if "" in found:
        raise SettingRefused(
            named, f"expected addresses separated by commas, each of which {begins}; one is blank"
        )
    if len(found) > ADDRESSES_MAX:
        raise SettingRefused(named, f"expected at most {ADDRESSES_MAX} addresses, got {len(found)}")
    if named == variable and not all(each.lower().startswith(schemes) for each in found):
        raise SettingRefused(variable, f"expected a URL that {begins}")
    return found


def read_token(given: str | None) -> str | None:
    """Return the token to send, or None.

    Raises:
        SettingRefused: No header can carry the token.
    """
    named = "token" if setting(given) else "MOORAGE_TOKEN"
    return check_token(setting(given, "MOORAGE_TOKEN"), named) or None


def read_token_file(path: str) -> str | None:
    """Return the token in the file that `MOORAGE_TOKEN_FILE` names; None if the file is empty.

    Raises:
        SettingRefused: The file cannot be read, or no header can carry its content.
    """
    try:
        with open(path, encoding="utf-8-sig") as file:  # noqa: PTH123  # pathlib is slow to import.
            token = file.read(TOKEN_CHARS_MAX + 1).strip()
    except (OSError, ValueError) as error:
        cause = getattr(error, "strerror", None) or "it is not text"
        raise SettingRefused(TOKEN_FILE_VARIABLE, f"cannot read {path}: {cause}") from error
    if len(token) > TOKEN_CHARS_MAX:
        raise SettingRefused(TOKEN_FILE_VARIABLE, f"{path} is longer than any token")
    return check_token(token, TOKEN_FILE_VARIABLE) or None


def check_token(token: str, named: str) -> str:
    """Return a token; refuse one that an HTTP header cannot hold.

    Args:
        token: The token, which may be empty.
        named: The source of the token, for the error: the token itself is a secret.

    Raises:
        SettingRefused: No header can carry the token.
    """
    try:
        sendable = token.encode("iso-8859-1").decode("iso-8859-1").isprintable()
    except UnicodeEncodeError:
        sendable = False
    if not sendable:
        wanted = "expected one token, of printable characters that a header of HTTP can carry"
        raise SettingRefused(named, wanted)
    return token


def certificate_stamp() -> list[tuple[int, int, int] | None]:
    """Return a value that differs once the files of the client's certificate have changed."""
    found: list[tuple[int, int, int] | None] = []
    for variable in (CLIENT_CERT_VARIABLE, CLIENT_KEY_VARIABLE):
        try:
            status = os.stat(setting(None, variable))  # noqa: PTH116  # pathlib is slow to import.
        except OSError:  # The file does not exist.
            found.append(None)
        else:
            found.append((status.st_ino, status.st_size, status.st_mtime_ns))
    return found


def socks_advice() -> str:
    """Return the packages to install for a SOCKS proxy if they are missing."""
    from moorage.extras import install_command  # noqa: PLC0415  # Slow to import.

    return f"the proxy speaks SOCKS, which needs more packages: {install_command('socks')}"


def _without_credentials(url: str) -> str:
    scheme, separator, rest = url.rpartition("://")
    authority, slash, path = rest.partition("/")
    return scheme + separator + authority.rpartition("@")[2] + slash + path
