"""Results of a run: one per node, and their counts."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from moorage.model import Placement
from moorage_client.workflow.growth import Result
from moorage_client.workflow.timeline import ResourceTimeline
from moorage_client.workflow.tracing import ExecutionTrace


class NodeStatus(StrEnum):
    """The status of a node."""

    PENDING = "pending"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    SKIPPED = "skipped"
    """The node has no task, or a node on which it depends failed."""
    TIMED_OUT = "timed_out"
    CANCELLED = "cancelled"
    CACHE_HIT = "cache_hit"
    """The node completed in an earlier run with the same journal."""


@dataclass(slots=True)
class NodeResult:
    """The result of one node.

    Args:
        name: The node's name.
        status: The node's final status.
        result: The value that the task returned.
        error: The reason why the node did not complete, or None.
        duration_seconds: Duration of the last attempt.
        attempts: Number of starts of the task.
        started_at: Start of the last attempt, in seconds since the epoch; 0.0: never.
        placement: The node's place, one share per machine; empty if the pool does not know it.
    """

    name: str
    status: NodeStatus
    result: Result = None
    error: BaseException | None = None
    duration_seconds: float = 0.0
    attempts: int = 0
    started_at: float = 0.0
    placement: Placement = ()


@dataclass(frozen=True, slots=True)
class CallbackError:
    """The error of a callback that does not fail a node.

    Args:
        callback: The callback's name, such as `on_resource_released`; `release`: the pool failed.
        node_name: The node for which the callback was called.
        error: The exception that the callback raised.
    """

    callback: str
    node_name: str
    error: BaseException


@dataclass(slots=True)
class ExecutionResult:
    """The results of a run: `result["train"]`, `"train" in result`, `result.succeeded`.

    Args:
        node_results: The result of each node, by name.
        succeeded: Nodes that completed, in this run or in an earlier run with the same journal.
        failed: Nodes that failed.
        skipped: Nodes that were skipped.
        timed_out: Nodes that exceeded their time limit.
        cancelled: Nodes that were cancelled.
        total_duration_seconds: The duration of the whole run.
        trace: The events of the run, if `enable_tracing` was set.
        resource_timeline: The timeline of the pool, which may also show other runs.
        callback_errors: Exceptions of callbacks that did not fail a node.
    """

    node_results: dict[str, NodeResult] = field(repr=False)
    succeeded: int = 0
    failed: int = 0
    skipped: int = 0
    timed_out: int = 0
    cancelled: int = 0
    total_duration_seconds: float = 0.0
    trace: ExecutionTrace | None = field(default=None, repr=False)
    resource_timeline: ResourceTimeline | None = field(default=None, repr=False)
    callback_errors: list[CallbackError] = field(default_factory=list)

    def __getitem__(self, name: str) -> NodeResult:
        return self.node_results[name]

    def __contains__(self, name: object) -> bool:
        return name in self.node_results

    @classmethod
    def of(cls, node_results: dict[str, NodeResult], **rest: Any) -> "ExecutionResult":
        """Return the result of a run from the results of its nodes."""
        counts = dict.fromkeys(NodeStatus, 0)
        for each in node_results.values():
            counts[each.status] += 1
        return cls(
            node_results,
            succeeded=counts[NodeStatus.COMPLETED] + counts[NodeStatus.CACHE_HIT],
            failed=counts[NodeStatus.FAILED],
            skipped=counts[NodeStatus.SKIPPED],
            timed_out=counts[NodeStatus.TIMED_OUT],
            cancelled=counts[NodeStatus.CANCELLED],
            **rest,
        )

    @property
    def results(self) -> Mapping[str, Result]:
        """The results of the tasks that completed, by name."""
        done = (NodeStatus.COMPLETED, NodeStatus.CACHE_HIT)
        return {n: each.result for n, each in self.node_results.items() if each.status in done}
