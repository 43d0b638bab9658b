"""Runs `moored` so that signals switch its request metrics and audit log on and off.

The benchmark `observation` uses it. No setting switches metrics off, so this module replaces the
functions that count. Both kinds of blocks run in one process, since two processes with the same
program differ by some percent in processor time.
"""

import signal
import sys
from typing import Final

from moorage.commands.program import run
from moorage.daemon.access.audit_trail import AuditTrail
from moorage.daemon.observability.counters import Measures
from moorage.daemon.observability.durations import DurationMetrics

WITHOUT: Final = signal.SIGUSR1
WITH: Final = signal.SIGUSR2
_METHODS: Final = (
    (Measures, Measures.observe_facts),
    (Measures, Measures.count),
    (DurationMetrics, DurationMetrics.observe_decision),
    (DurationMetrics, DurationMetrics.observe_facts),
    (DurationMetrics, DurationMetrics.observe_commit),
    (DurationMetrics, DurationMetrics.observe_consultation),
    (DurationMetrics, DurationMetrics.forget_consultation),
    (AuditTrail, AuditTrail.observe_step),
    (AuditTrail, AuditTrail.observe_commit),
)


def _switch(number: int, _: object) -> None:
    for kind, method in _METHODS:
        setattr(kind, method.__name__, method if number == WITH else lambda *_: None)


if __name__ == "__main__":
    for each in (WITHOUT, WITH):
        signal.signal(each, _switch)
    sys.exit(run())
