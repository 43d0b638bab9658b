"""One open socket to a server, with many requests in flight, matched by their `id`.

`Link` and `Watch` open another `Connection` when one ends. A `Connection` never retries.
"""

import asyncio
import contextlib
import http
import itertools
import json
import os
import ssl
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from websockets.exceptions import (
    ConnectionClosed,
    InvalidHandshake,
    InvalidProxy,
    InvalidStatus,
    InvalidURI,
    ProxyError,
)

from moorage.model import Code
from moorage.protocol.codes import CLOSE_CODES, SESSION_HEADER, Close
from moorage.protocol.errors import BadReply
from moorage.protocol.replies import Event, Reply, decode_reply
from moorage.records.json_values import JsonMapping
from moorage_client.answers import read_refusal
from moorage_client.endpoint import (
    CLIENT_CERT_VARIABLE,
    NO_TLS_ADVICE,
    Endpoint,
    socks_advice,
)
from moorage_client.errors import (
    CertificateRefused,
    ConnectionFailed,
    MoorageError,
    ProtocolViolated,
    ProxyFailed,
    Unauthorized,
    refusal,
)
from moorage_client.sign_in import asks_issuer, bearer_of

if TYPE_CHECKING:
    from moorage_client.client_socket import ClientSocket

REPLY_BYTES_MAX: Final = 16 * 1024 * 1024
"""Largest reply in bytes; a longer one closes the socket. Lists have pages for this reason."""

IN_FLIGHT_MAX: Final = 4096
"""Maximum requests of one socket that wait for replies; further ones are refused as `busy`."""

RESUME_SECONDS_MAX: Final = 10.0
"""Seconds that a server may take to answer whether it resumes a session."""

LEAVE_SECONDS_MAX: Final = 10.0
"""Seconds that a standby may take to answer messages that it already received."""

CLOSE_SECONDS_MAX: Final = 2.0
"""Seconds that a close waits for the server's close frame."""

QUIET_SECONDS: Final = 1.0
LIFE_SECONDS_MAX: Final = 2.0
"""If another server may take over, seconds without data after which the client pings a server that
owes a reply. After as many further seconds without data, the server counts as lost."""

_UNAUTHORIZED_STATUS: Final = frozenset({401, 403})
_BUSY_STATUS: Final = frozenset({429, 500, 502, 503, 504})  # The server may be back soon.


class ServerLeft(ConnectionFailed):
    """The server closed the socket, since it stops, or since another server now leads."""


class TokenReplaced(ConnectionFailed):
    """The server closed the socket, since the token expired; the client has a new token."""


