"""The callbacks of an executor, called when its nodes start and end."""

from collections.abc import Callable
from dataclasses import dataclass

from moorage_client.workflow.growth import DynamicModification, Result


@dataclass(slots=True)
class ExecutionCallbacks:
    """Functions that a run calls when its nodes start and end, each None by default.

    The sync executor calls them on the thread that runs the node, the async one on its event loop;
    they should return quickly. An exception never leaks resources. In `on_start`, `on_complete` and
    the callbacks of gates it fails the node; in any other callback it is stored in
    `ExecutionResult.callback_errors`. A `KeyboardInterrupt` or `SystemExit`, except in the
    callbacks of gates, also cancels the run; `execute` then raises it.

    The order for one node: `on_resource_acquired`, `on_start`, the task, then `on_complete` or
    `on_failure`, `on_resource_released`. A node that is tried again does not fail before its last
    attempt. A node that times out, or is cancelled while it runs, counts as failed here.

    Args:
        on_start: `(name)`: the node's task starts.
        on_complete: `(name, value)`: the node's task returned `value`.
        on_failure: `(name, exception)`: the node has failed, and is not tried again.
        on_skip: `(name)`: the node will not run, since it has no task or a node before it failed.
        on_gate_waiting: `(name)`: the node waits at its gate, see `gates`.
        on_gate_resolved: `(name, status)`: the node's gate is `approved`, `rejected` or
            `timed_out`.
        on_dynamic_expand: `(name, modification)`: the node changed the graph, see
            `DynamicExecutor`.
        on_resource_acquired: `(name, resources)`: the node holds its resources.
        on_resource_released: `(name, resources)`: the node has released its resources.
    """

    on_start: Callable[[str], object] | None = None
    on_complete: Callable[[str, Result], object] | None = None
    on_failure: Callable[[str, BaseException], object] | None = None
    on_skip: Callable[[str], object] | None = None
    on_gate_waiting: Callable[[str], object] | None = None
    on_gate_resolved: Callable[[str, str], object] | None = None
    on_dynamic_expand: Callable[[str, DynamicModification], object] | None = None
    on_resource_acquired: Callable[[str, dict[str, float]], object] | None = None
    on_resource_released: Callable[[str, dict[str, float]], object] | None = None
