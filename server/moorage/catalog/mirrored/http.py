"""Calls one external service over HTTP, with a deadline, retries and a circuit breaker.

`catalog.mirrored.services` is the caller. Even if the service refuses, resets, stalls, drips, lies
or sends too much, a request ends within its time: with the parsed answer, or with `unavailable`,
which names the service and its URL without credentials.

    WrongAnswer    the service's answer does not have its documented form; stays in this package
"""

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from moorage.catalog.limits import DOCUMENT_BYTES_MAX, RESULT_BYTES_MAX
from moorage.lazy import LazyModule
from moorage.model import Code
from moorage.protocol.faults import ServiceError

if TYPE_CHECKING:
    import httpx
else:  # httpx is slow to import, and few servers use it.
    httpx = LazyModule("httpx")

ATTEMPTS_MAX: Final = 3
"""Maximum attempts of one request, within its deadline; all requests here change nothing."""
BACKOFF_SECONDS: Final = 0.05
"""Longest pause in seconds before the second attempt; before each later one, twice as long."""
SILENCE_SECONDS_FIRST: Final = 2.0
"""Longest seconds without data in the first attempt; each further attempt multiplies them by four.

The last attempt gets all remaining time. So a slow service can still answer, and a stalled
connection is soon replaced."""
REDIRECTS_MAX: Final = 2
"""Maximum redirects that one attempt follows, only on the same host."""
CONNECTIONS_MAX: Final = 16
"""Maximum open connections to one service; further requests wait for one, within their deadline."""
KEEP_ALIVE_SECONDS: Final = 3.0
"""Seconds for which an idle connection may be reused. Most servers close idle connections after
five seconds, and a request at that moment would be lost."""
FAILURES_MAX: Final = 5
"""Failures in a row after which no requests are sent to a service for a while."""
OPEN_SECONDS_FIRST: Final = 0.25
OPEN_SECONDS_MAX: Final = 5.0
"""Longest pause of requests after failures; it doubles from `OPEN_SECONDS_FIRST`, randomized."""
ANSWER_BYTES_MAX: Final = RESULT_BYTES_MAX
"""Longest answer in bytes; a longer one is not read to its end."""
ONE_BYTES_MAX: Final = 2 * DOCUMENT_BYTES_MAX
"""Longest answer about one document or one decision, in bytes, with its envelope."""
SHOWN_CHARS_MAX: Final = 200
"""Maximum characters of an invalid answer that a message quotes."""
READ_HERE_BYTES_MAX: Final = 64 * 1024
"""Answers up to this size are decoded on the event loop, larger ones in a thread."""

_REPEAT_STATUSES: Final = frozenset({408, 425, 429})
_REDIRECTS_OF_ANY: Final = frozenset({307, 308})  # Other statuses may turn a POST into a GET.
_CHANCE: Final = random.SystemRandom()

T = TypeVar("T")


class WrongAnswer(Exception):  # noqa: N818  # Used only in this package.
    """The service's answer does not have its documented form.

    Args:
        what: The end of a sentence that begins with the service's name.
        again: Whether another attempt may succeed.
    """

    def __init__(self, what: str, *, again: bool = False) -> None:
        super().__init__(what)
        self.what = what
        self.again = again


@dataclass(frozen=True, slots=True)
class ServiceRequest:
    """A request that changes nothing at the service, so it is safe to repeat.

    Args:
        method: GET, or POST for queries whose filter is a body.
        path: Path below the service's URL; already validated, and sent without escaping.
        body: JSON body of a POST.
        etag: ETag of the last answer; the service may then answer "not modified" (304).
        bytes_max: Most bytes of an answer; a longer one is not read to its end.
    """

    method: str
    path: str
    body: bytes = b""
    etag: str = ""
    bytes_max: int = ANSWER_BYTES_MAX


@dataclass(frozen=True, slots=True)
class ServiceReply:
    """A reply: its status, its whole body, and its ETag for conditional requests."""

    status: int
    body: bytes
    etag: str = ""