class Connection:
    """One socket to a server.

    Args:
        socket: The open socket.
        endpoint: The address of the server.
        token: The token sent to the server; None: no token.

    Attributes:
        endpoint: The address of the server.
        watches: Whether the server may push messages when no request is open.
        on_event: Called with every pushed message.
        session: The session's name, for `resume`; "" if the server gives none.
        unanswered: Ids of messages without a reply when the socket closed; empty if the session
            cannot be resumed.
    """

    def __init__(self, socket: "ClientSocket", endpoint: Endpoint, token: str | None) -> None:
        self._socket = socket
        self._token = token
        self.endpoint = endpoint
        self._url = endpoint.shown
        self.watches = False
        response = socket.response
        self.session = response.headers.get(SESSION_HEADER, "") if response else ""
        self.unanswered: frozenset[str] = frozenset()
        self._coming: dict[str, Reply | None] = {}
        """Replies to messages of the previous connection, by message id; None: no reply yet."""
        self._numbers = itertools.count(1)
        self._waiting: dict[str, asyncio.Future[Reply]] = {}
        self._orphans: dict[str, Callable[[Reply], None]] = {}
        self._issued = 0
        self._end: MoorageError | None = None
        self.on_event: Callable[[Event], None] = _ignore_event
        self._reader = asyncio.create_task(self._read(), name="moorage-client-reader")
        self._guard: asyncio.Task[None] | None = None

    @classmethod
    async def open(cls, endpoint: Endpoint, open_seconds_max: float) -> "Connection":
        """Open a socket.

        Args:
            endpoint: Address of the WebSocket; its token is sent as `Authorization: Bearer …`.
            open_seconds_max: Longest time for connecting and the handshake together, in seconds.

        Raises:
            ConnectionFailed: Nothing answers at the address.
            CertificateRefused: The server's certificate is not trusted.
            ProtocolViolated: Something answers, but not a WebSocket server.
            RequestRefused: The server refused the token.
            SettingRefused: The file of the authorities cannot be used.
        """
        from websockets.asyncio.client import connect  # noqa: PLC0415  # Slow to import.

        from moorage_client.client_socket import ClientSocket  # noqa: PLC0415  # It imports websockets, too.

        token = await _bearer(endpoint)
        try:
            socket = await connect(
                endpoint.url,
                additional_headers={"Authorization": f"Bearer {token}"} if token else None,
                ssl=endpoint.tls,
                compression=None,  # Requests are short, and the latency counts.
                open_timeout=open_seconds_max,
                close_timeout=CLOSE_SECONDS_MAX,
                max_size=REPLY_BYTES_MAX,
                proxy=endpoint.proxy,
                create_connection=ClientSocket,
            )
        except (InvalidURI, InvalidProxy, InvalidHandshake, ImportError) as error:
            failed = _open_error(endpoint, error)
            if token is None and isinstance(failed, Unauthorized):
                failed.reason += endpoint.no_token
            raise failed from error
        except OSError as error:
            failed = _open_error(endpoint, error, open_seconds_max)
            # Without the causes: they are dozens of lines from the event loop that add nothing.
            raise failed from None
        assert isinstance(socket, ClientSocket)
        return cls(socket, endpoint, token)

    @property
    def ended(self) -> bool:
        """Whether no further request can be sent."""
        return self._end is not None

    async def resume(self, lost: "Connection", number: int) -> bool:
        """Resume the session of a lost connection, if the server still has the session.

        Returns:
            False if the server is a standby, which cannot resume sessions; otherwise True.

        Raises:
            ConnectionFailed: The socket ended, or there was no reply in time.
        """
        self._issued = lost._issued  # noqa: SLF001  # It is of this class.
        self._coming = dict.fromkeys(lost.unanswered)
        try:
            async with asyncio.timeout(RESUME_SECONDS_MAX):
                reply = await self.ask({"op": "resume", "session": lost.session}, number=number)
        except TimeoutError as error:
            raise ConnectionFailed(
                self._url, "the server did not confirm in time that it resumes the session"
            ) from error
        if not reply.success and read_refusal(reply).code == Code.NOT_LEADER:
            self._coming = {}
            return False
        still_open = set[str]()
        if reply.success:
            self.session = lost.session
            with contextlib.suppress(KeyError, TypeError):  # An odd reply: all are sent again.
                still_open = {str(each) for each in reply.data["open"]}
        self._coming = {
            number: came
            for number, came in self._coming.items()
            if came is not None or number in still_open
        }
        return True

    async def ask(
        self,
        message: JsonMapping,
        orphaned: Callable[[Reply], None] | None = None,
        number: int | None = None,
    ) -> Reply:
        """Send a message and return the reply to it, success or failure.

        Args:
            message: The message without an `id`.
            orphaned: Called with the reply if it comes after this call was cancelled.
            number: A unique id for the message; None: the next unused number. A message of the
                previous connection is not sent again if its reply is still to come.

        Raises:
            ConnectionFailed: The socket ended before the reply came.
            RequestRefused: Too many requests of this socket wait already.
            TypeError: The message has a value that JSON cannot represent.
            ValueError: The message has a number that JSON cannot represent.
        """
        if self._end is not None:
            raise self._end
        if len(self._waiting) >= IN_FLIGHT_MAX:
            reason = f"{IN_FLIGHT_MAX} requests of this client are open; await some of them first"
            raise refusal(Code.BUSY, reason)
        drawn = next(self._numbers) if number is None else number
        name = str(drawn)
        text = json.dumps({"id": name, **message}, allow_nan=False)
        self._issued = max(self._issued, drawn)
        sent = name in self._coming
        if (came := self._coming.pop(name, None)) is not None:
            return came
        future = asyncio.get_running_loop().create_future()
        self._waiting[name] = future
        try:
            if not sent:
                await self._socket.send(text)
            reply: Reply = await future
        except ConnectionClosed as error:
            await self._reader  # The reader sees the close, and stores the reason.
            raise self.end from error
        except asyncio.CancelledError:
            if orphaned is not None and self._end is None:
                self._orphans[name] = orphaned
            raise
        finally:
            self._waiting.pop(name, None)
            if future.done() and not future.cancelled():
                future.exception()  # Mark as retrieved, also if the send failed first.
        return reply

    async def wait_end(self) -> MoorageError:
        """Wait until the socket closes; return the reason."""
        await asyncio.shield(self._reader)
        return self.end

    async def close(self) -> None:
        """Close the socket; all waiting callers get `ConnectionFailed`."""
        self._finish(ConnectionFailed(self._url, "the client closed the socket"))
        await self._socket.close()
        await self._reader

    async def leave(self) -> None:
        """Close the socket of a standby when all messages are answered, or after a limited time."""
        answers = asyncio.gather(*self._waiting.values(), return_exceptions=True)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(answers, LEAVE_SECONDS_MAX)
        await self.close()

    def expect_life(self) -> None:
        """From now on, close the socket if the server owes a reply but stays silent."""
        self._guard = asyncio.create_task(self._look_for_life(), name="moorage-client-guard")

    async def _look_for_life(self) -> None:
        while self._end is None:
            before = self._socket.bytes_heard
            await asyncio.sleep(QUIET_SECONDS)
            if self._socket.bytes_heard != before or not (self._waiting or self.watches):
                continue
            with contextlib.suppress(ConnectionClosed, TimeoutError):
                async with asyncio.timeout(LIFE_SECONDS_MAX):
                    await (await self._socket.ping())
            if self._socket.bytes_heard == before and self._end is None:
                seconds = QUIET_SECONDS + LIFE_SECONDS_MAX
                self._socket.transport.abort()
                self._finish(ConnectionFailed(self._url, f"no sign of life for {seconds:g} s"))

    @property
    def end(self) -> MoorageError:
        """The reason why the socket closed."""
        return self._end or ConnectionFailed(self._url, "the socket closed")

    async def _read(self) -> None:
        end: MoorageError
        try:
            async for text in self._socket:
                self._hear(text)
            end = ConnectionFailed(self._url, "the server closed the socket")
        except ConnectionClosed as error:
            end = self._close_error(error)
            if isinstance(end, Unauthorized) and await self._has_another_token():
                end = TokenReplaced(self._url, "the token has expired, and there is a new one")
        except ProtocolViolated as error:
            end = error
        self._finish(end)
        await self._socket.close()

    async def _has_another_token(self) -> bool:
        """Return whether a new connection would send another token than this connection."""
        try:
            return await _bearer(self.endpoint) not in {None, self._token}
        except MoorageError:  # For example, the file is gone.
            return False

    def _close_error(self, error: ConnectionClosed) -> MoorageError:
        frame = error.rcvd
        if frame is None:
            if error.sent is not None and error.sent.code == Close.TOO_LARGE:
                return ProtocolViolated(
                    self._url, f"sent more than {REPLY_BYTES_MAX} bytes at once"
                )
            return ConnectionFailed(self._url, "the connection was lost")
        reason = frame.reason or CLOSE_CODES.get(frame.code, "")
        if frame.code == Close.TOO_LARGE:
            return refusal(Code.TOO_LARGE, reason)
        if frame.code == Close.UNAUTHORIZED:
            return refusal(Code.UNAUTHORIZED, reason)
        failed = ServerLeft if frame.code == Close.RESTART else ConnectionFailed
        return failed(self._url, f"the server closed the socket: {frame.code} {reason}")

    def _hear(self, text: str | bytes) -> None:
        """Pass a received message to the caller or watcher that waits for it."""
        try:
            reply = decode_reply(text)
        except BadReply as error:
            cause = f"{error}; it begins {text[:100]!r}"
            raise ProtocolViolated(self._url, cause) from error
        if isinstance(reply, Event):
            self.on_event(reply)
            return
        if reply.as_of:  # A standby's reply may be outdated: ask the leader.
            reply = _of_standby(reply)
        number = "" if reply.id is None else str(reply.id)
        if future := self._waiting.get(number):
            if not future.done():
                future.set_result(reply)
        elif orphaned := self._orphans.pop(number, None):
            orphaned(reply)
        elif number in self._coming:
            self._coming[number] = reply
        elif not number and not reply.success:
            # A refusal without an id is about the connection: every caller gets it.
            self._finish(read_refusal(reply))
        elif not (number.isdecimal() and int(number) <= self._issued):
            raise ProtocolViolated(
                self._url, f"the server answered a request that was never sent: {text[:100]!r}"
            )

    def _finish(self, end: MoorageError) -> None:
        if self._end is None:
            self._end = end
            if self.session and self._socket.close_code != Close.RESUMED:
                self.unanswered = frozenset({*self._waiting, *self._coming})
            if self._guard is not None:
                self._guard.cancel()
        self._orphans.clear()  # Leases in late replies end with their TTL.
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(self._end)


