"""Decides which right each HTTP request needs."""

from collections.abc import Mapping
from typing import Final

from moorage.model import Code
from moorage.protocol.faults import ServiceError, status_of
from moorage.records.rights import Caller, Right
from moorage.web.notes import READS

_READING: Final = frozenset({"GET", "HEAD", "OPTIONS"})
_POSTED: Final[Mapping[str, Right]] = {
    "/allocate": Right.PLACE,
    "/blockActions/allocate": Right.PLACE,
    "/blockActions/dryRun": Right.PLACE,
    "/blockActions/selectClusters": Right.PLACE,
    "/console/playground": Right.POLICY,
    "/console/playground/backtest": Right.POLICY,
    "/executor/{executor}/execute_policy": Right.PLACE,
}
_POLICIES: Final = ("/policy", "/policy-alias")
_TOKENS: Final = "/tokens"
_OPERATIONS: Final = "/quotas"
"""The path whose operations check the caller's right themselves."""


def right_of(method: str, path: str) -> Right:
    """Return the right that a route needs; for an unlisted path, the right to change the fleet."""
    if path == "/metrics":
        return Right.METRICS
    if path in _POSTED:
        return _POSTED[path]
    if path.startswith(_TOKENS):
        return Right.TOKEN
    if method in _READING or path in READS or path.startswith(_OPERATIONS):
        return Right.READ
    return Right.POLICY if path.startswith(_POLICIES) else Right.CLUSTER


def missing_right(caller: Caller, right: Right) -> ServiceError:
    """Return the error for a caller who lacks a right: 403, since the token is known."""
    return ServiceError(
        Code.UNAUTHORIZED,
        caller.refusal(right),
        expected=right.expected,
        details={"verdict": "not_you"},
        status=status_of(Code.FORBIDDEN),
    )
