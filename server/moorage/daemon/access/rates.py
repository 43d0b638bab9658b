"""Limits the rates of requests and evaluations, with token buckets for each tenant."""

import time
from collections.abc import Callable
from typing import Final

from moorage.core.state.facts import Refusal
from moorage.daemon.answers import error_of
from moorage.model import Code, Tenant

REQUESTS: Final = "tenant_requests_per_second"
UPLOADS: Final = "tenant_uploads_per_minute"
EVALUATIONS: Final = "tenant_evaluation_seconds_per_minute"
WATCHERS: Final = "tenant_watchers_max"
LIMITS: Final = (REQUESTS, UPLOADS, EVALUATIONS, WATCHERS)
"""Names of the settings that limit one tenant."""
TENANTS_MAX: Final = 10_000
"""Maximum token buckets in memory, one per tenant; one more drops the bucket used longest ago."""
MINUTE_SECONDS: Final = 60.0
RETRY_SECONDS_MIN: Final = 0.1
"""Least seconds until a retry, for a tenant whose bucket is exactly empty."""


class _Buckets:
    """One bucket of tokens per tenant, which holds the tokens of one period.

    Args:
        count: Tokens that a tenant gets per period; 0: the rate is not limited.
        clock: Seconds on a clock that never goes back.
    """

    def __init__(self, count: int, seconds: float, clock: Callable[[], float]) -> None:
        self._size = float(count)
        self._per_second = count / seconds
        self._clock = clock
        self._left: dict[Tenant, tuple[float, float]] = {}
        """For each tenant, the tokens that were left at a time, and that time."""

    def take(self, tenant: Tenant) -> float:
        """Take a token and return 0; if there is none, return the seconds until the next token."""
        if not self._size:
            return 0.0
        left = self.spend(tenant, 1.0)
        if left >= 0.0:
            return 0.0
        self.spend(tenant, -1.0)
        return -left / self._per_second

    def spend(self, tenant: Tenant, amount: float) -> float:
        """Take tokens from a bucket, which may fall below zero; return the rest."""
        now = self._clock()
        left, counted_at = self._left.pop(tenant, (self._size, now))
        left = min(self._size, left + (now - counted_at) * self._per_second) - amount
        self._left[tenant] = (left, now)
        if len(self._left) > TENANTS_MAX:
            del self._left[next(iter(self._left))]
        return left


class EvaluationRate:
    """Refuses evaluations of a tenant whose policies used too much processor time.

    The processor time of an evaluation is only known afterwards, so a tenant may exceed its budget.
    Until enough time has passed, nothing new is evaluated for this tenant. See
    `sandbox.host.contract.Meter`.

    Args:
        seconds_per_minute: Processor time for each tenant.
        clock: Seconds on a clock that never goes back.
    """

    def __init__(
        self, seconds_per_minute: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._seconds = seconds_per_minute
        self._left = _Buckets(seconds_per_minute, MINUTE_SECONDS, clock)

    def burnt(self, tenant: Tenant, seconds: float) -> None:
        """Record the processor time of an evaluation."""
        self._left.spend(tenant, seconds)

    def refusal(self, tenant: Tenant) -> Refusal | None:
        """Return why a tenant may evaluate nothing new now, or None."""
        left = self._left.spend(tenant, 0.0)
        if left > 0:
            return None
        most = f"have {self._seconds} s of processor time a minute for its policies"
        wait = max(RETRY_SECONDS_MIN, -left * MINUTE_SECONDS / self._seconds)
        return _too_much(tenant, most, EVALUATIONS, wait)


class TenantRates:
    """Refuses requests and uploads of a tenant that exceed its rate.

    Args:
        requests_per_second: Messages on the WebSocket and the same requests over HTTP; 0: no limit.
        uploads_per_minute: Policies that are published; 0: no limit.
        clock: Seconds on a clock that never goes back.
        evaluations: Limits the processor time of a tenant's policies; None: no limit.
    """

    def __init__(
        self,
        requests_per_second: int,
        uploads_per_minute: int,
        clock: Callable[[], float] = time.monotonic,
        evaluations: EvaluationRate | None = None,
    ) -> None:
        self.evaluations = evaluations
        self._requests_per_second = requests_per_second
        self._uploads_per_minute = uploads_per_minute
        self._requests = _Buckets(requests_per_second, 1.0, clock)
        self._uploads = _Buckets(uploads_per_minute, MINUTE_SECONDS, clock)

    def refusal(self, tenant: Tenant) -> Refusal | None:
        """Return why a request exceeds its tenant's rate, or None. Runs on the hot path."""
        wait = self._requests.take(tenant)
        if not wait:
            return None
        most = f"send {self._requests_per_second} requests a second"
        return _too_much(tenant, most, REQUESTS, wait)

    def take_upload(self, tenant: Tenant) -> None:
        """Count a policy that a tenant publishes.

        Raises:
            ServiceError: `busy`: the tenant exceeds its rate.
        """
        wait = self._uploads.take(tenant)
        if wait:
            most = f"send {self._uploads_per_minute} policies a minute"
            raise error_of(_too_much(tenant, most, UPLOADS, wait))


def _too_much(tenant: Tenant, most: str, setting: str, wait: float) -> Refusal:
    return Refusal(
        Code.BUSY,
        f"tenant “{tenant}” may {most} (setting `{setting}`)",
        expected=f"the same again, in {wait:.1f} s",
        details={"retry_after_seconds": round(wait, 3)},
    )
