"""`moored` without metrics of requests, as the baseline of `observation`.

There is no setting that switches metrics off, so what takes the figures is replaced here.
"""

import sys

from moorage.commands.program import run
from moorage.daemon.observability.counters import Measures
from moorage.daemon.observability.durations import DurationMetrics

if __name__ == "__main__":
    for kind, methods in (
        (Measures, (Measures.observe_facts, Measures.count)),
        (
            DurationMetrics,
            (
                DurationMetrics.observe_decision,
                DurationMetrics.observe_facts,
                DurationMetrics.observe_commit,
                DurationMetrics.observe_consultation,
                DurationMetrics.forget_consultation,
            ),
        ),
    ):
        for each in methods:
            setattr(kind, each.__name__, lambda *_: None)
    sys.exit(run())
