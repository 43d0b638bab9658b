"""A pool of nodes: each node request gets all its slots from one node.

A request is a list of `NodeRequest`s, each of which gets a different node. They are placed from the
largest to the smallest, each on the node that keeps the most free slots. If one of them finds no
node, the pool searches for another assignment that gives each of them a node. An exclusive node
request gets all slots of its node, so no other request uses this node until the allocation is
checked in.
"""

from __future__ import annotations

import copy
import platform
import threading
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import IO, Any, NamedTuple, TypeVar

from moorage.records.json_values import JsonMapping, JsonObject
from moorage.slots.amounts import NONE, Amount, Slots, exact, plain, total
from moorage.slots.errors import (
    EmptyResourcePoolError,
    InvalidCheckin,
    InvalidSpecification,
    ResourceUnavailable,
    UnevenNodes,
    UnknownResourceType,
)
from moorage.slots.inventory import Inventory, allocate, insufficient, merged
from moorage.slots.node_requests import NodeRequest, parse_node_requests
from moorage.slots.outcome import Outcome
from moorage.slots.outstanding import keep_number, next_number
from moorage.slots.pool import instances_of
from moorage.slots.requests import Member
from moorage.slots.specification import (
    NODE_NAMES,
    Format,
    count_instances,
    documents,
    format_pool,
    only_keys,
    parse_resources,
    properties_of,
    unwrap,
)

NodeAllocation = JsonObject
"""The result of a checkout: `{"metadata": {"allocation", "nodes", "exclusive"}, "resources": {type:
[{"node", "id", "slots"}]}}`."""


Wish = TypeVar("Wish", bound=Hashable)


class _Node:
    """A node with its free slots, its total slots, and the number of allocations that use it."""

    __slots__ = ("additional_properties", "closed", "id", "idle", "now", "users")

    def __init__(self, name: str, document: JsonMapping, at: str) -> None:
        resources = parse_resources(document.get("resources", {}), f"{at}.resources")
        self.id = name
        self.now, self.idle = Inventory.of(resources), Inventory.of(resources)
        self.additional_properties = copy.deepcopy(properties_of(document))
        self.users = 0
        self.closed = False

    def open_to(self, request: NodeRequest) -> bool:
        return not self.closed and not (request.exclusive and self.users)

    def resize(self, change: Callable[[dict[str, list[JsonObject]]], None], at: str) -> None:
        """Change the slots of the node; slots in use stay in use."""
        resources = self.idle.listed()
        change(resources)
        has = parse_resources(resources, at)
        now, idle = Inventory.of(has), Inventory.of(has)
        for (kind, name), (free, slots) in self.now.standing().items():
            left = Amount(idle.free(kind, name) - (slots - free))
            if left < 0:
                raise InvalidSpecification(f"{at}.{kind} {name}: more slots of it are checked out")
            if free < slots:
                now.set_slots(kind, name, left, idle.free(kind, name))
        self.now, self.idle = now, idle

    def getstate(self) -> JsonObject:
        return {
            "id": self.id,
            "resources": self.now.listed(),
            "additional_properties": copy.deepcopy(self.additional_properties),
        }