@dataclass(slots=True)
class Breaker:
    """The circuit breaker of a service: decides whether requests may be sent.

    A breaker is closed until `FAILURES_MAX` failures in a row, then open for a while. Then one
    request probes the service, and its outcome closes or opens the breaker again. All times are of
    one monotonic clock.
    """

    failures: int = 0
    open_until: float = 0.0
    probing: bool = False

    def wait_seconds(self, now: float) -> float:
        """Return the back-off in seconds. 0: send one request, and report its outcome."""
        if self.failures < FAILURES_MAX:
            return 0.0
        if self.probing or now < self.open_until:
            return max(self.open_until - now, OPEN_SECONDS_FIRST)
        self.probing = True
        return 0.0

    def succeeded(self) -> None:
        """Record that the service answered."""
        self.failures = 0
        self.probing = False

    def note_failure(self, now: float, chance: float) -> None:
        """Record that the service did not answer.

        Args:
            now: The present time.
            chance: A random number from 0 to 1, so that many servers do not retry in step.
        """
        self.failures += 1
        self.probing = False
        if self.failures >= FAILURES_MAX:
            doubled: float = OPEN_SECONDS_FIRST * 2 ** min(self.failures - FAILURES_MAX, 16)
            self.open_until = now + min(doubled, OPEN_SECONDS_MAX) * (0.5 + chance / 2)

    def abandoned(self) -> None:
        """Record that the request was cancelled without an outcome."""
        self.probing = False


