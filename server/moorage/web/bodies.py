"""Reads request bodies and writes JSON bodies, for all endpoints.

Each body has a limit of size and of time, and all bodies that are being read share one memory
budget. So slow or large uploads cannot use up the server's memory.
"""

import asyncio
import math
import re
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from moorage.model import Code, Tenant
from moorage.protocol.diagnosis import check_names, expectations
from moorage.protocol.errors import BadMessage
from moorage.protocol.fair_semaphore import FairSemaphore
from moorage.protocol.faults import ServiceError, status_of
from moorage.protocol.json_bounds import (
    LARGE_BYTES,
    SLOW_NUMBERS_MAX,
    has_more_values,
    has_slow_numbers,
    is_deeper,
)
from moorage.protocol.large_json import decode_in_parts, encode_in_parts, is_large
from moorage.query import QueryError, parse_page
from moorage.records.json_values import JsonMapping, JsonObject, JsonValue
from moorage.records.rights import Caller

T = TypeVar("T", bound=msgspec.Struct)
ENCODING: Final = "encoding"
"""Name in the application's state of the lock that orders the encoding of large answers."""
CALLER: Final = "caller"
"""Name in the request's state under which `web.app` stores the caller."""
TENANT: Final = "tenant"
"""Name in the request's state under which `web.app` stores the authenticated tenant."""
UNCHANGED: Final = "unchanged"
"""Name in the request's state of a flag: the request changed nothing, and is not logged."""
CHECK: Final = "check"
"""Name in the request's state of a function that checks the caller again, after the body."""
NAMED: Final = "named"
"""Name in the request's state under which `read_document` stores the body's id for `web.notes`."""
_NAMES: Final = (
    *("id", "clusterId", "blockId", "executor_id", "policy_rule_uri"),
    *("name", "version", "release_tag", "action", "percent"),
)
_NAME_CHARS_MAX: Final = 300
_OPERATOR: Final = re.compile(r"\$[A-Za-z]+")
HELD: Final = "moorage.held"
"""Key in a request's scope of the functions that release its bodies' budget."""
SLOW_NUMBERS_BYTES: Final = 1024 * 1024
BODY_BYTES_MAX: Final = 24 * 1024 * 1024
"""Maximum bytes of one request body; larger ones are answered 413."""
BODIES_BYTES_MAX: Final = 256 * 1024 * 1024
"""Maximum bytes of all bodies that are being read; a further request is answered 429."""
TENANT_BYTES_MAX: Final = BODIES_BYTES_MAX * 3 // 4
"""Maximum bytes of one tenant's bodies that are being read; a further request is answered 429."""
VALUES_MIN: Final = 65_536
"""Number of values that any body may have, even a short one."""
BYTES_PER_VALUE: Final = 12
"""Bytes that a body needs per value beyond `VALUES_MIN`; with fewer, the answer is 413.

Otherwise a body of empty lists could take fifty times its own bytes in memory."""
LEVELS_MAX: Final = 1_000
"""Deepest nesting of arrays and objects in a body."""
VALUE_BYTES: Final = 64
"""Bytes of memory budget for each value of a body, beside the body's own bytes."""
SEARCHES_MAX: Final = 2
"""Maximum document searches at a time, one of each tenant; a single thread runs them."""
BODY_SECONDS_MAX: Final = 60.0
"""Maximum seconds for a client to send a body; after that, the answer is 408."""


