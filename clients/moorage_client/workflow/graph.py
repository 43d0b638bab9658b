"""The graph of a workflow: nodes, and edges for the order in which they run.

Both executors read it. A run uses the `Shape` that the graph has when the run starts. So a graph
may change afterwards, and many runs may share one graph.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Final, NamedTuple, TypeAlias

from moorage_client.workflow.errors import GraphError
from moorage_client.workflow.requirements import finite

COST_DEFAULT = 1.0
"""The cost of a node that `costs` does not name."""
_LISTED_MAX: Final = 10
"""Maximum names that a message lists."""


class NodeId(str):
    """A node's name: a text whose attribute `name` is the text itself."""

    __slots__ = ()

    @property
    def name(self) -> str:
        """The text itself."""
        return str(self)


Payload: TypeAlias = Any
"""A user's object that the graph only stores."""
NodeGiven = str | tuple[str, Payload] | tuple[str, Payload, Payload]
"""A node for `add_nodes`: its name, optionally with payload and metadata."""
EdgeGiven = (
    tuple[str, str] | tuple[str, str, float | None] | tuple[str, str, float | None, str | None]
)
"""An edge for `add_edges`: its two ends, optionally with weight and label."""
_Successors = dict[str, dict[str, "Edge"]]


class Edge(NamedTuple):
    """The weight and label of an edge. A run ignores them; durations of nodes go into `costs`.

    Args:
        weight: Any finite number.
        label: Any text, or None.
    """

    weight: float = 1.0
    label: str | None = None


class Edges(list[tuple[str, str]]):
    """The edges of a graph, by the names of their ends. `dag.edges()` is the same list."""

    def __call__(self) -> list[tuple[str, str]]:
        """Return this list."""
        return self


