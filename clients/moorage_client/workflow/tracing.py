"""The events of a run, as a list and as a Chrome trace with resource lanes.

A Chrome trace opens in `chrome://tracing` and https://ui.perfetto.dev. The format is that of the
Trace Event Format document of the Chromium project: `B` and `E` for the begin and the end of
something, `C` for a counter, `M` for names; times in microseconds.
"""

import json
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Final

from moorage.records.json_values import JsonObject
from moorage_client.workflow.requirements import amount_of, units

_MICROSECONDS: Final = 1e6


class EventType(StrEnum):
    """The type of an event."""

    EXECUTION_STARTED = "execution_started"
    EXECUTION_COMPLETED = "execution_completed"
    NODE_STARTED = "node_started"
    NODE_COMPLETED = "node_completed"
    NODE_FAILED = "node_failed"
    NODE_SKIPPED = "node_skipped"
    NODE_TIMED_OUT = "node_timed_out"
    NODE_CANCELLED = "node_cancelled"
    NODE_RETRIED = "node_retried"
    """An attempt failed; the node is tried again."""
    NODE_GATE_WAITING = "node_gate_waiting"
    NODE_GATE_RESOLVED = "node_gate_resolved"
    RESOURCE_ACQUIRED = "resource_acquired"
    RESOURCE_RELEASED = "resource_released"
    CACHE_HIT = "cache_hit"
    """The node completed in an earlier run with the same journal."""


NODE_ENDS: Final = {
    EventType.NODE_COMPLETED: "completed",
    EventType.NODE_FAILED: "failed",
    EventType.NODE_TIMED_OUT: "timed_out",
    EventType.NODE_CANCELLED: "cancelled",
    EventType.NODE_RETRIED: "retried",
}
"""Events that end the bar which `NODE_STARTED` began, each with the status that the trace shows.

If the node never started, for example because the run was cancelled, the event is a mark.
"""


@dataclass(slots=True)
class TraceEvent:
    """An event of a run.

    Args:
        event_type: The type of the event.
        timestamp: The time, in seconds since the epoch.
        node_name: The node of the event; None: the whole run.
        step_index: The event's position in the trace, from 0.
        duration: For an event that ends an attempt: the seconds that it took.
        error: The error, as text.
        metadata: For resources: `{"resources": {name: amount}}`; for a resolved gate: `{"status":
            "approved"}`, `rejected` or `timed_out`.
    """

    event_type: EventType
    timestamp: float
    node_name: str | None = None
    step_index: int | None = None
    duration: float | None = None
    error: str | None = None
    metadata: JsonObject = field(default_factory=dict)


class ExecutionTrace:
    """Records the events of a run, in order."""

    def __init__(self) -> None:
        self.events: list[TraceEvent] = []
        # The wall clock may be set back during the run; the monotonic clock is not.
        self._offset = time.time() - time.monotonic()

    def add(
        self,
        event_type: EventType,
        node_name: str | None = None,
        *,
        duration: float | None = None,
        error: BaseException | None = None,
        resources: Mapping[str, float] | None = None,
        status: str = "",
    ) -> None:
        """Add an event with the current time; executors call this, on any thread."""
        metadata: JsonObject = {} if resources is None else {"resources": dict(resources)}
        self.events.append(
            TraceEvent(
                event_type,
                time.monotonic() + self._offset,
                node_name,
                None,
                duration,
                None if error is None else _text(error),
                metadata | ({"status": status} if status else {}),
            )
        )

    def close(self) -> None:
        """Sort and number the events, which several threads wrote. For the executors."""
        self.events.sort(key=lambda event: event.timestamp)
        for number, event in enumerate(self.events):
            event.step_index = number

    def events_for_node(self, name: str) -> list[TraceEvent]:
        """Return the events of one node."""
        return [event for event in self.events if event.node_name == name]

    def summary(self) -> str:
        """Return one line per type of event, with its count."""
        counts = Counter(event.event_type for event in self.events)
        rows = [f"{kind}: {counts[kind]}" for kind in EventType if counts[kind]]
        return "\n".join([f"{len(self.events)} events", *rows])

    def to_json(self) -> str:
        """Return the events as a JSON list."""
        return json.dumps([asdict(event) for event in self.events])

    def to_chrome_trace(self) -> str:
        """Return the trace for Chrome or Perfetto: a lane per node, a counter per resource."""
        events = [*self._names(), *self._bars(), *self._counters()]
        return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})

    def to_chrome_json(self, path: str | Path) -> None:
        """Write `to_chrome_trace` to a file."""
        Path(path).write_text(self.to_chrome_trace(), encoding="utf-8")

    def _lanes(self) -> dict[str, int]:
        """Number the nodes from 1; lane 0 is the whole run."""
        names = dict.fromkeys(event.node_name for event in self.events if event.node_name)
        return {name: number for number, name in enumerate(names, 1)}

    def _names(self) -> Iterator[JsonObject]:
        yield _meta("process_name", 0, "workflow")
        yield _meta("thread_name", 0, "execution")
        for name, lane in self._lanes().items():
            yield _meta("thread_name", lane, name)

    def _bars(self) -> Iterator[JsonObject]:
        lanes = self._lanes()
        begun = set[str]()
        for event in self.events:
            kind = event.event_type
            if kind in (EventType.EXECUTION_STARTED, EventType.EXECUTION_COMPLETED):
                begins = kind is EventType.EXECUTION_STARTED
                yield _bar("execution", "execution", "B" if begins else "E", event.timestamp, 0, {})
                continue
            name = event.node_name or ""
            if kind is EventType.NODE_STARTED:
                begun.add(name)
                yield _bar(name, "node", "B", event.timestamp, lanes[name], {})
            elif kind in NODE_ENDS:
                args = {"status": NODE_ENDS[kind]}
                args |= {} if event.error is None else {"error": event.error}
                phase = "E" if name in begun else "i"
                begun.discard(name)
                yield _bar(name, "node", phase, event.timestamp, lanes[name], args)
            elif kind in (EventType.NODE_GATE_WAITING, EventType.NODE_GATE_RESOLVED):
                mark = _bar(kind, "gate", "i", event.timestamp, lanes[name], event.metadata)
                yield mark | {"s": "t"}  # A mark in the lane of its node.

    def _counters(self) -> Iterator[JsonObject]:
        """Yield the amounts of each resource that this run held, at each change."""
        used: Counter[str] = Counter()
        for event in self.events:
            sign = {EventType.RESOURCE_ACQUIRED: 1, EventType.RESOURCE_RELEASED: -1}.get(
                event.event_type
            )
            if sign is None:
                continue
            for name, amount in event.metadata["resources"].items():
                used[name] += sign * units(amount, name)
                yield {
                    "name": name,
                    "cat": "resource",
                    "ph": "C",
                    "ts": event.timestamp * _MICROSECONDS,
                    "pid": 1,
                    "args": {"allocated": amount_of(used[name])},
                }


def _text(error: BaseException) -> str:
    """Return an exception as text, also if its `str` raises."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001  # The code of a task made the exception.
        return f"{type(error).__name__}: <exception str() failed>"  # The words of a traceback.


def _meta(kind: str, lane: int, name: str) -> JsonObject:
    return {"name": kind, "ph": "M", "pid": 1, "tid": lane, "args": {"name": name}}


def _bar(
    name: str, category: str, phase: str, seconds: float, lane: int, args: JsonObject
) -> JsonObject:
    return {
        "name": name,
        "cat": category,
        "ph": phase,
        "ts": seconds * _MICROSECONDS,
        "pid": 1,
        "tid": lane,
        "args": args,
    }