def _of_standby(reply: Reply) -> Reply:
    """Return a refusal that names the leader, in place of a standby's own answer."""
    details = {"code": Code.NOT_LEADER, "reason": "is a standby", "leader": reply.leader or None}
    return Reply(success=False, message="is a standby", details=details, id=reply.id)


def _open_error(endpoint: Endpoint, error: Exception, seconds_max: float = 0.0) -> MoorageError:
    """Return our error for a socket that `connect` could not open.

    Args:
        endpoint: The address that was tried.
        error: What `connect` raised; an ImportError if the package for SOCKS is missing.
        seconds_max: The time limit that a TimeoutError exceeded.
    """
    url = endpoint.shown
    match error:
        case InvalidURI():
            return ConnectionFailed(url, "is not a ws:// or wss:// URL")
        case ssl.SSLError():
            return CertificateRefused(url, endpoint.tls_reason(error) + endpoint.through)
        case ConnectionResetError(errno=None) if endpoint.tls:  # The event loop's own.
            reason = f"closed during the TLS handshake; perhaps {NO_TLS_ADVICE}"
            return CertificateRefused(url, reason + endpoint.through)
        case InvalidProxy(msg=cause):
            return ProxyFailed(url, cause + endpoint.through)
        case ProxyError() | ImportError():
            reason = socks_advice() if isinstance(error, ImportError) else str(error)
            return ProxyFailed(url, reason + endpoint.through)
        case InvalidHandshake():
            return _refusal_error(url, error)
        case TimeoutError():
            cause = f"no answer within {seconds_max:g} s"
        case _:  # An error of the system or of a library.
            # The system's text for an error number is clearer than the event loop's.
            number = getattr(error, "errno", None) or 0  # Negative if a name was not found.
            cause = (
                os.strerror(number)
                if number > 0
                else getattr(error, "strerror", None) or str(error)
            )
    if endpoint.proxy:
        return ProxyFailed(url, f"{cause}{endpoint.through}")
    failed = ConnectionFailed(url, cause)
    if not isinstance(error, TimeoutError):
        failed.add_note("Start a server with `moored serve --here`, or set MOORAGE_URL to its URL.")
    return failed