@dataclass(frozen=True, slots=True)
class Shape:
    """The nodes and edges of a graph at one moment, numbered in the order of addition.

    Args:
        names: The names of the nodes.
        following: The successors of each node, by number.
        numbers: The number of each node, by name.
        predecessor_counts: The number of predecessors of each node.
        order: The nodes in topological order, and as far as possible in the order of addition.
    """

    names: tuple[str, ...]
    following: tuple[tuple[int, ...], ...]
    numbers: Mapping[str, int]
    predecessor_counts: tuple[int, ...]
    order: tuple[int, ...]

    @classmethod
    def of(cls, successors: Mapping[str, Iterable[str]]) -> "Shape":
        """Return the shape of a graph.

        Args:
            successors: The successors of each node, by name.

        Raises:
            GraphError: The graph has a cycle; the message names its nodes.
        """
        numbers = {name: number for number, name in enumerate(successors)}
        following = tuple(tuple(numbers[name] for name in each) for each in successors.values())
        counts = [0] * len(numbers)
        for each in following:
            for successor in each:
                counts[successor] += 1
        names = tuple(successors)
        return cls(names, following, numbers, tuple(counts), _sort(names, following, counts))

    def bottom_levels(self, costs: Mapping[str, float] | None = None) -> list[float]:
        """Return, by number, the cost of the most expensive path from each node to an end.

        Args:
            costs: The cost of each node, by name; 1.0 if a node has no cost. Unknown names are
                ignored, so one table may be used for many graphs.

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

    def refuse_strangers(self, names: Iterable[str], what: str) -> None:
        """Refuse names that are not nodes: without this, a misspelt name would have no effect.

        Args:
            names: The given names.
            what: The name of the argument that has the names.

        Raises:
            GraphError: A name is not a node; the message has the most similar node.
        """
        strangers = [name for name in names if name not in self.numbers]
        if not strangers:
            return
        near = get_close_matches(str(strangers[0]), self.names, 1)
        more = ", …" if len(self.names) > _LISTED_MAX else ""
        known = ", ".join(map(repr, self.names[:_LISTED_MAX])) or "none"
        raise GraphError(
            f"{what}: there is no node {', '.join(map(repr, strangers[:_LISTED_MAX]))}"
            + (f"; did you mean {near[0]!r}?" if near else f"; there are {known}{more}")
        )


class DAG:
    """A directed acyclic graph of named nodes; made by `DAG.builder()`, or node by node.

    Nodes are numbered in the order in which they were added. Only one thread at a time may change
    the graph.

    Args:
        names: The names of the nodes, all different.
        successors: The successors of each node, by number, without repetitions.

    Raises:
        GraphError: The graph has a cycle; the message names its nodes.
    """

    def __init__(self, names: Sequence[str] = (), successors: Sequence[Sequence[int]] = ()) -> None:
        self._successors: _Successors = {name: {} for name in names}
        for name, each in zip(names, successors, strict=True):
            self._successors[name] = dict.fromkeys((names[number] for number in each), Edge())
        self._payloads: dict[str, Payload] = {}
        self._metadata: dict[str, Payload] = {}
        self._shape: Shape | None = Shape.of(self._successors)

    @classmethod
    def of(
        cls,
        successors: Mapping[str, Mapping[str, Edge]],
        given: Mapping[str, tuple[Payload, Payload]],
    ) -> "DAG":
        """Return the graph that a builder has collected.

        Args:
            successors: The successors of each node, by name.
            given: Payload and metadata of each node, by name; either may be None.

        Raises:
            GraphError: The graph has a cycle; the message names its nodes.
        """
        dag = cls()
        dag._shape = Shape.of(successors)
        dag._successors = {name: dict(each) for name, each in successors.items()}
        dag._payloads = {name: each for name, (each, _) in given.items() if each is not None}
        dag._metadata = {name: each for name, (_, each) in given.items() if each is not None}
        return dag

    @staticmethod
    def builder() -> "DAGBuilder":
        """Return a builder of a graph, without nodes yet."""
        return DAGBuilder()

    @property
    def shape(self) -> Shape:
        """The current nodes and edges."""
        if self._shape is None:
            self._shape = Shape.of(self._successors)
        return self._shape

    def __len__(self) -> int:
        return len(self._successors)

    def __contains__(self, name: object) -> bool:
        return name in self._successors

    def __iter__(self) -> Iterator[str]:
        return iter(tuple(self._successors))

    @property
    def names(self) -> tuple[str, ...]:
        """The nodes."""
        return self.shape.names

    @property
    def edges(self) -> Edges:
        """All edges, by the names of their ends; `edges()` is the same."""
        return Edges(
            (name, each) for name, following in self._successors.items() for each in following
        )

    def node_names(self) -> list[str]:
        """Return the nodes, in the order in which they were added."""
        return list(self._successors)

    def nodes(self) -> list[NodeId]:
        """Return the ids of the nodes, in the order in which they were added."""
        return list(map(NodeId, self._successors))

    def node_count(self) -> int:
        """Return the number of nodes."""
        return len(self._successors)

    def edge_count(self) -> int:
        """Return the number of edges."""
        return sum(map(len, self._successors.values()))

    def has_node(self, name: str) -> bool:
        """Return whether the graph has this node."""
        return name in self._successors

    def has_edge(self, before: str, after: str) -> bool:
        """Return whether there is an edge between two nodes; errors: see `successors`."""
        return self._find_node(after) in self._successors[self._find_node(before)]

    def get_edge(self, before: str, after: str) -> Edge:
        """Return the weight and the label of an edge.

        Raises:
            GraphError: The graph has no such edge.
        """
        if not self.has_edge(before, after):
            raise GraphError(f"there is no edge from {before!r} to {after!r}")
        return self._successors[before][after]

    def validate(self) -> bool:
        """Return True if the graph has no cycle.

        Raises:
            GraphError: The graph has a cycle; the message names its nodes.
        """
        Shape.of(self._successors)
        return True

    def roots(self) -> list[NodeId]:
        """Return the nodes without predecessors."""
        counts = self.shape.predecessor_counts
        return [NodeId(name) for name, count in zip(self.names, counts, strict=True) if not count]

    def leaves(self) -> list[NodeId]:
        """Return the nodes without successors."""
        return [NodeId(name) for name, following in self._successors.items() if not following]

    def in_degree(self, name: str) -> int:
        """Return the number of direct predecessors of a node; errors: see `successors`."""
        return self.shape.predecessor_counts[self.shape.numbers[self._find_node(name)]]

    def out_degree(self, name: str) -> int:
        """Return the number of direct successors of a node; errors: see `successors`."""
        return len(self._successors[self._find_node(name)])

    def descendants(self, name: str) -> list[NodeId]:
        """Return all nodes that depend on a node, in topological order; see `successors`."""
        found = {self._find_node(name)}
        for each in self.topological_order():
            if each in found:
                found |= self._successors[each].keys()
        return [each for each in self.topological_order() if each in found and each != name]

    def ancestors(self, name: str) -> list[NodeId]:
        """Return all nodes on which a node depends, in topological order; see `successors`."""
        found = {self._find_node(name)}
        order = self.topological_order()
        for each in reversed(order):
            if not found.isdisjoint(self._successors[each]):
                found.add(each)
        return [each for each in order if each in found and each != name]

    def critical_path(self, costs: Mapping[str, float] | None = None) -> tuple[list[NodeId], float]:
        """Return the most expensive path and its cost; for `costs`, see `Shape.bottom_levels`."""
        levels = dict(zip(self.names, self.bottom_levels(costs), strict=True))
        path: list[NodeId] = []
        following: Iterable[str] = self._successors
        while following:
            path.append(NodeId(max(following, key=levels.__getitem__)))
            following = self._successors[path[-1]]
        return path, levels[path[0]] if path else 0.0

    def successors(self, name: str) -> list[NodeId]:
        """Return the direct successors of a node.

        Raises:
            GraphError: The graph has no such node.
        """
        return list(map(NodeId, self._successors[self._find_node(name)]))

    def predecessors(self, name: str) -> list[NodeId]:
        """Return the direct predecessors of a node; errors: see `successors`."""
        self._find_node(name)
        return [NodeId(each) for each, to in self._successors.items() if name in to]

    def get_payload(self, name: str) -> Payload:
        """Return the object that is attached to a node, or None."""
        return self._payloads.get(self._find_node(name))

    def set_payload(self, name: str, payload: Payload) -> None:
        """Attach an object to a node; it replaces the previous object."""
        self._payloads[self._find_node(name)] = payload

    def get_metadata(self, name: str) -> Payload:
        """Return a node's labels, tags and the like; None if the node has no metadata."""
        return self._metadata.get(self._find_node(name))

    def set_metadata(self, name: str, metadata: Payload) -> None:
        """Attach labels, tags and the like to a node; they replace the previous metadata."""
        self._metadata[self._find_node(name)] = metadata

    def topological_order(self) -> list[NodeId]:
        """Return all nodes, each after its predecessors."""
        return [NodeId(self.shape.names[number]) for number in self.shape.order]

    topological_sort = topological_order

    def topological_sort_dfs(self) -> list[NodeId]:
        """Return all nodes, each after its predecessors, and depth first.

        The successors of a node come before its siblings, as far as the edges allow.
        """
        shape = self.shape
        after: list[int] = []  # Each node after its successors.
        seen = bytearray(len(shape.names))
        for start in reversed(range(len(shape.names))):
            stack = [] if shape.predecessor_counts[start] else [(start, False)]
            while stack:
                number, done = stack.pop()
                if done:
                    after.append(number)
                elif not seen[number]:
                    seen[number] = True
                    stack.append((number, True))
                    stack += ((each, False) for each in shape.following[number])
        return [NodeId(shape.names[number]) for number in reversed(after)]

    def topological_levels(self) -> list[list[NodeId]]:
        """Return the nodes in levels: a node depends only on nodes in earlier levels."""
        shape = self.shape
        depths = [0] * len(shape.names)
        for number in shape.order:
            for successor in shape.following[number]:
                depths[successor] = max(depths[successor], depths[number] + 1)
        levels: list[list[NodeId]] = [[] for _ in range(max(depths, default=-1) + 1)]
        for name, depth in zip(shape.names, depths, strict=True):
            levels[depth].append(NodeId(name))
        return levels

    def bottom_levels(self, costs: Mapping[str, float] | None = None) -> list[float]:
        """Return, by number, the cost of the most expensive path from each node to an end.

        Arguments and errors are those of `Shape.bottom_levels`.
        """
        return self.shape.bottom_levels(costs)

    def add_node(self, name: str, payload: Payload = None, metadata: Payload = None) -> NodeId:
        """Add a node, and return its name; see `DAGBuilder.add_node`."""
        _add_node(self._successors, name)
        self._shape = None
        if payload is not None:
            self._payloads[name] = payload
        if metadata is not None:
            self._metadata[name] = metadata
        return NodeId(name)

    def add_nodes(self, nodes: Iterable[NodeGiven]) -> list[NodeId]:
        """Add nodes, all or none of them, and return their names.

        Args:
            nodes: Names, or `(name, payload)`, or `(name, payload, metadata)`.

        Raises:
            GraphError: A name is empty, taken or not a text, or an entry is not a node; the graph
                is unchanged.
        """
        given = _nodes_of(nodes)
        successors = dict(self._successors)
        for name, _, _ in given:
            _add_node(successors, name)
        return [self.add_node(*each) for each in given]

    def add_edge(
        self, before: str, after: str, weight: float | None = None, label: str | None = None
    ) -> None:
        """Add an edge: one node must end before the other may start.

        Args:
            before: The node that ends first.
            after: The node that starts after it.
            weight: The weight for `get_edge`. None: an existing edge keeps its weight, and a new
                one has 1.0.
            label: The label for `get_edge`. None: an existing edge keeps its label.

        Raises:
            GraphError: A node was not added, the nodes would wait for each other, or the weight is
                not a finite number; the graph is unchanged.
        """
        following = self._successors[self._find_node(before)]
        edge = _edge(following.get(self._find_node(after)), weight, label)
        if self._reaches(after, before):
            with_it = {**self._successors, before: {**following, after: edge}}
            self._shape = Shape.of(with_it)  # Raises an error that names the cycle.
        following[after] = edge
        self._shape = None

    def add_edges(self, edges: Iterable[EdgeGiven]) -> None:
        """Add edges, all or none of them.

        Args:
            edges: `(before, after)`, `(before, after, weight)` or `(before, after, weight, label)`.

        Raises:
            GraphError: An edge is invalid, as for `add_edge`; the graph is unchanged.
        """
        successors = {name: dict(following) for name, following in self._successors.items()}
        for before, after, weight, label in _edges_of(edges):
            following = successors[self._find_node(before)]
            following[after] = _edge(following.get(self._find_node(after)), weight, label)
        self._shape = Shape.of(successors)
        self._successors = successors

    def remove_node(self, name: str) -> None:
        """Remove a node and its edges, so that its successors no longer wait for it.

        Raises:
            GraphError: The graph has no such node.
        """
        del self._successors[self._find_node(name)]
        for following in self._successors.values():
            following.pop(name, None)
        self._payloads.pop(name, None)
        self._metadata.pop(name, None)
        self._shape = None

    def remove_edge(self, before: str, after: str) -> None:
        """Remove an edge.

        Raises:
            GraphError: The graph has no such edge.
        """
        if after not in self._successors[self._find_node(before)]:
            raise GraphError(f"there is no edge from {before!r} to {after!r}")
        del self._successors[before][after]
        self._shape = None

    def _reaches(self, start: str, end: str) -> bool:
        """Return whether there is a path from one node to another, or both are the same node."""
        seen = {start}
        stack = [start]
        while stack and end not in seen:
            new = self._successors[stack.pop()].keys() - seen
            seen |= new
            stack += new
        return end in seen

    def _find_node(self, name: str) -> str:
        if name not in self._successors:
            raise GraphError(f"there is no node {name!r}")
        return name


