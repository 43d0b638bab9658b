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
        name: Its name, which no other node has or had.
        task: What it runs.
        dependencies: Nodes that it waits for.
        dependents: Nodes that wait for it; they have not started.
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
        remove_nodes: Nodes that are not to run, and have not started. Nodes that waited for them no
            longer wait.
    """

    add_nodes: list[DynamicNodeSpec] = field(default_factory=list)
    remove_nodes: list[str] = field(default_factory=list)


Expander = Callable[[str, Result], DynamicModification | None]
"""Returns the changes after a node has completed, given its name and result."""
