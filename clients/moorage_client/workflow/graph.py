"""The graph of a workflow: names, and what must end before what may start.

Both executors read it. It never changes once it is built, so that many runs may share it.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence

from moorage_client.workflow.errors import GraphError
from moorage_client.workflow.requirements import finite

COST_DEFAULT = 1.0
"""Of a node that `costs` does not name."""


class DAG:
    """A directed acyclic graph of named nodes; made by `DAG.builder()`.

    Nodes are numbered in the order in which they were added. `order` is topological, and keeps
    that order where the edges leave a choice.

    Args:
        names: One per node, all different.
        successors: Of each node by number, without repetitions.

    Raises:
        GraphError: There is a cycle; the message names its nodes.

    """

    def __init__(self, names: Sequence[str], successors: Sequence[Sequence[int]]) -> None:
        self.names = tuple(names)
        self.following = tuple(tuple(each) for each in successors)
        self.numbers = {name: number for number, name in enumerate(self.names)}
        counts = [0] * len(self.names)
        for each in self.following:
            for successor in each:
                counts[successor] += 1
        self.predecessor_counts = tuple(counts)
        self.order = self._sorted()

    @staticmethod
    def builder() -> "DAGBuilder":
        """Return a builder without nodes."""
        return DAGBuilder()

    def __len__(self) -> int:
        return len(self.names)

    def __contains__(self, name: object) -> bool:
        return name in self.numbers

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    @property
    def edges(self) -> list[tuple[str, str]]:
        """All edges, by the names of their ends."""
        return [
            (name, self.names[successor])
            for name, following in zip(self.names, self.following, strict=True)
            for successor in following
        ]

    def successors(self, name: str) -> list[str]:
        """Return what may start only after this node.

        Raises:
            GraphError: There is no such node.

        """
        if name not in self.numbers:
            raise GraphError(f"there is no node {name!r}")
        return [self.names[number] for number in self.following[self.numbers[name]]]

    def predecessors(self, name: str) -> list[str]:
        """Return what must have ended before this node; errors as `successors`."""
        if name not in self.numbers:
            raise GraphError(f"there is no node {name!r}")
        wanted = self.numbers[name]
        return [each for each, to in zip(self.names, self.following, strict=True) if wanted in to]

    def topological_order(self) -> list[str]:
        """Return all names, each after its predecessors."""
        return [self.names[number] for number in self.order]

    def bottom_levels(self, costs: Mapping[str, float] | None = None) -> list[float]:
        """Return, by number, the cost of the most expensive path from each node to an end.

        Args:
            costs: By name, in any one unit; 1.0 where it has none. Names that are no nodes are
                ignored, so that one table serves many graphs.

        Raises:
            GraphError: A cost is not a finite number.

        """
        given = costs or {}
        levels = [0.0] * len(self.names)
        for number in reversed(self.order):
            own = given.get(self.names[number], COST_DEFAULT)
            if finite(own) is None:
                raise GraphError(f"costs[{self.names[number]!r}] is {own!r}, not a finite number")
            following = self.following[number]
            levels[number] = own + (max(map(levels.__getitem__, following)) if following else 0.0)
        return levels

    def _sorted(self) -> tuple[int, ...]:
        """Sort topologically (Kahn 1962)."""
        left = list(self.predecessor_counts)
        ready = deque(number for number, count in enumerate(left) if count == 0)
        order: list[int] = []
        while ready:
            number = ready.popleft()
            order.append(number)
            for successor in self.following[number]:
                left[successor] -= 1
                if left[successor] == 0:
                    ready.append(successor)
        if len(order) < len(self.names):
            raise GraphError(f"these nodes wait for each other: {' -> '.join(self._cycle(left))}")
        return tuple(order)

    def _cycle(self, left: Sequence[int]) -> list[str]:
        """Return a cycle among the nodes that the sorting left over."""
        before: dict[int, int] = {}
        for number, following in enumerate(self.following):
            if left[number]:
                before.update(dict.fromkeys((each for each in following if left[each]), number))
        # Each node that is left has a predecessor that is left: going back ends in a cycle.
        number, seen = next(iter(before)), list[int]()
        while number not in seen:
            seen.append(number)
            number = before[number]
        cycle = [*seen[seen.index(number) :], number]
        return [self.names[each] for each in reversed(cycle)]


class DAGBuilder:
    """Collects nodes and edges: `DAG.builder().add_node("a").add_node("b").add_edge("a", "b")`."""

    def __init__(self) -> None:
        self._successors: dict[str, dict[str, None]] = {}

    def add_node(self, name: str) -> "DAGBuilder":
        """Add a node.

        Raises:
            GraphError: The name is empty, or taken.

        """
        if not name:
            raise GraphError(f"a node's name is a text of at least one character, not {name!r}")
        if name in self._successors:
            raise GraphError(f"there is a node {name!r} already")
        self._successors[name] = {}
        return self

    def add_edge(self, before: str, after: str) -> "DAGBuilder":
        """Say that one node must end before another may start; saying it twice changes nothing.

        Raises:
            GraphError: One of them was not added.

        """
        for name in (before, after):
            if name not in self._successors:
                raise GraphError(f"there is no node {name!r}; add it before its edges")
        self._successors[before][after] = None
        return self

    def build(self) -> DAG:
        """Return the graph.

        Raises:
            GraphError: There is a cycle; the message names its nodes.

        """
        numbers = {name: number for number, name in enumerate(self._successors)}
        following = [[numbers[name] for name in each] for each in self._successors.values()]
        return DAG(list(numbers), following)