class NodeResourcePool:
    """Checks out and takes back resources of several nodes, by node, type, instance and slot.

    Every method is atomic: threads need no lock of their own.

    Args:
        pool: A description in the form of `fill`; None: the pool is empty.
        allow_multinode: Whether a request may span nodes.

    Raises:
        InvalidSpecification: The description is wrong; the message names the place.
    """

    def __init__(self, pool: JsonMapping | None = None, *, allow_multinode: bool = True) -> None:
        self._lock = threading.RLock()
        self.additional_properties: JsonObject = {}
        self.allow_multinode = allow_multinode
        self._nodes: dict[str, _Node] = {}
        self._outstanding: dict[int, list[_Placed]] = {}
        if pool:
            self.fill(pool)

    def __getstate__(self) -> JsonObject:
        """Return the state for a copy, in which the same slots are checked out."""
        with self._lock:
            return copy.deepcopy({k: each for k, each in vars(self).items() if k != "_lock"})

    def __setstate__(self, state: JsonObject) -> None:
        self._lock = threading.RLock()
        vars(self).update(state)
        keep_number(max(self._outstanding, default=0))

    def fill(self, pool: JsonMapping) -> None:
        """Replace the contents by a description; all checkouts are forgotten.

        Args:
            pool: `{"nodes": [{"id", "resources": {type: [{"id", "slots"}]},
                "additional_properties": {}}], "additional_properties": {}}`, also under the key
                `resource_pool`. Ids of instances are local to their node.

        Raises:
            InvalidSpecification: The description is wrong; the message names the place. The pool is
                unchanged.
        """
        body = unwrap(pool)
        listed = body.get("nodes")
        if not isinstance(listed, list):
            raise InvalidSpecification(
                "nodes: expected a list of nodes; ResourcePool reads a pool without them"
            )
        only_keys(body, {"nodes", "additional_properties"}, "pool")
        nodes: dict[str, _Node] = {}
        for number, document in enumerate(listed):
            _add(nodes, document, f"nodes[{number}]")
        with self._lock:
            self.additional_properties = copy.deepcopy(properties_of(body))
            self._nodes = nodes
            self._outstanding = {}

    def populate(self, nodes: int | None = None, **kwds: int) -> None:
        """Fill the pool with equal nodes: a number of instances of each type, with one slot each.

        Args:
            nodes: Number of nodes, with the ids "0", "1" and so on; None: one node with the name of
                this machine.
            kwds: Counts by type. Default of `cpus`: the CPUs that this process may use; of `gpus`:
                0.

        Raises:
            InvalidSpecification: A count is negative, or not a whole number.
        """
        here = [platform.node()]
        ids = here if nodes is None else [each.id for each in count_instances(nodes, "nodes")]
        resources = instances_of(kwds)
        self.fill({"nodes": [{"id": name, "resources": resources} for name in ids]})

    def clear(self) -> None:
        """Remove all nodes and forget all checkouts."""
        with self._lock:
            self.additional_properties = {}
            self._nodes = {}
            self._outstanding = {}

    def add_node(self, node: JsonMapping) -> None:
        """Append a node, `{"id", "resources", "additional_properties"}`.

        Raises:
            InvalidSpecification: The node is wrong, or its id exists already. The pool is
                unchanged.
        """
        with self._lock:
            _add(self._nodes, node, "node")

    def set_resource_count(
        self,
        type: str,  # noqa: A002  # As elsewhere.
        count: int,
        *,
        node_id: str | None = None,
    ) -> None:
        """Set the number of instances of a type, with one slot each, on all nodes or on one node.

        Raises:
            ResourceUnavailable: The pool has no such node.
            InvalidSpecification: `count` is not a count, or an instance that would be removed is
                checked out.
        """
        rows = documents(count_instances(count, type))
        self._resize(node_id, lambda have: have.update({type: copy.deepcopy(rows)}))

    def set_slots_per_resource(
        self,
        type: str,  # noqa: A002  # As elsewhere.
        slots: Slots,
        *,
        node_id: str | None = None,
    ) -> None:
        """Set the slots of each instance of a type, on all nodes that have the type or on one node.

        Raises:
            ResourceUnavailable: The pool has no such node or type.
            InvalidSpecification: `slots` is not a number of slots, or an instance has more slots
                checked out.
        """
        self._change_slots(type, lambda _: slots, node_id)

    def multiply_slots_per_resource(
        self,
        type: str,  # noqa: A002  # As elsewhere.
        factor: Slots,
        *,
        node_id: str | None = None,
    ) -> None:
        """Multiply the slots of each instance of a type, on all nodes that have it or on one node.

        Raises:
            ResourceUnavailable: The pool has no such node or type.
            InvalidSpecification: `factor` is not above 0, or an instance has more slots checked
                out.
        """
        if not exact(factor):
            raise InvalidSpecification(f"factor: expected a number above 0, found {factor!r}")
        self._change_slots(type, lambda slots: slots * factor, node_id)

    def pop(self, type: str) -> list[JsonObject] | None:  # noqa: A002  # As elsewhere.
        """Remove a type from all nodes; return its free slots, None if no node had any.

        The type's checked-out slots are forgotten, but not the slots of other types in the same
        allocations.
        """
        with self._lock:
            popped: list[JsonObject] = []
            for node in self._nodes.values():
                if type in node.now:
                    node.idle.pop(type)
                    popped += ({**row, "node": node.id} for row in node.now.pop(type))
            for placed in self._outstanding.values():
                for each in placed:
                    if type in each.taken:
                        each.taken[type] = []
            return popped or None

    def get_property(self, name: str) -> Any:
        """Return an additional property of the pool; None if it does not exist."""
        with self._lock:
            return copy.deepcopy(self.additional_properties.get(name))

    def node_ids(self) -> list[str]:
        """Return the ids of the nodes, as listed."""
        return self.nodes

    @property
    def resources(self) -> dict[str, list[JsonObject]]:
        """The free slots of all nodes, by type: `{type: [{"id", "slots", "node"}]}`; a copy."""
        with self._lock:
            found: dict[str, list[JsonObject]] = {}
            for node in self._nodes.values():
                for kind, rows in node.now.listed().items():
                    found.setdefault(kind, []).extend({**row, "node": node.id} for row in rows)
            return found

    @property
    def slots_per_resource_type(self) -> Counter[str]:
        """All slots of each type on all nodes, free or not; a copy."""
        with self._lock:
            totals: Counter[str] = Counter()
            for node in self._nodes.values():
                totals.update(node.idle.totals())
            return totals

    def slots_available(self, type: str) -> Slots:  # noqa: A002  # As elsewhere.
        """Return the free slots of a type; for `node` and `nodes`, the number of nodes.

        Raises:
            ResourceUnavailable: The pool has no such type.
        """
        if type in NODE_NAMES:
            return self.count(type)
        with self._lock:
            kind = self._resource_name(type)
            return plain(
                total(
                    node.now.available(kind)
                    for node in self._nodes.values()
                    if kind in node.now and not node.closed
                )
            )

    def slots_capacity(self, type: str) -> Slots:  # noqa: A002  # As elsewhere.
        """Return the slots of a type, free or not; 0 for an unknown type."""
        if type in NODE_NAMES:
            return self.count(type)
        with self._lock:
            totals = self.slots_per_resource_type
            return totals.get(type, totals.get(f"{type}s", 0))

    def get_node(self, id: str) -> JsonObject:  # noqa: A002  # As elsewhere.
        """Return a copy of a node's `{"id", "resources", "additional_properties"}`.

        Raises:
            ResourceUnavailable: The pool has no such node.
        """
        with self._lock:
            return self._node(id).getstate()

    @property
    def nodes(self) -> list[str]:
        """The ids of the nodes, as listed."""
        with self._lock:
            return list(self._nodes)

    @property
    def types(self) -> list[str]:
        """The types that any node has, sorted."""
        with self._lock:
            return sorted({kind for node in self._nodes.values() for kind in node.idle.types})

    def __contains__(self, type: object) -> bool:  # noqa: A002  # As elsewhere.
        return type in self.types

    def empty(self) -> bool:
        """Return whether the pool has no nodes."""
        return not self._nodes

    def count(self, type: str) -> int:  # noqa: A002  # As elsewhere.
        """Return the number of instances on all nodes; for `node` and `nodes`, the number of nodes.

        Raises:
            ResourceUnavailable: The pool has no such type.
        """
        return len(self._nodes) if type in NODE_NAMES else sum(self.count_by_node(type).values())

    def count_by_node(self, type: str) -> dict[str, int]:  # noqa: A002  # As elsewhere.
        """Return the number of instances of a type, in singular or plural, on each node."""
        with self._lock:
            kind = self._resource_name(type)
            return {
                name: node.idle.count(kind) if kind in node.idle else 0
                for name, node in self._nodes.items()
            }

    def slots_by_node(self, type: str) -> dict[str, Slots]:  # noqa: A002  # As elsewhere.
        """Return the free slots of a type on each node; none on a node that is used exclusively."""
        with self._lock:
            kind = self._resource_name(type)
            return {
                name: 0 if node.closed else node.now.slots_available(kind)
                for name, node in self._nodes.items()
            }

    def count_per_node(self, type: str) -> int:  # noqa: A002  # As elsewhere.
        """Return the number of instances of a type on each node, if the number is the same on all.

        Raises:
            ResourceUnavailable: The pool has no such type.
            UnevenNodes: The numbers differ. Also a `ResourceUnavailable` and a `ValueError`.
        """
        counts = self.count_by_node(type)
        if len(set(counts.values())) > 1:
            text = ", ".join(f"{name} has {count}" for name, count in counts.items())
            raise UnevenNodes(
                f"count_per_node: the nodes differ in {type}; "
                f"count_by_node returns the count of each: {text}"
            )
        return next(iter(counts.values()))

    def getstate(self) -> JsonObject:
        """Return a copy of the current `{"additional_properties", "nodes"}`."""
        with self._lock:
            return {
                "additional_properties": copy.deepcopy(self.additional_properties),
                "nodes": [node.getstate() for node in self._nodes.values()],
            }

    def dump(self, file: IO[Any], format: Format = "yaml") -> None:  # noqa: A002  # As elsewhere.
        """Write the result of `getstate` under the key `resource_pool`, as input for `fill`."""
        file.write(format_pool(self.getstate(), format))

    def accommodates(self, request: Sequence[Any], allow_multinode: bool | None = None) -> Outcome:
        """Determine whether the pool could grant a request if nothing were checked out.

        Args:
            request: The request, in a form that `checkout` takes.
            allow_multinode: Whether the request may span nodes; None: the pool's `allow_multinode`.

        Raises:
            EmptyResourcePoolError: The pool has no nodes.
            InvalidRequest: The request is malformed.
        """
        wanted = parse_node_requests(request)
        with self._lock:
            self._refuse_if_empty()
            kinds = {member.type for each in wanted for member in each.members}
            if missing := sorted(kinds.difference(self.types)):
                noun = "Resource" if len(missing) == 1 else "Resources"
                return Outcome(ok=False, reason=f"{noun} unavailable: {','.join(missing)}")
            try:
                placed = self._place(wanted, allow_multinode, idle=True)
            except ResourceUnavailable as error:
                return Outcome(ok=False, reason=str(error) or "the allocator refuses")
            for each in placed:
                each.give_back()
        return Outcome(ok=True)

    def checkout(
        self, request: Sequence[Any], allow_multinode: bool | None = None, **kwds: Any
    ) -> NodeAllocation:
        """Take all slots of a request, or none.

        Args:
            request: A list of `NodeRequest`; or members `{"type", "slots"}` as for a flat pool, all
                of one node, or of N nodes each if `{"type": "nodes", "slots": N}` is among them.
            allow_multinode: Whether the request may span nodes; None: the pool's `allow_multinode`.
            kwds: Ignored.

        Returns:
            `{"metadata": …, "resources": {type: [{"node", "id", "slots"}]}}`, to be checked in.

        Raises:
            ResourceUnavailable: Too few nodes have enough free slots, or the request needs several
                nodes and may not span nodes.
            EmptyResourcePoolError: The pool has no nodes.
            UnknownResourceType: No node has a requested type. Also a `TypeError`.
            InvalidRequest: The request is malformed. Also a `ValueError`.
        """
        del kwds
        wanted = parse_node_requests(request)
        with self._lock:
            self._refuse_if_empty()
            known = self.types
            for member in (member for each in wanted for member in each.members):
                if member.type not in known:
                    raise UnknownResourceType(member.type, known)
            placed = self._place(wanted, allow_multinode, idle=False)
            for share in placed:
                share.node.users += 1
                share.node.closed = share.exclusive
            return self._hand_out(placed)

    def checkin(self, resources: JsonMapping) -> None:
        """Take back all slots of a checkout, or none.

        Args:
            resources: The result of `checkout`, also after a conversion to JSON and back.

        Raises:
            InvalidCheckin: The allocation is malformed, of another pool, changed, or was checked in
                before. Also a `ValueError`.
        """
        with self._lock:
            number, returned = _parse_allocation(resources, self._nodes)
            placed = self._outstanding.get(number)
            if placed is None:
                raise InvalidCheckin(
                    f"allocation {number!r} is not checked out (any more): it was checked in "
                    "before, or belongs to another pool"
                )
            popped = {kind for each in placed for kind, rows in each.taken.items() if not rows}
            returned = Counter({row: n for row, n in returned.items() if row[0] not in popped})
            if returned != _rows(placed):
                raise InvalidCheckin(
                    f"allocation {number} differs from the allocation that was checked out"
                )
            del self._outstanding[number]
            for each in placed:
                each.give_back()
                each.node.users -= 1
                each.node.closed = False  # An exclusive node had one user only.

    def _place(
        self, wanted: Sequence[NodeRequest], allow_multinode: bool | None, *, idle: bool
    ) -> list[_Placed]:
        """Take the slots of each node request from one node, in order; all or none."""
        allowed = self.allow_multinode if allow_multinode is None else allow_multinode
        if len(wanted) > 1 and not allowed:
            raise ResourceUnavailable(f"{len(wanted)} nodes are wanted, and only one is allowed")
        try:
            return self._place_largest_first(wanted, idle=idle)
        except ResourceUnavailable:
            alike = {each.freeze(): each for each in wanted}
            if len(alike) == 1:
                raise  # Equal requests: another order does not help.
            kinds = [each.freeze() for each in wanted]
            ids = matched(kinds, lambda kind: self._able(alike[kind], idle=idle))
            if ids is None:
                raise
        nodes = (self._nodes[each] for each in ids)
        return [_place_one(r, [node], idle=idle) for r, node in zip(wanted, nodes, strict=True)]

    def _able(self, request: NodeRequest, *, idle: bool) -> Iterator[str]:
        """Yield the nodes that could take a request if no other request of its group used them."""
        for node in self._nodes.values():
            if idle or node.open_to(request):
                with suppress(ResourceUnavailable):
                    _place_one(request, [node], idle=idle).give_back()
                    yield node.id

    def _place_largest_first(self, wanted: Sequence[NodeRequest], *, idle: bool) -> list[_Placed]:
        order = sorted(
            range(len(wanted)), key=lambda n: (not wanted[n].exclusive, -wanted[n].total_slots())
        )
        placed: dict[int, _Placed] = {}
        with ExitStack() as undo:
            for number in order:
                used = {each.node.id for each in placed.values()}
                nodes = [
                    node
                    for node in self._nodes.values()
                    if node.id not in used and (idle or node.open_to(wanted[number]))
                ]
                placed[number] = _place_one(wanted[number], nodes, idle=idle)
                undo.callback(placed[number].give_back)
            undo.pop_all()  # All requests have a node.
        return [placed[number] for number in range(len(wanted))]

    def _hand_out(self, placed: list[_Placed]) -> NodeAllocation:
        number = next_number()
        self._outstanding[number] = placed
        resources: dict[str, list[JsonObject]] = {}
        for each in placed:
            for kind, rows in each.taken.items():
                resources.setdefault(kind, []).extend({"node": each.node.id} | r for r in rows)
        nodes = [each.node.id for each in placed]
        exclusive = [each.node.id for each in placed if each.exclusive]
        metadata = {"allocation": number, "nodes": nodes, "exclusive": exclusive}
        return {"metadata": metadata, "resources": resources}

    def _node(self, name: str) -> _Node:
        node = self._nodes.get(str(name))
        if node is None:
            known = ", ".join(self._nodes) or "none"
            raise ResourceUnavailable(f"Resource unavailable: node {name}; there are {known}")
        return node

    def _change_slots(
        self, type_: str, slots_of: Callable[[Slots], Slots], node_id: str | None
    ) -> None:
        with self._lock:
            kind = self._resource_name(type_)
            if node_id is not None and kind not in self._node(node_id).idle:
                raise ResourceUnavailable(f"Resource unavailable: {type_} on node {node_id}")

            def change(resources: dict[str, list[JsonObject]]) -> None:
                for row in resources.get(kind, ()):
                    row["slots"] = slots_of(row["slots"])

            self._resize(node_id, change)

    def _resize(
        self, node_id: str | None, change: Callable[[dict[str, list[JsonObject]]], None]
    ) -> None:
        """Change the resources of one node or of all nodes; if one fails, change none."""
        with self._lock:
            nodes = list(self._nodes.values()) if node_id is None else [self._node(node_id)]
            before = [(node, node.now, node.idle) for node in nodes]
            try:
                for node in nodes:
                    node.resize(change, f"node {node.id}")
            except InvalidSpecification:
                for node, now, idle in before:
                    node.now, node.idle = now, idle
                raise
            for placed in self._outstanding.values():
                for number, each in enumerate(placed):
                    placed[number] = each._replace(inventory=each.node.now)

    def _resource_name(self, kind: str) -> str:
        for name in (kind, f"{kind}s"):
            if name in self.types:
                return name
        raise ResourceUnavailable(f"Resource unavailable: {kind}")

    def _refuse_if_empty(self) -> None:
        if not self._nodes:
            raise EmptyResourcePoolError


