"""Workflows: graphs of tasks that run while there are resources for them.

The resources are counted in this program (`ResourcePool`), or are those of a Moorage server: each
node then holds a lease while it runs (`LeasedPool`). README.md beside this file shows how.

All errors are one tree, below `MoorageError`:

    WorkflowError          something is wrong with a workflow, its resources or its journal
    ├── GraphError         a cycle, a duplicate name, an unknown node (also a ValueError)
    ├── ResourceError      an amount is invalid or was never acquired (also a ValueError)
    ├── GateRejected       the gate of a node was rejected
    ├── GateTimeout        the gate of a node was not approved in time (also a TimeoutError)
    ├── JournalError       a journal that cannot be used
    ├── TaskStopped        why a cancelled task got a stop signal
    ├── PoolBroken         a process of the pool in `run_in` was killed: no retry helps
    └── TaskTimeout        why a task that took too long was stopped (also a TimeoutError)
"""

from moorage_client.workflow.async_executor import AsyncDAGExecutor, AsyncResourceAwareExecutor
from moorage_client.workflow.callbacks import ExecutionCallbacks
from moorage_client.workflow.errors import (
    GateRejected,
    GateTimeout,
    GraphError,
    JournalError,
    PoolBroken,
    ResourceError,
    TaskStopped,
    TaskTimeout,
    WorkflowError,
)
from moorage_client.workflow.executor import DAGExecutor, DynamicExecutor, ResourceAwareExecutor
from moorage_client.workflow.gates import ApprovalGate, GateController, GateStatus
from moorage_client.workflow.graph import DAG, DAGBuilder, Edge, NodeId
from moorage_client.workflow.growth import DynamicModification, DynamicNodeSpec
from moorage_client.workflow.journal import RunJournal
from moorage_client.workflow.leased import LeasedPool
from moorage_client.workflow.picture import draw_timeline
from moorage_client.workflow.pool import ResourcePool
from moorage_client.workflow.progress import ProgressBar
from moorage_client.workflow.requirements import ResourceRequirements
from moorage_client.workflow.results import CallbackError, ExecutionResult, NodeResult, NodeStatus
from moorage_client.workflow.running import RunningNode, current_node
from moorage_client.workflow.timeline import ResourceSnapshot, ResourceTimeline
from moorage_client.workflow.tracing import EventType, ExecutionTrace, TraceEvent

__all__ = [
    "DAG",
    "ApprovalGate",
    "AsyncDAGExecutor",
    "AsyncResourceAwareExecutor",
    "CallbackError",
    "DAGBuilder",
    "DAGExecutor",
    "DynamicExecutor",
    "DynamicModification",
    "DynamicNodeSpec",
    "Edge",
    "EventType",
    "ExecutionCallbacks",
    "ExecutionResult",
    "ExecutionTrace",
    "GateController",
    "GateRejected",
    "GateStatus",
    "GateTimeout",
    "GraphError",
    "JournalError",
    "LeasedPool",
    "NodeId",
    "NodeResult",
    "NodeStatus",
    "PoolBroken",
    "ProgressBar",
    "ResourceAwareExecutor",
    "ResourceError",
    "ResourcePool",
    "ResourceRequirements",
    "ResourceSnapshot",
    "ResourceTimeline",
    "RunJournal",
    "RunningNode",
    "TaskStopped",
    "TaskTimeout",
    "TraceEvent",
    "WorkflowError",
    "current_node",
    "draw_timeline",
]
