"""Changes of a graph while it runs, which expanders return."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

Result: TypeAlias = Any
"""The result of a task: any object of the user."""
Task: TypeAlias = Callable[[], Result]


@dataclass
class DynamicNodeSpec:
    """A node that an expander adds to the running graph.

    Args:
        name: The node's name, which no node of the run has or had.
        task: The node's task.
        dependencies: Nodes for which this node waits.
        dependents: Nodes that wait for this node; they have not started.
    """

    name: str
    task: Task
    dependencies: list[str] = field(default_factory=list)
    dependents: list[str] = field(default_factory=list)


@dataclass
class DynamicModification:
    """Changes of a running graph.

    Args:
        add_nodes: Nodes to add; they may depend on each other.
        remove_nodes: Nodes to remove, which have not started. Nodes that waited for them no
            longer wait.
    """

    add_nodes: list[DynamicNodeSpec] = field(default_factory=list)
    remove_nodes: list[str] = field(default_factory=list)


Expander = Callable[[str, Result], DynamicModification | None]
"""Returns the changes after a node has completed, given its name and result."""