class DAGBuilder:
    """Collects nodes and edges: `DAG.builder().add_node("a").add_node("b").add_edge("a", "b")`."""

    def __init__(self) -> None:
        self._successors: _Successors = {}
        self._given: dict[str, tuple[Payload, Payload]] = {}

    def add_node(
        self, name: str, payload: Payload = None, metadata: Payload = None
    ) -> "DAGBuilder":
        """Add a node.

        Args:
            name: The node's name.
            payload: Any object, for `DAG.get_payload`.
            metadata: Labels, tags and the like, for `DAG.get_metadata`.

        Raises:
            GraphError: The name is empty, taken or not a text.
        """
        _add_node(self._successors, name)
        if payload is not None or metadata is not None:
            self._given[name] = (payload, metadata)
        return self

    def remove_node(self, name: str) -> "DAGBuilder":
        """Remove a node and its edges.

        Raises:
            GraphError: The graph has no such node.
        """
        if name not in self._successors:
            raise GraphError(f"there is no node {name!r}")
        del self._successors[name]
        self._given.pop(name, None)
        for following in self._successors.values():
            following.pop(name, None)
        return self

    def add_nodes(self, nodes: Iterable[NodeGiven]) -> "DAGBuilder":
        """Add nodes; see `DAG.add_nodes`."""
        for each in _nodes_of(nodes):
            self.add_node(*each)
        return self

    def add_edge(
        self, before: str, after: str, weight: float | None = None, label: str | None = None
    ) -> "DAGBuilder":
        """Add an edge: one node must end before the other may start. Adding it twice does nothing.

        Args:
            before: The node that ends first.
            after: The node that starts after it.
            weight: The weight for `DAG.get_edge`.
            label: The label for `DAG.get_edge`.

        Raises:
            GraphError: A node was not added, or the weight is not a finite number.
        """
        for name in (before, after):
            if name not in self._successors:
                raise GraphError(f"there is no node {name!r}; add it before its edges")
        following = self._successors[before]
        following[after] = _edge(following.get(after), weight, label)
        return self

    def add_edges(self, edges: Iterable[EdgeGiven]) -> "DAGBuilder":
        """Add edges; see `DAG.add_edges`."""
        for each in _edges_of(edges):
            self.add_edge(*each)
        return self

    def build(self) -> DAG:
        """Return the graph.

        Raises:
            GraphError: The graph has a cycle; the message names its nodes.
        """
        return DAG.of(self._successors, self._given)


