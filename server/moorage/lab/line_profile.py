"""Measures the time of every line of a policy, inside its cell.

`policy_test` sends the text of this module into the jail as the entry of a policy. The policy's own
entry is then called `rule_under_test`. The profiler evaluates that module with a trace function,
and its `management` returns the time per line. Time inside a library is added to the line that
called the library.
"""

import importlib
import linecache
import sys
import time
from types import FrameType
from typing import Any, Final

ROOT: Final = "/policy/"
OURS: Final = ROOT + "function.py"
BUDGET_SECONDS: Final = 1.0
"""Seconds after which the profiler ends an evaluation; the profile covers the lines until then."""
LINES_MAX: Final = 40


class _BudgetSpentError(BaseException):
    """Ends an evaluation at its time limit; the trace function raises it."""


class AIOSv1PolicyRule:
    """Runs the policy under test and measures each line."""

    def __init__(
        self, rule_id: str, settings: dict[str, object], parameters: dict[str, object]
    ) -> None:
        subject = importlib.import_module("rule_under_test")  # The module exists in the cell.
        self._policy: Any = subject.AIOSv1PolicyRule(rule_id, settings, parameters)
        self._lines: dict[tuple[str, int], list[float]] = {}
        self._here: tuple[str, int] | None = None
        self._since = self._end = 0.0
        self._evaluations = 0

    def eval(
        self, parameters: dict[str, object], input_data: object, context: dict[str, object]
    ) -> Any:
        """Evaluate the policy under test and return its value."""
        self._evaluations += 1
        self._since = time.perf_counter()
        self._end = self._since + BUDGET_SECONDS
        sys.settrace(self._note_call)
        try:
            return self._policy.eval(parameters, input_data, context)
        except _BudgetSpentError:
            return {"declined": "the profiler ended it"}
        finally:
            sys.settrace(None)
            self._move(None)

    def management(self, action: str, data: object) -> dict[str, object]:
        """Return the slowest lines, the slowest first."""
        del action, data
        lines = sorted(self._lines.items(), key=lambda item: -item[1][1])[:LINES_MAX]
        return {
            "evaluations": self._evaluations,
            "seconds": sum(seconds for _, seconds in self._lines.values()),
            "lines": [
                {
                    "file": file.removeprefix(ROOT).replace("rule_under_test.py", "function.py"),
                    "line": line,
                    "hits": int(hits),
                    "seconds": seconds,
                    "text": linecache.getline(file, line).rstrip(),
                }
                for (file, line), (hits, seconds) in lines
            ],
        }

    def _note_call(self, frame: FrameType, event: str, argument: Any) -> Any:
        del event, argument
        file = frame.f_code.co_filename
        return self._note_line if file.startswith(ROOT) and file != OURS else None

    def _note_line(self, frame: FrameType, event: str, argument: Any) -> Any:
        del argument
        if event == "line":
            self._move((frame.f_code.co_filename, frame.f_lineno))
        elif event == "return":
            back = frame.f_back
            caller = None if back is None else (back.f_code.co_filename, back.f_lineno)
            if caller is not None and caller[0].startswith(ROOT) and caller[0] != OURS:
                self._move(caller, hits=0)
        return self._note_line

    def _move(self, place: tuple[str, int] | None, hits: int = 1) -> None:
        """Add the time since the last step to the line that ran."""
        now = time.perf_counter()
        if self._here is not None:
            self._lines[self._here][1] += now - self._since
        if place is not None:
            self._lines.setdefault(place, [0.0, 0.0])[0] += hits
            if now > self._end:
                raise _BudgetSpentError
        self._here, self._since = place, time.perf_counter()