def _add(nodes: dict[str, _Node], document: Any, at: str) -> None:
    """Parse a node and add it to the pool's nodes."""
    if not isinstance(document, Mapping) or not isinstance(document.get("id"), str | int):
        raise InvalidSpecification(f"{at}: expected an object with an id")
    only_keys(document, {"id", "resources", "additional_properties"}, at)
    name = str(document["id"])
    if name in nodes:
        raise InvalidSpecification(f"{at}: the id {name!r} occurs twice")
    nodes[name] = _Node(name, document, at)


class _Placed(NamedTuple):
    """The slots taken for one node request."""

    node: _Node
    inventory: Inventory
    taken: dict[str, list[JsonObject]]
    exclusive: bool

    def give_back(self) -> None:
        for kind, rows in self.taken.items():
            for row in rows:
                self.inventory.give(kind, row["id"], exact(row["slots"]) or NONE)


def _place_one(request: NodeRequest, nodes: Sequence[_Node], *, idle: bool) -> _Placed:
    """Take the slots of a node request from the node that keeps the most free slots afterwards."""
    ranked = []
    members = request.members
    for node in nodes:
        inventory = node.idle if idle else node.now
        left = _free_length(inventory, members)
        if left is not None:
            ranked.append((left, node, inventory))
    ranked.sort(key=lambda row: -row[0])  # Stable: of equal nodes, the first listed one wins.
    for _, node, inventory in ranked:
        with suppress(ResourceUnavailable):  # Enough slots in total, but not on one instance.
            taken = allocate(inventory, members)
            if request.exclusive:  # Also take the rest of the node.
                taken = merged(taken, allocate(inventory, inventory.everything()))
            return _Placed(node, inventory, taken, request.exclusive)
    if not nodes:
        raise ResourceUnavailable(
            f"no node is left for {request!r}: each is in use or exclusive use, or in this request"
        )
    most = {
        kind: max(_available(node, kind, idle=idle) for node in nodes)
        for kind in {each.type: None for each in request.members}
    }
    wanted = {kind: _total(request.members, kind) for kind in most}
    short = {kind: (n, most[kind]) for kind, n in wanted.items() if n > most[kind]}
    raise ResourceUnavailable(
        f"{insufficient(short)} on any one node"
        if short
        else f"no node that may be used has all of {request!r} free at once"
    )