def _nodes_of(nodes: Iterable[NodeGiven]) -> list[tuple[str, Payload, Payload]]:
    """Return nodes as tuples of name, payload and metadata."""
    if isinstance(nodes, str):
        raise GraphError(f"add_nodes takes a list of nodes, not the text {nodes!r}")
    rows = [tuple(each) if isinstance(each, tuple | list) else (each,) for each in nodes]
    if wrong := [row for row in rows if not 1 <= len(row) <= len(("name", "payload", "metadata"))]:
        forms = "a name, (name, payload) or (name, payload, metadata)"
        raise GraphError(f"{wrong[0]!r} is not {forms}")
    return [(*row, None, None)[:3] for row in rows]


def _edges_of(edges: Iterable[EdgeGiven]) -> list[tuple[str, str, float | None, str | None]]:
    """Return edges as tuples of both ends, weight and label."""
    rows: list[tuple[Any, ...]] = [tuple(each) for each in edges]
    least, most = len(("before", "after")), len(("before", "after", "weight", "label"))
    if wrong := [row for row in rows if not least <= len(row) <= most]:
        raise GraphError(f"{wrong[0]!r} is not an edge (before, after, weight, label)")
    return [(*row, None, None)[:most] for row in rows]


def _edge(known: Edge | None, weight: float | None, label: str | None) -> Edge:
    """Return an edge, merged with an existing edge between the same nodes."""
    if weight is not None and finite(weight) is None:
        raise GraphError(f"the weight of an edge is {weight!r}; expected a finite number")
    old = known or Edge()
    return Edge(old.weight if weight is None else weight, old.label if label is None else label)