class BodyReader:
    """Reads bodies within the memory budget that all requests of one server share.

    A body counts by the memory of its decoded values, until its request is answered.

    Attributes:
        searches: Limits the document searches that run at the same time.
    """

    def __init__(self) -> None:
        self._held: Counter[str] = Counter()
        self.searches = FairSemaphore(SEARCHES_MAX)
        self._turns = FairSemaphore(rests=True)
        self._decoding = FairSemaphore()

    async def read(self, request: Request, most: int = BODY_BYTES_MAX) -> bytes:
        """Read a request's body and return it.

        Args:
            request: The request with the body.
            most: Most bytes of the body.

        Raises:
            ServiceError: `too_large` (413), `busy` (429), 408 if the body does not arrive in time,
                415 if the body is compressed, or 401 if the caller's token has ended meanwhile.
        """
        if (coding := request.headers.get("content-encoding", "identity")) != "identity":
            raise ServiceError(
                Code.UNSUPPORTED,
                f"the body is encoded as {coding[:40]}; send it without an encoding",
                field="content-encoding",
                expected="identity, or none",
                status=415,
            )
        declared = request.headers.get("content-length", "")
        if declared.isdigit() and int(declared) > most:
            raise _too_large(most)
        tenant = getattr(request.state, TENANT, "")
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_SECONDS_MAX):
                await self._receive(request, tenant, body, most)
        except BaseException as error:
            self._hold(tenant, -len(body))
            if not isinstance(error, TimeoutError | ClientDisconnect):
                raise
            reason = f"the body did not arrive within {BODY_SECONDS_MAX:g} seconds"
            raise ServiceError(Code.BAD_MESSAGE, reason, status=408) from error
        self._hold_until_reply(request, tenant, len(body))
        if (check := getattr(request.state, CHECK, None)) is not None:
            await check()  # The token may have ended while the body arrived.
        return bytes(body)

    async def _receive(self, request: Request, tenant: str, body: bytearray, most: int) -> None:
        async for chunk in request.stream():
            self._hold(tenant, len(chunk))
            body += chunk
            if len(body) > most:
                raise _too_large(most)
            if not self._fits(tenant):
                raise _too_many()

    def _hold_until_reply(self, request: Request, tenant: str, count: int) -> None:
        request.scope.setdefault(HELD, []).append(lambda: self._hold(tenant, -count))

    def _hold(self, tenant: str, count: int) -> None:
        self._held[tenant] += count
        if not self._held[tenant]:
            del self._held[tenant]

    def _fits(self, tenant: str) -> bool:
        return self._held[tenant] <= TENANT_BYTES_MAX and self._held.total() <= BODIES_BYTES_MAX

    async def read_json(self, request: Request) -> JsonValue:
        """Return the JSON value of the body; a thread decodes large bodies, one at a time.

        Raises:
            ServiceError: An error of `read`; `bad_json` (400), with the place of the fault in the
                body.
        """
        body, tenant = await self.read(request), getattr(request.state, TENANT, "")
        if len(body) <= LARGE_BYTES:
            return _decode(body, msgspec.json.decode)
        async with self._turns.turn(tenant):
            values = min(sum(map(body.count, (b"[", b"{", b","))), _values_max(body))
        self._hold(tenant, VALUE_BYTES * values)
        self._hold_until_reply(request, tenant, VALUE_BYTES * values)
        if not self._fits(tenant):
            raise _too_many()
        async with self._decoding.turn(tenant):
            return await asyncio.to_thread(_check, body)


def _values_max(body: bytes) -> int:
    return VALUES_MIN + len(body) // BYTES_PER_VALUE


def _check(body: bytes) -> JsonValue:
    """Decode a large body; refuse a body that would need too much memory or time."""
    if is_deeper(body, LEVELS_MAX):
        reason = f"the body is not JSON: more than {LEVELS_MAX} arrays and objects within another"
        raise ServiceError(Code.BAD_JSON, reason, expected="one JSON value in UTF-8")
    if has_more_values(body, most := _values_max(body)):
        raise _too_large_inside(f"at most {most} values in {len(body)} bytes")
    at = range(0, len(body), SLOW_NUMBERS_BYTES)
    if any(has_slow_numbers(body[n : n + SLOW_NUMBERS_BYTES], SLOW_NUMBERS_MAX) for n in at):
        what = "numbers that have 190 digits, or an exponent beyond 199, in a mebibyte"
        raise _too_large_inside(f"at most {SLOW_NUMBERS_MAX} {what}")
    return _decode(body, decode_in_parts)


