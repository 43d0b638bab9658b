"""Refuses policies that hang too often, for a while and per tenant, for `pool`.

Each stop of a policy that never returns costs other policies a kill, a fork and a jail. So if
evaluations for one tenant are stopped at their deadline again and again, the policy's circuit opens
for that tenant, longer each time: its requests are refused at once. Other tenants are served as
before, since the cause may be the first tenant's input. Callers that stand for many tenants are
served, too.

Each version and tenant has a leaky bucket. An overrun adds one to the bucket; answers and time
drain it. So a policy that hangs at every other request is refused nearly as soon as one that always
hangs. A policy that hangs at one request in a hundred, or once a minute, is never refused.
"""

import math
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from moorage.core.state.facts import Refusal
from moorage.model import Code, PolicyRef, Tenant
from moorage.sandbox.host.contract import OpenCircuit
from moorage.sandbox.host.work import Work
from moorage.sandbox.wire.limits import Limits

OPEN_SECONDS_MIN: Final = 1.0
"""How long a circuit is open at first; each further time takes twice as long as the one before."""
OPEN_SECONDS_MAX: Final = 30.0
"""Longest time that a circuit is open."""
FORGIVEN_SECONDS: Final = 300.0
"""Seconds that forgive as many overruns as open a circuit; while it is open, none is forgiven."""
ANSWERS_PER_OVERRUN: Final = 100
"""Answers that forgive one overrun, however fast they come."""
RUNS_MAX: Final = 4096
"""Pairs of policy and tenant whose overruns are counted; with one more, the pair whose last overrun
is oldest is forgotten."""
_DOUBLINGS_MAX: Final = math.log2(OPEN_SECONDS_MAX / OPEN_SECONDS_MIN)
Key = tuple[str, str, str]
"""URI and digest of a policy version, and the tenant."""


@dataclass(slots=True)
class _Run:
    """The overruns of one policy version for one tenant that still count."""

    overruns: int = 0
    """Overruns since the level was last 0."""
    level: float = 0.0
    """Overruns that answers and time have not forgiven."""
    at: float = 0.0
    """Time from which on `level` shrinks, in monotonic seconds, as all times here."""
    until: float = 0.0


class CircuitBreaker:
    """Counts overruns by policy version and tenant; quick answers and time reduce the count.

    Args:
        limits: The limits, with `circuit_overruns` and the deadline of evaluations.
        counters: Counts `circuits_opened`, and `circuit_refusals` while circuits are open.
        opened: Called when a circuit opens.
    """

    def __init__(
        self, limits: Limits, counters: Counter[str], opened: Callable[[OpenCircuit], None]
    ) -> None:
        self._overruns_min = limits.circuit_overruns
        self._limits = limits
        self._counters = counters
        self._opened = opened
        self._runs: OrderedDict[Key, _Run] = OrderedDict()

    def overran(self, work: Work, now: float) -> bool:
        """Count an evaluation that was stopped at its deadline; return whether a circuit opens."""
        if not self._overruns_min or work.proxied:
            return False
        key = _key(work)
        run = self._runs.pop(key, None)
        # The time of the hang forgives nothing; otherwise a long deadline would forgive itself.
        if run is None or self._forgive(run, now - work.deadline_seconds(self._limits)) <= 0:
            run = _Run()
        self._runs[key] = run
        if len(self._runs) > RUNS_MAX:
            self._runs.popitem(last=False)
        run.overruns += 1
        run.level = min(run.level + 1, self._overruns_min + _DOUBLINGS_MAX)
        run.at = now
        # Without the half, time between overruns in a row would allow one more.
        beyond = run.level - self._overruns_min + 0.5
        if beyond < 0:
            return False
        seconds = OPEN_SECONDS_MIN * 2.0 ** min(math.floor(beyond), _DOUBLINGS_MAX)
        run.at = run.until = now + seconds
        self._counters["circuits_opened"] += 1
        self._opened(OpenCircuit(work.code.ref, Tenant(work.tenant), run.overruns, seconds))
        return True

    def note_answer(self, work: Work) -> None:
        """Record that the policy ended by itself, which cancels a part of an overrun."""
        if not self._runs:
            return
        key = _key(work)
        run = self._runs.get(key)
        if run is not None:
            run.level -= 1 / ANSWERS_PER_OVERRUN
            if run.level <= 0:
                del self._runs[key]

    def _forgive(self, run: _Run, now: float) -> float:
        """Reduce a count by the time since the last change; return the reduced count."""
        seconds = max(0.0, now - run.at)
        run.level -= seconds * self._overruns_min / FORGIVEN_SECONDS
        return run.level

    def refusal(self, work: Work, now: float) -> Refusal | None:
        """Return why this policy is not evaluated now, if the circuit is open."""
        if not self._runs or work.proxied:
            return None
        circuit = self.current(work.code.ref, work.tenant, now)
        if circuit is None:
            return None
        self._counters["circuit_refusals"] += 1
        return Refusal(
            Code.BUSY,
            f"{circuit.ref.uri} is not called for another {circuit.seconds:.1f} s:"
            f" {circuit.overruns} of its latest evaluations for you were stopped at their deadline",
            expected="a request that the policy answers in time, after the wait or an activation",
            details={
                "policy_rule_uri": circuit.ref.uri,
                "overruns": circuit.overruns,
                "retry_after_seconds": math.ceil(circuit.seconds * 10) / 10,
            },
        )

    def current(self, ref: PolicyRef, tenant: str, now: float) -> OpenCircuit | None:
        """Return the circuit of a policy for a tenant, if it is open."""
        run = self._runs.get((ref.uri, ref.digest, tenant))
        if run is None or run.until <= now:
            return None
        return OpenCircuit(ref, Tenant(tenant), run.overruns, run.until - now)

    def open_now(self, now: float) -> int:
        """Return the number of open circuits."""
        return sum(run.until > now for run in self._runs.values())

    def end(self, uri: str) -> None:
        """Close the circuits of a policy for all tenants."""
        for key in [key for key in self._runs if key[0] == uri]:
            del self._runs[key]


def _key(work: Work) -> Key:
    return work.code.ref.uri, work.code.ref.digest, work.tenant