def _add_node(successors: _Successors, name: str) -> None:
    if not name or not isinstance(name, str):
        raise GraphError(f"a node's name is a text of at least one character, not {name!r}")
    if name in successors:
        raise GraphError(f"there is a node {name!r} already")
    successors[name] = {}


def _sort(
    names: Sequence[str], following: Sequence[Sequence[int]], counts: Sequence[int]
) -> tuple[int, ...]:
    """Return the nodes in topological order (Kahn 1962), up to the first cycle."""
    left = list(counts)
    ready = deque(number for number, count in enumerate(left) if count == 0)
    order: list[int] = []
    while ready:
        number = ready.popleft()
        order.append(number)
        for successor in following[number]:
            left[successor] -= 1
            if left[successor] == 0:
                ready.append(successor)
    if len(order) < len(names):
        cycle = (names[each] for each in _cycle(following, left))
        raise GraphError(f"these nodes wait for each other: {' -> '.join(cycle)}")
    return tuple(order)


def _cycle(following: Sequence[Sequence[int]], left: Sequence[int]) -> list[int]:
    """Return a cycle among the nodes that could not be sorted."""
    before: dict[int, int] = {}
    for number, successors in enumerate(following):
        if left[number]:
            before.update(dict.fromkeys((each for each in successors if left[each]), number))
    # Each unsorted node has an unsorted predecessor, so the way back reaches a cycle.
    number, seen = next(iter(before)), list[int]()
    while number not in seen:
        seen.append(number)
        number = before[number]
    cycle = [*seen[seen.index(number) :], number]
    return cycle[::-1]
