"""Everything that can go wrong between a client and its server, as one tree.

The tree is drawn in the package docstring (`moorage_client/__init__.py`). Programming mistakes
(a message that is not JSON, a lease id without its token) stay `TypeError` and `ValueError`.
"""

# ruff: noqa: N818  # The root of the tree says Error; each name says what happened.
from collections.abc import Mapping
from typing import Any

from moorage.model import Code
from moorage.records.json_values import JsonMapping


class MoorageError(Exception):
    """Root of every error that this package raises on purpose."""


class ConnectionFailed(MoorageError):
    """Nothing answered at the URL, or the socket broke before the reply came.

    The request may or may not have taken effect. If a repetition is safe, the client has repeated
    the request without success.

    Args:
        url: The URL that was tried.
        reason: The failure in words, for a person.
    """

    def __init__(self, url: str, reason: str) -> None:
        super().__init__(f"{url}: {reason}")
        self.url = url
        self.reason = reason


class ProtocolViolated(ConnectionFailed):
    """Something answered at the URL, but it does not speak Moorage's protocol.

    Args:
        url: The URL that was tried.
        reason: What went wrong, for a person.
        other_port: Whether the reason says what this port is for.
    """

    def __init__(self, url: str, reason: str, *, other_port: bool = False) -> None:
        super().__init__(url, reason)
        self.other_port = other_port


class ProxyFailed(ConnectionFailed):
    """A proxy from the environment refused the connection or failed."""


class CertificateRefused(ConnectionFailed):
    """The server's certificate is not trusted, or the server does not use TLS."""


class AddressesFailed(ConnectionFailed):
    """No server at the given addresses carries out the request.

    Args:
        said: The outcome at each address, for a person.
        final: Whether another attempt would fail in the same way.
    """

    def __init__(self, said: Mapping[str, str], *, final: bool = False) -> None:
        super().__init__(next(iter(said)), "; ".join(f"{url}: {why}" for url, why in said.items()))
        self.said = dict(said)
        self.final = final

    def __str__(self) -> str:
        return f"none of {len(self.said)} addresses serves: {self.reason}"


class SettingRefused(MoorageError):
    """An argument or environment variable cannot be used. The message omits its value.

    Args:
        setting: Name of the argument or variable.
        expected: What is wrong, and what is expected.
    """

    def __init__(self, setting: str, expected: str) -> None:
        super().__init__(f"{setting}: {expected}")
        self.setting = setting
        self.expected = expected


class Timeout(MoorageError, TimeoutError):
    """No reply came in time. The request may still take effect; a late lease is released."""


class LeaseLost(MoorageError):
    """A lease ended while its holder still used it: stop using the GPUs.

    Args:
        lease: Id of the lease.
        reason: Why the lease is lost, for a person.
    """

    def __init__(self, lease: str, reason: str) -> None:
        super().__init__(f"lease {lease} is lost: {reason}")
        self.lease = lease
        self.reason = reason


class RequestRefused(MoorageError):
    """The server refused the request.

    Args:
        code: Machine-readable; one of `moorage.model.Code`, or a newer server's own.
        reason: One sentence for a person.
        field: The field of the request that was wrong, or empty.
        expected: The expected value of this field, or empty.
        details: All other data of the refusal.
        request: The server's id of the request, for `moorage why`; empty if the server gave none.
    """

    def __init__(
        self,
        code: str,
        reason: str,
        *,
        field: str = "",
        expected: str = "",
        details: JsonMapping | None = None,
        request: str = "",
    ) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason
        self.field = field
        self.expected = expected
        self.details: JsonMapping = details or {}
        self.request = request

    def __str__(self) -> str:
        # Below its first line, a reason may show a line of the policy with a caret.
        first, line, shown = self.reason.partition("\n")
        text = f"{first} [{self.code}]"
        if self.field and self.field not in self.reason:
            text += f"; field: {self.field}"
        if self.expected and self.expected not in self.reason:
            text += f"; expected: {self.expected}"
        return text + line + shown


class NoCapacity(RequestRefused):
    """The request could fit, but does not fit now, or did not fit within its `wait_seconds`."""


class NeverFits(RequestRefused):
    """The request would not fit even if the fleet were empty: waiting does not help."""


class Unauthorized(RequestRefused):
    """The server does not know this client's token, or the token is not that of the lease."""


class NotFound(RequestRefused):
    """The named policy, cluster, lease or request does not exist."""


class LeaseEnded(RequestRefused):
    """The named lease has ended."""


class RuleFailed(RequestRefused):
    """The policy failed: it raised an error, timed out, crashed, or returned an invalid value."""


_KINDS: Mapping[str, type[RequestRefused]] = {
    Code.NO_CAPACITY: NoCapacity,
    Code.WAIT_TIMEOUT: NoCapacity,
    Code.NEVER_FITS: NeverFits,
    Code.UNAUTHORIZED: Unauthorized,
    Code.WRONG_TOKEN: Unauthorized,
    Code.UNKNOWN_POLICY: NotFound,
    Code.UNKNOWN_CLUSTERS: NotFound,
    Code.UNKNOWN_LEASE: NotFound,
    Code.UNKNOWN_REQUEST: NotFound,
    Code.NOT_FOUND: NotFound,
    Code.LEASE_ENDED: LeaseEnded,
    Code.BAD_POLICY: RuleFailed,
    Code.POLICY_ERROR: RuleFailed,
    Code.POLICY_TIMEOUT: RuleFailed,
    Code.POLICY_CRASHED: RuleFailed,
    Code.POLICY_MEMORY: RuleFailed,
    Code.POLICY_BAD_OUTPUT: RuleFailed,
    Code.POLICY_UNSOUND: RuleFailed,
    Code.POLICY_DECLINED: RuleFailed,
}


def refusal(code: str, reason: str, **rest: Any) -> RequestRefused:
    """Return the error for a code; arguments as those of `RequestRefused`."""
    return _KINDS.get(code, RequestRefused)(code, reason, **rest)
