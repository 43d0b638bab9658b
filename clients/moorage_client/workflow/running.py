"""`current_node()`: the running node, for its own task."""

import threading
from collections.abc import Callable, Mapping
from contextvars import ContextVar, Token

from moorage.model import Placement
from moorage_client.workflow.errors import GraphError, TaskStopped, WorkflowError
from moorage_client.workflow.grants import Grant
from moorage_client.workflow.growth import DynamicModification
from moorage_client.workflow.tracing import EventType

_NOTHING: Mapping[str, str] = {}
_making_events = threading.Lock()


class RunningNode:
    """The running attempt at a node, as its task sees it. Any thread may use it.

    Args:
        name: The node's name.
        number: The node's number in its graph.
        attempt: The number of the attempt, from 1.
        grant: The node's grant; None if it requires nothing.
        on_stop: Called with this object at the stop signal.
    """

    __slots__ = (
        "_event",
        "_on_stop",
        "abandoned",
        "attempt",
        "end",
        "ended",
        "grant",
        "growth",
        "holds",
        "name",
        "number",
        "refused",
        "released",
        "started",
        "stopped_by",
    )

    def __init__(
        self,
        name: str,
        number: int,
        attempt: int,
        grant: Grant | None,
        on_stop: "Callable[[RunningNode], object] | None" = None,
    ) -> None:
        self.name = name
        self.number = number
        self.attempt = attempt
        self.grant = grant
        self.holds = grant is not None
        self.released = False  # Released, but the callbacks were not called yet.
        self.end: tuple[EventType, float, BaseException | None] | None = None  # For the trace.
        self.started = 0.0
        self.refused: Exception | None = None
        self.ended = False
        self.abandoned = False
        self.stopped_by: BaseException | None = None
        self.growth: DynamicModification | GraphError | None = None  # From its expander.
        self._event: threading.Event | None = None
        self._on_stop = on_stop

    @property
    def placement(self) -> Placement:
        """The node's placement: one share per machine; empty if the pool only counts."""
        return self.grant.placement if self.grant is not None else ()

    @property
    def environment(self) -> Mapping[str, str]:
        """Variables for processes of the task: `CUDA_VISIBLE_DEVICES` and the placement."""
        return self.grant.environment if self.grant is not None else _NOTHING

    @property
    def resources(self) -> dict[str, float]:
        """The resources that the node holds, by name."""
        return dict(self.grant.requirements.resources) if self.grant is not None else {}

    @property
    def stopped(self) -> bool:
        """Whether the task should end: a timeout, a lost lease, or a cancelled run."""
        return self.stopped_by is not None

    def check(self) -> None:
        """Raise an error if the task should end; call this between the steps of long work.

        Raises:
            TaskTimeout: The attempt's time limit passed.
            LeaseLost: The node's lease is lost; other programs may use its GPUs.
            TaskStopped: The run was cancelled.
        """
        if self.stopped_by is not None:
            raise self.stopped_by

    def wait_stopped(self, timeout: float | None = None) -> bool:
        """Block this thread for at most `timeout` seconds; return whether the task should end."""
        with _making_events:
            if self._event is None:
                self._event = threading.Event()
                if self.stopped:
                    self._event.set()
        return self._event.wait(timeout)

    def stop(self, why: BaseException) -> bool:
        """Send the stop signal; return False if it was sent before. For the executors."""
        with _making_events:
            if self.stopped_by is not None:
                return False
            self.stopped_by = why
            if self._event is not None:
                self._event.set()
            on_stop = self._on_stop
        if on_stop is not None:
            on_stop(self)
        return True

    def finish(self) -> bool:
        """Note that the task has ended; return False if it was abandoned. For the executors."""
        with _making_events:
            self.ended = not self.abandoned
            return self.ended

    def abandon(self) -> bool:
        """Stop waiting for the task; return False if it has ended already. For the executors."""
        with _making_events:
            if self.ended or self.abandoned:
                return False
            self.abandoned = True
            return True

    def on_stop(self, call: "Callable[[RunningNode], object] | None") -> None:
        """Call a function at the stop signal, or now if the signal was sent. For the executors."""
        with _making_events:
            self._on_stop = call
            late = self.stopped and call is not None
        if late and call is not None:
            call(self)


_current: ContextVar[RunningNode] = ContextVar("moorage_workflow_node")


def current_node() -> RunningNode:
    """Return the node whose task calls this.

    Raises:
        WorkflowError: The caller is not a task of a workflow.
    """
    node = _current.get(None)
    if node is None:
        raise WorkflowError("current_node() works only inside a running task of a workflow")
    return node


def enter(node: RunningNode) -> Token[RunningNode]:
    """Make a node the current one of this thread or coroutine. For the executors."""
    return _current.set(node)


def leave(token: Token[RunningNode]) -> None:
    """Undo `enter`. For the executors."""
    _current.reset(token)


def stopped_run() -> TaskStopped:
    """Return the exception that stops the nodes of a cancelled run."""
    return TaskStopped("the run was cancelled")