def _too_large(most: int) -> ServiceError:
    reason = f"the body has more than {most} bytes; split it"
    return ServiceError(Code.TOO_LARGE, reason, expected=f"at most {most} bytes")


def _too_many() -> ServiceError:
    return ServiceError(Code.BUSY, "too many large requests at one time; send this one later")


def _too_large_inside(expected: str) -> ServiceError:
    reason = f"the body has too many parts; expected {expected}; split it"
    return ServiceError(Code.TOO_LARGE, reason, expected=expected)


def _decode(body: bytes, decode: Callable[[bytes], JsonValue]) -> JsonValue:
    try:
        value = decode(body)
        if isinstance(value, dict):
            check_names(body.decode())
    except BadMessage as error:
        raise ServiceError(
            error.code, error.reason, field=error.field, expected=error.expected
        ) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ServiceError(
            Code.BAD_JSON, f"the body is not JSON: {error}", expected="one JSON value in UTF-8"
        ) from error
    return value


class CountedBodies:
    """Releases the budget of a request's body when the request is answered."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, then release the budget of its bodies."""
        try:
            await self._app(scope, receive, send)
        finally:
            for end in scope.pop(HELD, ()):
                end()


class _InParts(Response):
    """A JSON answer that is encoded in parts, each when the client has read the previous one.

    So a large answer delays no other answer, and takes no memory while its client does not read.
    """

    media_type = "application/json"

    def __init__(self, content: JsonValue, status: int) -> None:
        super().__init__(status_code=status)
        del self.headers["content-length"]
        self._parts = encode_in_parts(content)

    async def __call__(self, scope: Scope, _: Receive, send: Send) -> None:
        """Encode and send the answer, one part after the other."""
        start = {"type": "http.response.start", "status": self.status_code}
        await send({**start, "headers": self.raw_headers})
        more = True
        while more:
            async with getattr(scope["app"].state, ENCODING):
                part = next(self._parts, b"")
                await asyncio.sleep(0)  # Other tasks go first.
            more = bool(part)
            await send({"type": "http.response.body", "body": part, "more_body": more})


def json_response(content: JsonValue, status: int = 200) -> Response:
    """Return a JSON answer."""
    if is_large(content):
        return _InParts(content, status)
    return Response(msgspec.json.encode(content), status, media_type="application/json")


def success(data: JsonValue, status: int = 200) -> Response:
    """Return an answer in the envelope of the documented services."""
    return json_response({"success": True, "data": data}, status)


async def read_document(request: Request, bodies: BodyReader) -> JsonObject:
    """Read and return a request's body; refuse a body that is not a JSON object.

    Raises:
        ServiceError: An error of `BodyReader.read_json`; `bad_message`: the body is not a JSON
            object.
    """
    value = await bodies.read_json(request)
    if not isinstance(value, dict):
        raise ServiceError.wrong_field("body", "a JSON object")
    named = {name: value[name] for name in _NAMES if isinstance(value.get(name), str | int | float)}
    setattr(
        request.state, NAMED, {name: str(each)[:_NAME_CHARS_MAX] for name, each in named.items()}
    )
    return value


def query_in_url(request: Request) -> JsonObject:
    """Return the URL's parameters as a filter: each parameter is a field with one or more values.

    Raises:
        ServiceError: A value is an operator. HTTP libraries write `{"$in": [...]}` as `$in`.
    """
    query: JsonObject = {}
    for field in request.query_params:
        values = request.query_params.getlist(field)
        if any(_OPERATOR.fullmatch(value) for value in values):
            raise ServiceError.wrong_field(
                field, "a value, not an operator of a filter: POST the filter here as JSON instead"
            )
        query[field] = values[0] if len(values) == 1 else {"$in": values}
    return query


def pipeline_of(body: JsonValue) -> JsonValue:
    """Return the pipeline stages in a body: the body itself, or its field `pipeline`."""
    return body["pipeline"] if isinstance(body, dict) and "pipeline" in body else body


