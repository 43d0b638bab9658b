"""The client of a served pool: the methods of a pool, answered by another process."""

import json
import os
import socket
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from typing import Final, TypeVar

import moorage.slots
from moorage.launch import reason_of
from moorage.model import Code
from moorage.records.json_values import JsonMapping, JsonObject, JsonValue
from moorage.slots import InvalidRequest, Outcome, SlotsError
from moorage.slots.views import in_yaml
from moorage_client.answers import UnreadableError, read_as
from moorage_client.errors import ConnectionFailed, ProtocolViolated, Timeout, refusal
from moorage_client.pool.addresses import Tcp, Uds, address_here, parse_address

SECONDS_MAX: Final = 30.0
"""Seconds that an answer may take."""
ANSWER_BYTES_MAX: Final = 64 * 1024 * 1024
"""Maximum bytes read of one answer."""
T = TypeVar("T")


@in_yaml
class Checkout(dict[str, list[JsonObject]]):
    """Checked-out slots as a plain dict, `{type: [{"id", "slots"}]}`, with their transaction.

    Args:
        resources: The checked-out slots by type.
        transaction: Id of the transaction.
    """

    __slots__ = ("transaction",)

    def __init__(self, resources: Mapping[str, list[JsonObject]], transaction: str) -> None:
        super().__init__(resources)
        self.transaction = transaction

    def __reduce__(self) -> tuple[object, ...]:
        return Checkout, (dict(self), self.transaction)


class ResourcePoolAdapter:
    """A pool that another process serves; threads may share it.

    Every method may raise `ConnectionFailed` if no server serves a pool, and `Timeout`.

    Args:
        address: `uds:PATH` or `tcp:HOST:PORT`; default: `MOORAGE_POOL_ADDRESS`, else
            `CANARY_RESOURCE_POOL_ADDR`, else this user's own socket.
        timeout: Longest time for an answer in seconds.

    Raises:
        ValueError: The address is invalid.
    """

    def __init__(self, address: str | None = None, timeout: float = SECONDS_MAX) -> None:
        self.address = parse_address(address) if address else address_here(os.environ)
        self._timeout = timeout

    @property
    def types(self) -> list[str]:
        """The types of resources, sorted."""
        return self._read(list[str], self._call("GET", "/types").get("types"))

    def empty(self) -> bool:
        """Return whether the pool has no type of resource."""
        return not self.types

    def count(self, type: str) -> int:  # noqa: A002  # The documents' word.
        """Return the number of instances; see `ResourcePool.count`."""
        return self._read(int, self._call("POST", "/count", type).get("count"))

    def accommodates(self, request: Sequence[JsonMapping]) -> Outcome:
        """Return whether a request could ever fit; see `ResourcePool.accommodates`."""
        answer = self._call("POST", "/accommodates", request)
        ok = self._read(bool, answer.get("ok"))
        reason = self._read(str, answer.get("reason") or "")
        return Outcome(ok, reason or (None if ok else "no reason was given"))

    def checkout(
        self,
        request: Sequence[JsonMapping],
        *,
        pid: int | None = None,
        ttl_seconds: float | None = None,
        **kwds: object,
    ) -> Checkout:
        """Take slots out of the pool; see `ResourcePool.checkout`.

        Args:
            request: Members `{"type", "slots"}`.
            pid: The process that gets the slots: when it dies, the server takes the slots back.
                Default: this process; 0: no process, only `ttl_seconds` counts.
            ttl_seconds: Seconds after which the server takes the slots back in any case, unless the
                checkout is renewed. Default: no limit, or the server's limit without a process.
            kwds: Ignored.

        Raises:
            SlotsError: An error of `ResourcePool.checkout`.
            RequestRefused: The server cannot watch one more process (code `busy`).
        """
        del kwds
        body = {
            "request": request,
            "pid": os.getpid() if pid is None else pid or None,
            "ttl_seconds": ttl_seconds,
        }
        answer = self._call("POST", "/checkout", body)
        resources = self._read(dict[str, list[JsonObject]], answer.get("resources"))
        return Checkout(resources, self._read(str, answer.get("transaction")))

    def checkin(self, resources: JsonMapping | str) -> None:
        """Give back all slots of a `checkout`, or of a transaction by its id.

        Raises:
            InvalidCheckin: The slots are not held, or no longer held.
        """
        if isinstance(resources, str):
            body: JsonValue = {"transaction": resources}
        elif isinstance(resources, Checkout):
            body = {"transaction": resources.transaction, "resources": resources}
        else:
            body = resources
        self._call("POST", "/checkin", body)

    def renew(self, checkout: Checkout | str, ttl_seconds: float) -> float:
        """Extend a checkout to some seconds from now; return its end in seconds since the epoch.

        Raises:
            InvalidCheckin: The slots are not held, or no longer held.
        """
        transaction = checkout if isinstance(checkout, str) else checkout.transaction
        body = {"transaction": transaction, "ttl_seconds": ttl_seconds}
        return self._read(float, self._call("POST", "/renew", body).get("expires_at"))

    def state(self) -> JsonObject:
        """Return the free slots, all slots, and the holders with their slots (`holdings`)."""
        return self._call("GET", "/state")

    def _call(self, method: str, path: str, body: JsonValue = None) -> JsonObject:
        try:
            content = None if method == "GET" else json.dumps(body, allow_nan=False, default=list)
        except (TypeError, ValueError) as error:
            raise InvalidRequest(f"{body!r} cannot be sent: {error}") from error
        # One connection per call costs little on one machine, and threads need not wait.
        connection = self._connection()
        try:
            connection.request(method, path, content, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            text = answer.read(ANSWER_BYTES_MAX + 1)
        except TimeoutError as error:
            raise Timeout(f"{self.address}: no answer in time") from error
        except (OSError, HTTPException) as error:
            raise ConnectionFailed(str(self.address), reason_of(error)) from error
        finally:
            connection.close()
        if len(text) > ANSWER_BYTES_MAX:
            finding = f"it answered more than {ANSWER_BYTES_MAX} bytes"
            raise ProtocolViolated(str(self.address), finding)
        try:
            document = dict(json.loads(text))
        except (TypeError, ValueError, RecursionError) as error:
            raise ProtocolViolated(
                str(self.address), f"the answer is not that of a pool: {text[:100]!r}"
            ) from error
        if answer.status != HTTPStatus.OK:
            raise _error_of(document)
        return document

    def _read(self, kind: type[T], value: JsonValue) -> T:
        try:
            return read_as(kind, value)
        except UnreadableError as error:
            raise ProtocolViolated(
                str(self.address), f"the answer is not that of a pool: {error}"
            ) from error

    def _connection(self) -> HTTPConnection:
        match self.address:
            case Uds() as address:
                return _UnixConnection(address, self._timeout)
            case Tcp(host=host, port=port):
                return HTTPConnection(host, port, timeout=self._timeout)


class _UnixConnection(HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, address: Uds, timeout: float) -> None:
        super().__init__("pool", timeout=timeout)
        self._address = address

    def connect(self) -> None:
        self._address.check()  # A socket in another user's folder is not our pool.
        self.sock = socket.socket(socket.AF_UNIX)  # Closed with the connection, connected or not.
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._address.path))


def _error_of(document: JsonValue) -> Exception:
    """Return the exception for a failure reply."""
    name, message = str(document.get("error")), str(document.get("message"))
    kind = getattr(moorage.slots, name, None)
    if not isinstance(kind, type) or not issubclass(kind, SlotsError):
        return refusal(Code.BUSY, message)
    error = kind.__new__(kind)
    Exception.__init__(error, message)  # The classes' own arguments differ.
    return error
