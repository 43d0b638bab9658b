"""Calls one external service over HTTP, with a deadline, retries and a circuit breaker.

`catalog.mirrored.services` asks through it. Whatever the other side does (refuse, reset, stall,
drip, lie, send too much), a question ends within its time: with what the reader made of the answer,
or with one `unavailable` that names the service and its URL without credentials.

    WrongAnswer    the service answered, but not what its documents promise; stays in this package
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
else:  # Few servers come to use it, and it is slow to import.
    httpx = LazyModule("httpx")

ATTEMPTS_MAX: Final = 3
"""Attempts for one request, within its deadline; only requests that change nothing are repeated."""
BACKOFF_SECONDS: Final = 0.05
"""Longest pause before the second attempt; it doubles each time. Each pause is random below it."""
SILENCE_SECONDS_FIRST: Final = 2.0
"""Longest time without data at the first attempt; four times as long at each further attempt.

The last attempt has all the time that is left: a slow service is served, one that stalled soon."""
REDIRECTS_MAX: Final = 2
"""Redirects that one attempt follows, only on the same host."""
CONNECTIONS_MAX: Final = 16
"""Open connections to one service; further requests wait for one, within their deadline."""
KEEP_ALIVE_SECONDS: Final = 3.0
"""How long an idle connection is reused: most servers close idle ones after five seconds, and a
request sent at that moment would be lost."""
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
"""Characters of an invalid answer that a message quotes."""
READ_HERE_BYTES_MAX: Final = 64 * 1024
"""Answers up to this size are decoded on the event loop, larger ones in a thread."""

_REPEAT_STATUSES: Final = frozenset({408, 425, 429})
_REDIRECTS_OF_ANY: Final = frozenset({307, 308})  # The others may turn a POST into a GET.
_CHANCE: Final = random.SystemRandom()

T = TypeVar("T")


class WrongAnswer(Exception):  # noqa: N818  # It names what it is about, and stays in this package.
    """The service's answer does not have its documented form.

    Args:
        what: What it did, to be read after the service's name.
        again: Whether another attempt may do better.
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
        path: Below the service's URL; its parts were validated, nothing in it is escaped here.
        body: JSON of a POST.
        etag: What the last answer called itself; the service may then say "as before" (304).
        bytes_max: A longer answer is not read to its end.
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

    Closed until `FAILURES_MAX` failures in a row; then open for a while; then one question probes,
    and its outcome closes or opens it again. Times are those of one monotonic clock.
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
            now: The time.
            chance: From 0 to 1, so that many servers do not come back to it in step.
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
    """A client of one external service. Close it when done.

    Args:
        name: What it is, in words, e.g. `cluster registry`.
        url: Its base URL. `user:password@` is sent as Basic credentials, with the user `bearer`
            as a bearer token; neither is ever shown.
        seconds: The whole of one question, repetitions included.
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
            timeout=None,  # One deadline covers everything, dripping bodies included.
            limits=httpx.Limits(
                max_connections=CONNECTIONS_MAX,
                max_keepalive_connections=CONNECTIONS_MAX,
                keepalive_expiry=KEEP_ALIVE_SECONDS,
            ),
            follow_redirects=False,
            trust_env=False,  # Neither proxies nor a .netrc that is not configured for this.
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
            request: What to send.
            read: Turns an answer below 500 into a value, or raises `WrongAnswer`. An answer that it
                cannot decode is a wrong answer, too. It may run in a thread, so it touches nothing
                but its argument.
            seconds: Time for all of it, where the service's own is not meant.

        Raises:
            ServiceError: `unavailable`, naming the service; or what `read` raised.
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
            if self._closed:  # httpx says so when its client was closed meanwhile.
                raise ServiceError(Code.SHUTTING_DOWN, "The server is stopping.") from error
            raise
        if reply.status >= 500 or reply.status in _REPEAT_STATUSES:  # noqa: PLR2004  # Server errors.
            raise WrongAnswer(f"answered {reply.status}{quote_body(reply.body)}", again=True)
        try:
            if len(reply.body) <= READ_HERE_BYTES_MAX:
                return read(reply)
            return await asyncio.to_thread(read, reply)
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            # Text that is not UTF-8 is no `DecodeError` of msgspec's.
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
