"""The exception for a refusal by a service, for `web` and for the packages behind it.

`catalog` and the daemon raise the error, `web` turns it into a failure body and a status; the
gateway may turn it into a failure reply. A `ServiceError` has the same fields as `Refusal` of the
core, since this layer is below the core and cannot use that class.
"""

from collections.abc import Mapping
from typing import Final

from moorage.model import Code
from moorage.records.json_values import JsonMapping

STATUS_BY_CODE: Final[Mapping[Code, int]] = {
    Code.BAD_JSON: 400,
    Code.BAD_MESSAGE: 400,
    Code.MISSING_FIELDS: 400,
    Code.UNKNOWN_OP: 400,
    Code.UNSUPPORTED: 400,
    Code.BAD_POLICY: 400,
    Code.UNAUTHORIZED: 401,
    Code.FORBIDDEN: 403,
    Code.WRONG_TOKEN: 403,
    Code.NOT_FOUND: 404,
    Code.UNKNOWN_POLICY: 404,
    Code.UNKNOWN_CLUSTERS: 404,
    Code.UNKNOWN_LEASE: 404,
    Code.UNKNOWN_REQUEST: 404,
    Code.ALREADY_EXISTS: 409,
    Code.CONFLICT: 409,
    Code.IDEMPOTENCY_MISMATCH: 409,
    Code.LEASE_ENDED: 409,
    Code.QUOTA_EXCEEDED: 409,
    Code.NO_CAPACITY: 409,
    Code.WAIT_TIMEOUT: 409,  # Not 408, after which browsers send the request again.
    Code.POLICY_DECLINED: 409,
    Code.CANCELLED: 409,
    Code.TOO_LARGE: 413,
    Code.NOT_LEADER: 421,
    Code.NEVER_FITS: 422,
    Code.BUSY: 429,
    Code.SHUTTING_DOWN: 503,
    Code.UNAVAILABLE: 503,
}
"""HTTP status per code; every other code is a fault, of a policy or of the server: 500."""


def status_of(code: Code) -> int:
    """Return the HTTP status for a code."""
    return STATUS_BY_CODE.get(code, 500)


class ServiceError(Exception):
    """A service refuses; the error has the text and the code for a failure reply.

    Args:
        code: The error code, for programs.
        reason: One sentence for a person, with the field, the expected value and the remedy.
        field: The wrong field as a dotted path; empty: no single field is wrong.
        expected: The value that was expected in the field; empty: no value is named.
        details: Further data about the error, for programs.
        status: The HTTP status of the answer; 0: the status of the code in `STATUS_BY_CODE`.
    """

    def __init__(
        self,
        code: Code,
        reason: str,
        *,
        field: str = "",
        expected: str = "",
        details: JsonMapping | None = None,
        status: int = 0,
    ) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason
        self.field = field
        self.expected = expected
        self.details: JsonMapping = details or {}
        self.status = status or status_of(code)

    @classmethod
    def wrong_field(
        cls, field: str, expected: str, code: Code = Code.BAD_MESSAGE
    ) -> "ServiceError":
        """Return the refusal of a field: `<field>: expected <expected>`."""
        return cls(code, f"{field}: expected {expected}", field=field, expected=expected)