class Service:
    """A client of one external service. The owner must close the client.

    Args:
        name: The service's name in messages, e.g. `cluster registry`.
        url: The service's base URL. `user:password@` is sent as Basic credentials, and
            `bearer:token@` as a bearer token; neither is ever shown.
        seconds: Longest duration of one request, including repetitions.
    """

    def __init__(self, name: str, url: str, seconds: float) -> None:
        parsed = httpx.URL(url)
        self.name = name
        self.url = without_credentials(url)
        self.requests = 0
        """Number of requests sent since the start, including repetitions."""
        self._seconds = seconds
        self._breaker = Breaker()
        self._last = ""
        self._closed = False
        headers = {"accept": "application/json", "accept-encoding": "identity"}
        credentials: tuple[str, str] | None = None
        if parsed.username == "bearer":
            headers["authorization"] = f"Bearer {parsed.password}"
        elif parsed.userinfo:
            credentials = (parsed.username, parsed.password)
        self._client = httpx.AsyncClient(
            headers=headers,
            auth=credentials,
            timeout=None,  # The deadline of `ask` covers all, even slow bodies.
            limits=httpx.Limits(
                max_connections=CONNECTIONS_MAX,
                max_keepalive_connections=CONNECTIONS_MAX,
                keepalive_expiry=KEEP_ALIVE_SECONDS,
            ),
            follow_redirects=False,
            trust_env=False,  # Ignore proxies and .netrc of the environment.
        )

    async def close(self) -> None:
        """Close all connections. Running requests fail; later ones are refused."""
        self._closed = True
        await self._client.aclose()

    async def ask(
        self,
        request: ServiceRequest,
        read: Callable[[ServiceReply], T],
        seconds: float | None = None,
    ) -> T:
        """Send a request and return the result of `read` for the answer.

        Args:
            request: The request to send.
            read: Returns the value of an answer with a status below 500, or raises `WrongAnswer`.
                Errors of decoding count as `WrongAnswer`. `read` may run in a thread, so it must
                use only its argument.
            seconds: Longest duration; None: the service's own limit.

        Raises:
            ServiceError: `unavailable`, naming the service; or the error of `read`.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + (self._seconds if seconds is None else seconds)
        for attempt in range(1, ATTEMPTS_MAX + 1):
            self._admit(loop.time())
            try:
                silence = SILENCE_SECONDS_FIRST * 4.0 ** (attempt - 1)
                patience = httpx.Timeout(None, read=silence if attempt < ATTEMPTS_MAX else None)
                value = await self._attempt(request, read, deadline, patience)
            except WrongAnswer as wrong:
                self._last = wrong.what
                self._breaker.note_failure(loop.time(), _CHANCE.random())
                pause = BACKOFF_SECONDS * 2 ** (attempt - 1) * _CHANCE.random()
                late = loop.time() + pause >= deadline
                if not wrong.again or late or attempt == ATTEMPTS_MAX:
                    raise self._unavailable(wrong.what, attempt) from wrong
            except BaseException:
                self._breaker.abandoned()
                raise
            else:
                self._breaker.succeeded()
                return value
            await asyncio.sleep(pause)
        raise AssertionError("the last attempt returns or raises")

    def _admit(self, now: float) -> None:
        if self._closed:
            raise ServiceError(Code.SHUTTING_DOWN, "The server is stopping; connect again.")
        wait = self._breaker.wait_seconds(now)
        if wait > 0:
            raise self._unavailable(
                f"failed {self._breaker.failures} times in a row (the last time it {self._last})"
                f" and is tried again in {wait:.1f} seconds",
                0,
            )

    async def _attempt(
        self,
        request: ServiceRequest,
        read: Callable[[ServiceReply], T],
        deadline: float,
        patience: "httpx.Timeout",
    ) -> T:
        try:
            async with asyncio.timeout_at(deadline):
                reply = await self._exchange(request, patience)
        except TimeoutError as error:
            raise WrongAnswer("did not answer in time") from error
        except httpx.ReadTimeout as error:
            said_nothing = f"did not go on with its answer for {patience.read:g} seconds"
            raise WrongAnswer(said_nothing, again=True) from error
        except (httpx.HTTPError, httpx.StreamError, httpx.InvalidURL) as error:
            what = str(error) or type(error).__name__
            raise WrongAnswer(f"could not be reached ({what})", again=True) from error
        except RuntimeError as error:
            if self._closed:  # httpx raises this if its client was closed.
                raise ServiceError(Code.SHUTTING_DOWN, "The server is stopping.") from error
            raise
        if reply.status >= 500 or reply.status in _REPEAT_STATUSES:  # noqa: PLR2004  # A server error.
            raise WrongAnswer(f"answered {reply.status}{quote_body(reply.body)}", again=True)
        try:
            if len(reply.body) <= READ_HERE_BYTES_MAX:
                return read(reply)
            return await asyncio.to_thread(read, reply)
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            # Includes text that is not UTF-8, which is not a `DecodeError` of msgspec.
            what = f"answered {reply.status} with a body that cannot be read ({error})"
            raise WrongAnswer(f"{what}{quote_body(reply.body)}") from error

    async def _exchange(self, request: ServiceRequest, patience: "httpx.Timeout") -> ServiceReply:
        url = httpx.URL(self.url + request.path)
        headers = {"content-type": "application/json"} if request.body else {}
        if request.etag:
            headers["if-none-match"] = request.etag
        for _ in range(REDIRECTS_MAX + 1):
            self.requests += 1
            async with self._client.stream(
                request.method, url, content=request.body or None, headers=headers, timeout=patience
            ) as response:
                if response.has_redirect_location:
                    url = _redirect_url(request, url, response)
                    continue
                body = await _body(response, request.bytes_max)
                return ServiceReply(response.status_code, body, response.headers.get("etag", ""))
        raise WrongAnswer(f"redirected more than {REDIRECTS_MAX} times")

    def _unavailable(self, what: str, attempts: int) -> ServiceError:
        details = {"service": self.name, "url": self.url, "attempts": attempts}
        return ServiceError(
            Code.UNAVAILABLE, f"The {self.name} at {self.url} {what}.", details=details
        )


def without_credentials(url: str) -> str:
    """Return a base URL without user, password and final slash, for messages."""
    return str(httpx.URL(url).copy_with(userinfo=b"")).rstrip("/")


def _redirect_url(
    request: ServiceRequest, url: "httpx.URL", response: "httpx.Response"
) -> "httpx.URL":
    target = url.join(response.headers["location"])
    if (target.scheme, target.host, target.port) != (url.scheme, url.host, url.port):
        raise WrongAnswer(f"redirected to {target.scheme}://{target.host}, which is not followed")
    if request.method != "GET" and response.status_code not in _REDIRECTS_OF_ANY:
        raise WrongAnswer(f"redirected a query with {response.status_code}")
    return target


async def _body(response: "httpx.Response", bytes_max: int) -> bytes:
    encoding = response.headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        raise WrongAnswer(f"sent its answer as {encoding[:40]!r}, which the request did not accept")
    declared = response.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > bytes_max:
        raise WrongAnswer(f"answered with more than {bytes_max} bytes")
    body = bytearray()
    async for chunk in response.aiter_raw():
        body += chunk
        if len(body) > bytes_max:
            raise WrongAnswer(f"answered with more than {bytes_max} bytes")
    return bytes(body)


def quote_body(body: bytes) -> str:
    """Return the beginning of an answer in quotes, for a message."""
    text = body[: 4 * SHOWN_CHARS_MAX].decode("utf-8", "replace")[:SHOWN_CHARS_MAX].strip()
    return f": {text!r}" if text else ""
