"""Statistics of a policy's version, over the requests that an alias sent to it.

`admission` counts every answer to these requests; `aliases` reports the statistics, and falls back
from a version that fails again and again.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from statistics import median, quantiles
from typing import Final

from moorage.core.state.facts import Refusal
from moorage.core.turns.effects import Advice, Information, LeaseNews, Response
from moorage.model import Code, Tenant
from moorage.records.json_values import JsonObject

LATENCIES_MAX: Final = 1024
"""Number of latest latencies from which percentiles are computed."""
LATELY_SECONDS: Final = 3600.0
"""Seconds after its last answer or fault in which a tenant is a recent user of a version."""
TENANTS_MAX: Final = 1024
"""Maximum recent users remembered per version; beyond this, the least recent is forgotten."""
MANY: Final = 20
"""Least number of answers in a published statistic: fewer would reveal single answers."""
TENANTS_SUFFICIENT: Final = 3
"""Number of tenants whose failures, with no good answer in between, count as those of all users."""
FAULTS: Final = frozenset(
    {
        Code.BAD_POLICY,
        Code.POLICY_BAD_OUTPUT,
        Code.POLICY_CRASHED,
        Code.POLICY_ERROR,
        Code.POLICY_MEMORY,
        Code.POLICY_TIMEOUT,
        Code.POLICY_UNSOUND,
    }
)
"""Codes of refusals that blame the policy; others blame the fleet or the server."""


class VersionStatistics:
    """The statistics of one version under one alias.

    Args:
        failed: Called with these statistics after each fault.
    """

    def __init__(self, version: str, failed: Callable[["VersionStatistics"], None]) -> None:
        self.version = version
        self._failed = failed
        self.reset()

    def reset(self) -> None:
        """Reset all counts, as for a version that no one has tried."""
        self.restart_report()
        self.was_good = False
        """Whether the version ever returned a place or advice."""
        self.consecutive = 0
        """Number of faults since the last good answer."""
        self._codes: Counter[str] = Counter()
        """Codes of the faults since the last good answer."""
        self.bearable = 0
        """The value of `consecutive` when a fallback last failed; 0: none has failed."""
        self.failing: set[Tenant] = set()
        """Tenants whose requests have failed since the last good answer."""
        self._used: OrderedDict[Tenant, float] = OrderedDict()
        """Time of each tenant's last answer or fault, the latest last."""

    def restart_report(self) -> None:
        """Reset the figures of the report, but not the faults in a row that lead to a fallback."""
        self.asked = self.granted = self.advised = 0
        self.refused: Counter[str] = Counter()
        self._latencies: deque[float] = deque(maxlen=LATENCIES_MAX)

    @property
    def faults(self) -> int:
        """Number of requests on which the version failed."""
        return sum(self.refused[code] for code in FAULTS)

    def note(self, tenant: Tenant, answer: Response, seconds: float | None, now: float) -> None:
        """Count an answer.

        Args:
            tenant: The tenant that gets the answer.
            answer: The answer for the client.
            seconds: The time from admission to this answer; None if it waited in the queue.
            now: The present time, by the monotonic clock.
        """
        fault: Code | None = None
        match answer:
            case LeaseNews(data=None) | Information():
                return  # A repeated request: the policy was not consulted.
            case LeaseNews():
                self.granted += 1
                self._well(tenant, now)
            case Advice():
                self.advised += 1
                self._well(tenant, now)
            case Refusal(code=code):
                self.refused[code] += 1
                fault = code if code in FAULTS else None
        if seconds is not None:
            self._latencies.append(seconds)
        if fault is not None:
            self.consecutive += 1
            self._codes[fault] += 1
            self.failing.add(tenant)
            self._note_use(tenant, now)
            self._failed(self)

    def _well(self, tenant: Tenant, now: float) -> None:
        self.was_good = True
        self.consecutive = self.bearable = 0
        self.failing.clear()
        self._codes.clear()
        self._note_use(tenant, now)

    def _note_use(self, tenant: Tenant, now: float) -> None:
        self._used[tenant] = now
        self._used.move_to_end(tenant)
        oldest = next(iter(self._used))
        while len(self._used) > TENANTS_MAX or self._used[oldest] < now - LATELY_SECONDS:
            del self._used[oldest]
            oldest = next(iter(self._used))

    @property
    def fails_all(self) -> bool:
        """Whether the version fails for several tenants, or for all who use it.

        One tenant of several may send requests that no policy could answer. So all recent users, or
        enough of them, must have failures; users with few requests need not fail first.
        """
        return len(self.failing) >= min(TENANTS_SUFFICIENT, len(self._used))

    @property
    def failure(self) -> str:
        """A sentence about the latest faults, with their tenants."""
        codes = ", ".join(f"{count} {code}" for code, count in self._codes.items())
        failing, used = len(self.failing), max(len(self.failing), len(self._used))
        users = f"all {used} tenants" if failing == used else f"{failing} of the {used} tenants"
        return (
            f"{self.consecutive} requests in a row failed with {self.version} ({codes}), of"
            f" {'the only tenant' if used == 1 else users} that used it within the last hour"
        )

    def report(self, *, whole: bool) -> JsonObject:
        """Return the statistics as plain JSON values.

        Args:
            whole: Whether durations of single answers are included; else only figures that cover
                many answers.
        """
        return {
            "policy_rule_uri": self.version,
            "asked": self.asked,
            "granted": self.granted,
            "advised": self.advised,
            "refused": dict(self.refused),
            "faults": self.faults,
            "consecutive_faults": self.consecutive,
            "tenants": len(self._used),
            "failing_tenants": len(self.failing),
            "latency_ms": percentiles(self._latencies, whole=whole),
        }


def percentiles(seconds: "deque[float]", *, whole: bool) -> dict[str, float] | None:
    """Return median and 99th percentile in milliseconds; None without samples.

    A version can choose its time for an answer, and so reveal the request. A caller without
    `whole` therefore gets no percentile of few answers, and never that of the slowest one.
    """
    if not seconds or (not whole and len(seconds) < MANY):
        return None
    if not whole:
        return {"p50": float(f"{median(seconds) * 1000:.2g}")}
    cuts = quantiles(seconds, n=100, method="inclusive") if len(seconds) > 1 else [seconds[0]] * 99
    return {"p50": round(cuts[49] * 1000, 3), "p99": round(cuts[98] * 1000, 3)}
