"""How a version of a rule does with the requests that an alias sent to it.

`admission` notes every answer of such a request here; `publishing` reads it to report, and to
fall back from a version that fails again and again.
"""

from collections import Counter, deque
from collections.abc import Callable
from statistics import quantiles
from typing import Any, Final

from moorage.core.words import Advice, Answer, LeaseNews, Refusal, Told
from moorage.model import Code

LATENCIES_MAX: Final = 1024
"""Latest latencies that percentiles are taken of."""
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
"""Refusals that the rule is to blame for; all others say something of the fleet or the server."""


class Arm:
    """One version under one alias.

    Args:
        version: Its URI.
        failing: Called with this arm after each fault.

    """

    def __init__(self, version: str, failing: Callable[["Arm"], None]) -> None:
        self.version = version
        self._failing = failing
        self.reset()

    def reset(self) -> None:
        """Start counting afresh."""
        self.asked = self.granted = self.advised = 0
        self.refused: Counter[str] = Counter()
        self.consecutive = 0
        """Faults since the last answer that was none."""
        self.bearable = 0
        """Faults in a row that are borne since nothing could be done about fewer."""
        self._latencies: deque[float] = deque(maxlen=LATENCIES_MAX)

    @property
    def answered_well(self) -> int:
        """Requests that it found a place, or advice, for."""
        return self.granted + self.advised

    @property
    def faults(self) -> int:
        """Requests that it failed at."""
        return sum(self.refused[code] for code in FAULTS)

    def note(self, answer: Answer, seconds: float | None) -> None:
        """Take note of an answer.

        Args:
            answer: As it goes to the client.
            seconds: From admission to this answer; None where it waited in the queue.

        """
        match answer:
            case LeaseNews(data=None) | Told():
                return  # A repeated request: the rule was not asked.
            case LeaseNews():
                self.granted += 1
                self.consecutive = self.bearable = 0
            case Advice():
                self.advised += 1
                self.consecutive = self.bearable = 0
            case Refusal(code=code):
                self.refused[code] += 1
                if code in FAULTS:
                    self.consecutive += 1
        if seconds is not None:
            self._latencies.append(seconds)
        if self.consecutive:
            self._failing(self)

    def report(self) -> dict[str, Any]:
        """Return all of it as plain JSON values."""
        return {
            "policy_rule_uri": self.version,
            "asked": self.asked,
            "granted": self.granted,
            "advised": self.advised,
            "refused": dict(self.refused),
            "faults": self.faults,
            "consecutive_faults": self.consecutive,
            "latency_ms": percentiles(self._latencies),
        }


def percentiles(seconds: "deque[float]") -> dict[str, float] | None:
    """Return median and 99th percentile in milliseconds; None of nothing."""
    if not seconds:
        return None
    cuts = quantiles(seconds, n=100, method="inclusive") if len(seconds) > 1 else [seconds[0]] * 99
    return {"p50": round(cuts[49] * 1000, 3), "p99": round(cuts[98] * 1000, 3)}
