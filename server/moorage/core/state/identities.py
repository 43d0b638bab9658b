"""Maps nodes to machines, so that no machine counts twice.

A machine may be in the inventory under two clusters or two names. The entry that was
registered first counts; the other is a duplicate and has no capacity. The allocator finds
duplicates with this module before a cluster becomes a fact; `State` updates its map from the facts.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from moorage.model import DEVICE, Cluster, ClusterId, Node, NodeId

Place = tuple[str, str]
"""A node by name: cluster and node."""
Leased = Callable[[], Collection[Place]]
"""Returns the nodes on which leases hold capacity, in time proportional to these leases."""


@dataclass(slots=True)
class Identities:
    """The node that counts for each machine, if the inventory identifies the machine.

    Attributes:
        duplicates: Clusters with nodes that do not count, as their machine counts elsewhere.
        freed: Grows when a machine loses its counted node, so that a duplicate may count.
    """

    duplicates: dict[ClusterId, None] = field(default_factory=dict[ClusterId, None])
    freed: int = 0
    _of: dict[Place, tuple[str, ...]] = field(default_factory=dict[Place, tuple[str, ...]])
    _holders: dict[str, Place] = field(default_factory=dict[str, Place])
    _by_cluster: dict[str, set[Place]] = field(default_factory=dict[str, set[Place]])
    _left: set[Place] = field(default_factory=set[Place])
    """Nodes that left the inventory while they had leases: workloads may still run there."""

    def with_decisions(self, cluster: Cluster, leased: Leased) -> Cluster:
        """Return a cluster with its duplicates marked: their machine counts as another node."""
        if not any(node.identity for node in cluster.nodes):
            return cluster
        own = {(cluster.id, node.id) for node in cluster.nodes}
        removed = self._by_cluster.get(cluster.id, set()) - own
        # Ignore the replaced nodes of this cluster, and removed ones without leases.
        ignored = (own | removed) - (set(leased()) - own if removed else set())
        counting: dict[str, tuple[Place, Node]] = {}
        decided: dict[str, Node] = {}
        # Nodes that count already keep counting, whatever their place in the list.
        for node in sorted(cluster.nodes, key=lambda node: (cluster.id, node.id) not in self._of):
            other = self._other(node, ignored, counting)
            decided[node.id] = replace(node, duplicate_of="/".join(other) if other else "")
            if other is None:
                for key in node.identity:
                    counting.setdefault(key, ((cluster.id, node.id), node))
        return replace(cluster, nodes=tuple(decided[node.id] for node in cluster.nodes))

    def _other(
        self, node: Node, ignored: Collection[Place], counting: dict[str, tuple[Place, Node]]
    ) -> Place | None:
        """Return another counted node of the same machine; None if there is none."""
        for key in node.identity:
            place = self._holders.get(key)
            if place is not None and place not in ignored:
                if is_same_machine(node.identity, self._of[place]):
                    return place
            elif key in counting and is_same_machine(node.identity, counting[key][1].identity):
                return counting[key][0]
        return None

    def place_of(self, key: str) -> Place | None:
        """Return the counted node with this key in its identity; None if there is none."""
        return self._holders.get(key)

    def left(self) -> dict[ClusterId, list[Node]]:
        """Return the nodes that left the inventory and have leases, each with a capacity of 0."""
        found: dict[ClusterId, list[Node]] = {}
        for cluster, name in sorted(self._left):
            node = Node(NodeId(name), 0, 0, (), identity=self._of[cluster, name])
            found.setdefault(ClusterId(cluster), []).append(node)
        return found

    def put(self, cluster_id: ClusterId, nodes: Sequence[Node], leased: Leased) -> None:
        """Replace the nodes of a cluster; `nodes` is () if the cluster is gone."""
        fresh: dict[Place, tuple[str, ...]] = {
            (cluster_id, node.id): node.identity
            for node in nodes
            if node.identity and not node.duplicate_of
        }
        before = self._by_cluster.pop(cluster_id, set())
        dropped = {place for place in before if self._of[place] != fresh.get(place)}
        self._left -= fresh.keys()
        if removed := dropped - fresh.keys():
            self._left |= removed & set(leased())
        for place in dropped - self._left:
            self._drop(place)
        for place, identity in fresh.items():
            self._of[place] = identity
            for key in identity:
                if self._holders.setdefault(key, place) in self._left:
                    self._holders[key] = place
        if ids := fresh.keys() | (before & self._left):
            self._by_cluster[cluster_id] = set(ids)
        self.duplicates.pop(cluster_id, None)
        if any(node.duplicate_of for node in nodes):
            self.duplicates[cluster_id] = None

    def forget_nodes(self, places: Iterable[Place], leased: Leased) -> None:
        """Forget nodes that left the inventory and have no lease."""
        for place in self._left.intersection(places):
            if place not in leased():
                self._left.discard(place)
                self._by_cluster[place[0]].discard(place)
                self._drop(place)

    def _drop(self, place: Place) -> None:
        for key in self._of.pop(place):
            if self._holders.get(key) == place:
                del self._holders[key]
        self.freed += 1


def is_same_machine(one: Collection[str], other: Collection[str]) -> bool:
    """Return whether two identities belong to one machine.

    If both list GPUs, the GPUs decide. Otherwise all kinds of ids that both have must agree: cloned
    disks share a machine id, and some Kubernetes distributions use provider ids that are not
    unique.
    """
    mine, theirs = _by_kind(one), _by_kind(other)
    kinds = mine.keys() & theirs.keys()
    if DEVICE in kinds:
        return not mine[DEVICE].isdisjoint(theirs[DEVICE])
    return bool(kinds) and not any(mine[kind].isdisjoint(theirs[kind]) for kind in kinds)


def _by_kind(identity: Collection[str]) -> dict[str, set[str]]:
    kinds: dict[str, set[str]] = {}
    for key in identity:
        kind, space, _ = key.partition(" ")
        kinds.setdefault(kind + space, set()).add(key)
    return kinds