def _free_length(inventory: Inventory, members: Sequence[Member]) -> int | None:
    """Return the sum of squares of the types' free slots after a request; None: it does not fit."""
    squares = 0
    for kind in {member.type for member in members}:
        left = (inventory.available(kind) if kind in inventory else NONE) - _total(members, kind)
        if left < 0:
            return None
        squares += left * left
    return squares


def _total(members: Sequence[Member], kind: str) -> Amount:
    return total(member.slots for member in members if member.type == kind)


def _available(node: _Node, kind: str, *, idle: bool) -> Amount:
    inventory = node.idle if idle else node.now
    return inventory.available(kind) if kind in inventory else NONE


def _rows(placed: Iterable[_Placed]) -> Counter[tuple[Any, ...]]:
    return Counter(
        (kind, each.node.id, row["id"], exact(row["slots"]))
        for each in placed
        for kind, rows in each.taken.items()
        for row in rows
    )


def _parse_allocation(
    document: Any, nodes: Mapping[str, _Node]
) -> tuple[int, Counter[tuple[Any, ...]]]:
    try:
        rows = [(kind, row) for kind, listed in document["resources"].items() for row in listed]
        for kind, row in rows:
            if row.get("node") not in nodes:
                found = f"unknown node {row['node']!r}" if "node" in row else "missing node"
                raise InvalidCheckin(f"{found} in {kind}: {dict(row)}")
        taken = Counter((kind, row["node"], row["id"], exact(row["slots"])) for kind, row in rows)
        return int(document["metadata"]["allocation"]), taken
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
        if isinstance(error, InvalidCheckin):
            raise
        raise InvalidCheckin(
            f"expected the result of checkout, with metadata and resources; wrong: {error}"
        ) from error