def query_of(body: JsonObject) -> JsonObject:
    """Return the filter in a body: the body itself, or its field `query`."""
    if "query" in body and body.keys() <= {"query", "options"}:
        query: JsonObject = body["query"]
        return query
    return body


async def find(
    request: Request, bodies: BodyReader, query: Callable[[JsonObject], Awaitable[list[JsonObject]]]
) -> list[JsonObject]:
    """Return the documents that match a filter, sorted and limited by its `options`.

    Raises:
        ServiceError: An error of `read_document` or `query`; or the options are malformed or
            unknown.
    """
    body = await read_document(request, bodies)
    async with bodies.searches.turn(who_of(request)):
        return await _search(body, query)


async def _search(
    body: JsonObject, query: Callable[[JsonObject], Awaitable[list[JsonObject]]]
) -> list[JsonObject]:
    wanted = query_of(body)
    if wanted is body or "options" not in body:
        return await query(wanted)
    try:
        page = parse_page(body["options"])
    except QueryError as error:
        text, field = str(error), error.path
        raise ServiceError(error.code, text, field=field, expected=error.expected) from error
    found = await query(wanted)
    return await asyncio.to_thread(lambda: [dict(each) for each in page.run(found)])


def caller_of(request: Request) -> Caller:
    """Return the authenticated caller of a request."""
    caller: Caller = getattr(request.state, CALLER)
    return caller


def who_of(request: Request) -> Tenant:
    """Return the tenant of a request's caller."""
    return caller_of(request).tenant


def read_as(body: JsonObject, kind: type[T]) -> T:
    """Decode a body as a type; an error has the description of the wrong field.

    Raises:
        ServiceError: `bad_message` naming the field that is wrong.
    """
    expected = expectations(kind)
    if kind.__struct_config__.forbid_unknown_fields:
        for field in body.keys() - expected.keys():
            raise ServiceError.wrong_field(field, f"one of {', '.join(expected)}")
    try:
        return msgspec.convert(body, kind)
    except msgspec.ValidationError as error:
        # The error ends with the field: `percent` if it is missing, otherwise `$.percent`.
        field = str(error).rpartition("`")[0].rpartition("`")[2].removeprefix("$.")
        raise ServiceError.wrong_field(field, expected[field]) from error


def is_of_clusters(path: str) -> bool:
    """Return whether a path belongs to the cluster database, whose failures have another form."""
    return path == "/clusters" or path.startswith("/clusters/")


def failure(fault: ServiceError, path: str) -> Response:
    """Return the response for a failure.

    Args:
        fault: The reason of the failure.
        path: The path of the request. The cluster database documents its errors as `{"error":
            text}`, every other service as `{"success": false, "message", "error": {...}}`.
    """
    error: JsonObject = {**fault.details, "code": fault.code, "reason": fault.reason}
    if fault.field:
        error["field"] = fault.field
    if fault.expected:
        error["expected"] = fault.expected
    content: JsonObject = {"success": False, "message": fault.reason, "error": error}
    if is_of_clusters(path):
        content["error"], content["details"] = fault.reason, error
    response = json_response(content, fault.status)
    if fault.status == 401:  # noqa: PLR2004  # This answer must say how to log in.
        response.headers["www-authenticate"] = "Bearer"
    return say_when(response, error)


def verdict(status: int, answer: bytes) -> Response:
    """Return the HTTP response with an answer of the WebSocket's protocol."""
    response = Response(answer, status, media_type="application/json")
    busy = status == status_of(Code.BUSY)
    return say_when(response, msgspec.json.decode(answer)["error"]) if busy else response


def say_when(response: Response, error: JsonMapping) -> Response:
    """Add the header `Retry-After`, if the error has `retry_after_seconds`."""
    seconds = error.get("retry_after_seconds")
    if isinstance(seconds, int | float):
        response.headers["retry-after"] = str(max(1, math.ceil(seconds)))
    return response
