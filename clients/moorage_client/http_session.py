"""The HTTP session that every client of this package uses.

`requests` itself would send requests for this machine to a proxy, and would send a password of
`~/.netrc` in place of the given token.
"""

import ssl
from collections.abc import Callable, Iterator
from typing import Any, Final

import requests
import urllib3
from requests.adapters import HTTPAdapter

from moorage_client.endpoint import Endpoint, certificate_stamp, socks_advice
from moorage_client.errors import CertificateRefused, ConnectionFailed, ProxyFailed

_UNSENT: Final = (
    urllib3.exceptions.NewConnectionError,
    urllib3.exceptions.ConnectTimeoutError,
    urllib3.exceptions.NameResolutionError,
    urllib3.exceptions.ProxyError,
    requests.exceptions.InvalidURL,
    requests.exceptions.InvalidSchema,
    ssl.SSLError,
)
"""Types of errors that occur before a request is sent."""


class _Trusting(HTTPAdapter):
    """Verifies certificates only with the given TLS context."""

    def __init__(self, context: ssl.SSLContext) -> None:
        self._context = context
        super().__init__()

    def init_poolmanager(self, *arguments: Any, **named: Any) -> None:
        """Open direct connections with the TLS context."""
        super().init_poolmanager(*arguments, **named, ssl_context=self._context)

    def proxy_manager_for(self, proxy: str, **named: Any) -> Any:
        """Open connections through a proxy with the TLS context."""
        return super().proxy_manager_for(proxy, **named, ssl_context=self._context)

    def cert_verify(self, *arguments: Any) -> None:
        """Do nothing: the TLS context has the only trusted authorities."""


class HttpSession(requests.Session):
    """An HTTP session for one server, with its token, proxy and TLS context.

    Args:
        endpoint: The HTTP address; its token is sent as `Authorization: Bearer …`.
        bearer: Returns the token for a request; None: the endpoint's own token.

    Raises:
        SettingRefused: The file of the authorities cannot be used.
    """

    def __init__(
        self, endpoint: Endpoint, bearer: Callable[[Endpoint], str | None] | None = None
    ) -> None:
        super().__init__()
        self._endpoint = endpoint
        self.through = endpoint.through
        """The part of error messages that names the proxy; empty without a proxy."""
        self.trust_env = False
        self._bearer = bearer
        if endpoint.token or bearer:
            self.auth = self._show_token
        if endpoint.proxy:
            self.proxies = {"http": endpoint.proxy, "https": endpoint.proxy}
        self._certificate = certificate_stamp()
        if endpoint.tls is not None:
            self.mount("https://", _Trusting(endpoint.tls))

    def request(self, *arguments: Any, **named: Any) -> requests.Response:
        """Send a request; a new connection uses the client's certificate as its files are now.

        Raises:
            SettingRefused: A renewed certificate cannot be used.
        """
        if self._certificate != (now := certificate_stamp()) and self._endpoint.tls is not None:
            self._certificate = now  # `tls` has read the files of the certificate.
        return super().request(*arguments, **named)

    def failure(self, error: Exception) -> ConnectionFailed:
        """Return the error of this package for an error of `requests`."""
        url = self._endpoint.shown
        tls = next((each for each in _causes(error) if isinstance(each, ssl.SSLError)), None)
        if tls is not None:
            return CertificateRefused(url, self._endpoint.tls_reason(tls) + self.through)
        if through := self.through:
            if "SOCKS support" in str(error):
                return ProxyFailed(url, socks_advice() + through)
            return ProxyFailed(url, _cause(error) + through)
        if isinstance(error, requests.exceptions.InvalidSchema | requests.exceptions.InvalidURL):
            return ConnectionFailed(url, "is not an http:// or https:// URL")
        return ConnectionFailed(url, _cause(error))

    def may_have_reached(self, error: BaseException) -> bool:
        """Return whether a request may have reached the server before this error."""
        return not any(isinstance(each, _UNSENT) for each in _causes(error))

    def _show_token(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        token = self._bearer(self._endpoint) if self._bearer else self._endpoint.token
        if token:
            request.headers["Authorization"] = f"Bearer {token}"
        return request


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, then the errors that caused it."""
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        inner = next((each for each in seen.args if isinstance(each, BaseException)), None)
        reason = getattr(inner, "reason", None)
        seen = seen.__cause__ or (reason if isinstance(reason, BaseException) else inner)


def _cause(error: BaseException) -> str:
    """Return the operating system's error, without the errors that wrap it."""
    last = error
    for each in _causes(error):
        if isinstance(each, OSError) and each.strerror:
            return each.strerror
        last = each
    return str(last)
