"""Calls one cluster's API server, with bytes or plain JSON.

The client library logs in (kubeconfig with certificates, tokens and plugins; the account of a pod)
and pools connections. Its models are not used: they cost ten times as much as JSON, and refuse
objects that the API server accepts. Every call has a time limit.
"""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, Final, Self

import aiohttp
import msgspec
from yaml import YAMLError

from moorage.backends.kubernetes.client_library import (
    ApiClient,
    ConfigException,
    Configuration,
    RESTClientObject,
    load_incluster_config,
    load_kube_config,
)
from moorage.backends.kubernetes.errors import ConfigurationError, NoAnswerError, RefusedError
from moorage.backends.kubernetes.objects import ApiStatus
from moorage.records.json_values import JsonObject, JsonValue

IN_CLUSTER: Final = "in-cluster"
"""The context name that means: the cluster in which this process runs as a pod."""
CONNECT_SECONDS_MAX: Final = 10.0
CALL_SECONDS_MAX: Final = 30.0
SILENCE_SECONDS_MAX: Final = 150.0
"""Longest time without data on a stream, unless its reader sets another limit."""
CONNECTIONS_MAX: Final = 64
"""Maximum open connections to one API server; further calls wait for a free connection."""
_UNAUTHORIZED: Final = 401

_STATUS: Final = msgspec.json.Decoder(ApiStatus)
_PATCH: Final = "application/merge-patch+json"


class _Connector(aiohttp.TCPConnector):  # type: ignore[misc]  # The extra may be missing.
    """Aborts connections after their last use: a TLS shutdown could outlast the event loop."""

    def _release(self, key: Any, protocol: Any, *, should_close: bool = False) -> None:
        is_last = should_close or protocol.should_close
        if is_last:
            protocol.abort()
        super()._release(key, protocol, should_close=is_last)


class _RestClient(RESTClientObject):  # type: ignore[misc]  # As above.
    def _create_connector(self) -> aiohttp.TCPConnector:
        return _Connector(limit=self.maxsize, ssl=self.ssl_context)


def _open_client(configuration: Configuration) -> ApiClient:
    api = ApiClient(configuration)
    api.rest_client = _RestClient(configuration)
    return api


