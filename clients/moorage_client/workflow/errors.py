"""The errors of workflows; the tree is drawn in the docstring of the package."""

from moorage_client.errors import MoorageError


class WorkflowError(MoorageError):
    """Something is wrong with a workflow, its resources or its journal."""


class GraphError(WorkflowError, ValueError):
    """The graph has a cycle, a duplicate name, or an unknown name."""


class ResourceError(WorkflowError, ValueError):
    """An amount is invalid, can never be available, or was never taken."""


class GateRejected(WorkflowError):  # noqa: N818  # See `TaskStopped`.
    """The gate of a node was rejected."""


class GateTimeout(WorkflowError, TimeoutError):  # noqa: N818  # See `TaskTimeout`.
    """The gate of a node was not approved in time."""


class JournalError(WorkflowError):
    """A journal cannot be read or written, or belongs to another graph."""


class PoolBroken(WorkflowError):  # noqa: N818  # See `TaskStopped`.
    """A process of the pool in `run_in` ended, so the pool can call no more tasks."""


class TaskStopped(WorkflowError):  # noqa: N818  # The task did nothing wrong.
    """The run was cancelled; `current_node().check()` raises this error."""


class TaskTimeout(WorkflowError, TimeoutError):  # noqa: N818  # Like `Timeout` of the clients.
    """A task took longer than its entry in `timeouts` allows."""