async def _bearer(endpoint: Endpoint) -> str | None:
    """Return the token to send now; a thread fetches the token if the issuer must renew it."""
    if asks_issuer(endpoint):
        return await asyncio.to_thread(bearer_of, endpoint)
    return bearer_of(endpoint)


def _refusal_error(url: str, error: InvalidHandshake) -> MoorageError:
    if isinstance(error.__cause__, EOFError):
        perhaps = "this port speaks TLS: use wss://"
        if not url.startswith("ws:"):
            perhaps = f"the server requires a client's certificate: see {CLIENT_CERT_VARIABLE}"
        return ConnectionFailed(url, f"closed during the handshake; perhaps {perhaps}")
    if not isinstance(error, InvalidStatus):
        return ProtocolViolated(url, f"does not answer as a WebSocket: {error}")
    status = error.response.status_code
    body = (error.response.body or b"").decode(errors="replace").strip()[:500]
    if status in _UNAUTHORIZED_STATUS:
        return refusal(Code.UNAUTHORIZED, body or f"the server at {url} refused the token")
    if status in _BUSY_STATUS:
        return ConnectionFailed(url, f"answers HTTP {status}: {body}")
    if status == http.HTTPStatus.UPGRADE_REQUIRED and body:  # A port for HTTP, or for TLS.
        with contextlib.suppress(ValueError, TypeError, KeyError):
            body = str(json.loads(body)["message"])
        return ProtocolViolated(url, body, other_port=True)
    return ProtocolViolated(url, f"answers HTTP {status}, no WebSocket")


def _ignore_event(event: Event) -> None:
    """Ignore an event: the default if there is no watcher."""