class ClusterConnection:
    """An open connection to a cluster.

    Args:
        configuration: Address of its API server, and the login.
        kubeconfig: The file with the login; it is read again when the login has expired.
        context: Context in the kubeconfig.
    """

    def __init__(self, configuration: Configuration, kubeconfig: Path | None, context: str) -> None:
        self._configuration = configuration
        self._kubeconfig, self._context = kubeconfig, context
        self._api = _open_client(configuration)
        self._earlier: ApiClient | None = None
        self._logging_in = asyncio.Lock()
        self._logins = 1

    @classmethod
    async def open(cls, kubeconfig: Path | None = None, context: str = "") -> Self:
        """Log in to a cluster.

        Args:
            kubeconfig: The file with the login; None: the files in `KUBECONFIG`, else
                `~/.kube/config`.
            context: Context in the file; empty: the current one, or inside a pod, without
                `kubeconfig`, the pod's account; `IN_CLUSTER`: the pod's account.

        Raises:
            ConfigurationError: The kubeconfig cannot be read.
        """
        configuration = Configuration()
        configuration.connection_pool_maxsize = CONNECTIONS_MAX
        await _log_in(configuration, kubeconfig, context)
        return cls(configuration, kubeconfig, context)

    async def close(self) -> None:
        """Close the connections; calls under way fail."""
        for each in filter(None, (self._api, self._earlier)):
            await each.close()  # type: ignore[no-untyped-call]  # The library's.

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def read(self, path: str, **query: JsonValue) -> bytes:
        """Return the body of a GET.

        Raises:
            RefusedError: The API server refused the call.
            NoAnswerError: The API server did not answer in time.
        """
        return await self._send("GET", path, query, None)

    async def call(
        self, method: str, path: str, body: JsonValue = None, **query: JsonValue
    ) -> JsonValue:
        """Send a request with a JSON body, and return the JSON response; a PATCH is a merge patch.

        Raises:
            RefusedError: The API server refused the call.
            NoAnswerError: The API server did not answer in time.
        """
        return msgspec.json.decode(await self._send(method, path, query, body))

    async def _send(self, method: str, path: str, query: JsonObject, body: JsonValue) -> bytes:
        bound = aiohttp.ClientTimeout(CALL_SECONDS_MAX, sock_connect=CONNECT_SECONDS_MAX)
        async with self._answer(method, path, query, body, bound) as response:
            content: bytes = await response.read()
            return content

    @contextlib.asynccontextmanager
    async def stream(
        self, path: str, silence_seconds: float = SILENCE_SECONDS_MAX, **query: JsonValue
    ) -> AsyncIterator[aiohttp.StreamReader]:
        """Open a GET whose response arrives line by line; reading it raises the errors of `read`.

        Args:
            path: The path to read.
            silence_seconds: Longest time without data; after it the connection counts as cut.
            query: Query parameters.
        """
        bound = aiohttp.ClientTimeout(
            None, sock_connect=CONNECT_SECONDS_MAX, sock_read=silence_seconds
        )
        async with self._answer("GET", path, query, None, bound) as response:
            yield response.content

    @contextlib.asynccontextmanager
    async def socket(
        self, path: str, query: Sequence[tuple[str, str]], protocol: str
    ) -> AsyncIterator[aiohttp.ClientWebSocketResponse]:
        """Open a WebSocket to the API server, for commands in containers.

        Raises:
            RefusedError: The API server refused the call.
            NoAnswerError: The API server did not answer in time, or cut the connection.
        """
        try:
            async with asyncio.timeout(CALL_SECONDS_MAX):
                logins = self._logins
                try:
                    opened = await self._connect(path, query, protocol)
                except aiohttp.WSServerHandshakeError as error:
                    if error.status != _UNAUTHORIZED:
                        raise
                    await self._log_in_again(logins)
                    opened = await self._connect(path, query, protocol)
            async with opened:
                yield opened
        except aiohttp.WSServerHandshakeError as error:
            raise RefusedError(error.status, "", error.message) from error
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            said = str(error) or type(error).__name__
            raise NoAnswerError(f"{self._configuration.host}: {said}") from error

    async def _connect(
        self, path: str, query: Sequence[tuple[str, str]], protocol: str
    ) -> aiohttp.ClientWebSocketResponse:
        request = await self._api.param_serialize(
            "GET", path, query_params=list(query), auth_settings=["BearerToken"]
        )
        rest = self._api.rest_client
        if rest.pool_manager is None:
            rest.pool_manager = rest._create_pool_manager()  # noqa: SLF001  # As the library does.
        return await rest.pool_manager.ws_connect(
            request[1], headers=request[2], protocols=(protocol,), proxy=rest.proxy, max_msg_size=0
        )

    @contextlib.asynccontextmanager
    async def _answer(
        self,
        method: str,
        path: str,
        query: JsonObject,
        body: JsonValue,
        bound: aiohttp.ClientTimeout,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        try:
            logins = self._logins
            response = await self._request(method, path, query, body, bound)
            if response.status == _UNAUTHORIZED:
                response.release()
                await self._log_in_again(logins)
                response = await self._request(method, path, query, body, bound)
            async with response:
                if not response.ok:
                    raise await _refusal(response)
                yield response
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            cause = str(error) or type(error).__name__
            raise NoAnswerError(f"{self._configuration.host}: {cause}") from error
        except ConfigException as error:  # The library failed to renew a token.
            raise ConfigurationError(f"{self._configuration.host}: {error}") from error

    async def _log_in_again(self, logins: int) -> None:
        """Log in again, once for all calls that were refused with the same login."""
        async with self._logging_in:
            if self._logins != logins:
                return  # Another call has logged in meanwhile.
            before = _certificates(self._configuration)
            await _log_in(self._configuration, self._kubeconfig, self._context)
            self._logins += 1
            if _certificates(self._configuration) == before:
                return
            # A client reads certificates only once, so replace the client; calls on the former
            # client may still end.
            if self._earlier is not None:
                await self._earlier.close()  # type: ignore[no-untyped-call]  # The library's.
            self._earlier, self._api = self._api, _open_client(self._configuration)

    async def _request(
        self,
        method: str,
        path: str,
        query: JsonObject,
        body: JsonValue,
        bound: aiohttp.ClientTimeout,
    ) -> aiohttp.ClientResponse:
        headers = {"Accept": "application/json"}
        if body is not None:
            headers["Content-Type"] = _PATCH if method == "PATCH" else "application/json"
        request = await self._api.param_serialize(
            method,
            path,
            query_params=[(key, value) for key, value in query.items() if value not in {"", None}],
            header_params=headers,
            body=body,
            auth_settings=["BearerToken"],
        )
        answer = await self._api.call_api(*request, _request_timeout=bound, _preload_content=False)
        response: aiohttp.ClientResponse = answer.response
        return response


async def _refusal(response: aiohttp.ClientResponse) -> RefusedError:
    text = await response.read()
    try:
        status = _STATUS.decode(text)
    except msgspec.MsgspecError:  # The answer is from a proxy in between.
        status = ApiStatus(message=text[:500].decode(errors="replace"))
    return RefusedError(response.status, status.reason or str(response.reason), status.message)


def _certificates(configuration: Configuration) -> tuple[str | None, ...]:
    return configuration.cert_file, configuration.key_file, configuration.ssl_ca_cert


def _check_there(kubeconfig: Path | None) -> None:
    """Raise an error if the kubeconfig is missing: the library would write to stderr."""
    files = str(kubeconfig or os.environ.get("KUBECONFIG") or "~/.kube/config").split(os.pathsep)
    paths = map(os.path.expanduser, files)  # No error without a home folder.
    if not any(Path(each).is_file() for each in paths):
        raise ConfigurationError(f"there is no kubeconfig {' or '.join(files)}; set KUBECONFIG")


async def _log_in(configuration: Configuration, kubeconfig: Path | None, context: str) -> None:
    unnamed = kubeconfig is None and not context and "KUBERNETES_SERVICE_HOST" in os.environ
    inside = unnamed or context == IN_CLUSTER
    if not inside:
        _check_there(kubeconfig)
    try:
        if inside:
            load_incluster_config(configuration)  # type: ignore[no-untyped-call]  # The library's.
        else:
            file = str(kubeconfig) if kubeconfig else None
            # A kubeconfig may run a program that fetches a token.
            async with asyncio.timeout(CALL_SECONDS_MAX):
                await load_kube_config(  # type: ignore[no-untyped-call]  # The library's.
                    file, context or None, configuration, persist_config=False
                )
    except (ConfigException, OSError, ValueError, TypeError, TimeoutError, YAMLError) as error:
        place = "the pod's account" if inside else kubeconfig or "the default kubeconfig"
        if isinstance(error, TypeError | YAMLError):
            raise ConfigurationError(f"{place}: the file is not a kubeconfig") from error
        raise ConfigurationError(f"{place}: {str(error) or type(error).__name__}") from error
