"""The errors of workflows; the tree is drawn in the docstring of the package."""

from moorage_client.errors import MoorageError


class WorkflowError(MoorageError):
    """Something is wrong with a workflow, its resources or its journal."""


class GraphError(WorkflowError, ValueError):
    """The graph is none: a cycle, a name that is taken, or one that was not added."""


class ResourceError(WorkflowError, ValueError):
    """An amount is not one, can never be had, or was never taken."""


class GateRejected(WorkflowError):  # noqa: N818  # As `TaskStopped`.
    """The gate of a node was rejected."""


class GateTimeout(WorkflowError, TimeoutError):  # noqa: N818  # As `TaskTimeout`.
    """The gate of a node was not approved in time."""


class JournalError(WorkflowError):
    """A journal cannot be read or written, or is that of another graph."""


class PoolBroken(WorkflowError):  # noqa: N818  # As `TaskStopped`.
    """A process of the pool of `run_in` ended, and no task can be called there any more."""


class TaskStopped(WorkflowError):  # noqa: N818  # It is no error of the task.
    """The run was cancelled; `current_node().check()` raises it in tasks that ask."""


class TaskTimeout(WorkflowError, TimeoutError):  # noqa: N818  # As `Timeout` of the clients.
    """A task did not end within its `timeouts` entry."""