def matched(wishes: Sequence[Wish], able: Callable[[Wish], Iterable[str]]) -> list[str] | None:
    """Assign a different acceptable candidate to each request, if possible.

    Requests are served in order. If a request finds no free candidate, earlier requests move to
    other candidates, along the shortest chain that ends at a free candidate (augmenting paths;
    Berge, 1957). Equal requests are interchangeable, so each chain visits each kind of request
    once.

    Args:
        wishes: The requests to assign.
        able: Returns the ids of all acceptable candidates for a request, the preferred ones first.

    Returns:
        One id for each request; None: not every request can get a candidate.
    """
    choices = {request: list(able(request)) for request in dict.fromkeys(wishes)}
    holder: dict[str, int] = {}
    given: dict[int, str] = {}
    for first in range(len(wishes)):
        movers: dict[str, int] = {}  # Id → the request that would take it over.
        looked_at: set[Wish] = set()
        waiting = deque([first])
        free: str | None = None
        while waiting and free is None:
            number = waiting.popleft()
            if wishes[number] in looked_at:
                continue
            looked_at.add(wishes[number])
            for each in choices[wishes[number]]:
                if each in movers:
                    continue
                movers[each] = number
                if each not in holder:
                    free = each
                    break
                waiting.append(holder[each])
        while free is not None:
            number = movers[free]
            holder[free] = number
            left = given.get(number)
            given[number] = free
            free = left
        if first not in given:
            return None
    return [given[number] for number in range(len(wishes))]
