"""Parses requests to a pool of nodes: a list of `NodeRequest`, or of flat members."""

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Self

from moorage.records.json_values import JsonMapping, JsonObject
from moorage.slots.amounts import Amount, Slots, plain, total
from moorage.slots.errors import InvalidRequest
from moorage.slots.requests import MEMBERS_MAX, parse_request
from moorage.slots.specification import NODE_NAMES

NODES_MAX: Final = 100_000
"""Maximum nodes in one request."""


class NodeRequest:
    """A request for slots of one node.

    Args:
        resources: Members `{"type", "slots"}`, each to be satisfied by one instance.
        exclusive: Whether the request gets the whole node, so that no other request uses the node.

    Raises:
        InvalidRequest: A member is malformed.
    """

    def __init__(self, resources: Sequence[JsonMapping] = (), exclusive: bool = False) -> None:
        self.members = parse_request(resources)
        self.exclusive = exclusive

    def add(self, type: str, count: int = 1, slots: Slots = 1) -> Self:  # noqa: A002  # As elsewhere.
        """Add `count` members to the request, each of which asks for `slots` slots."""
        _check_count(count)
        self.members += parse_request([{"type": type, "slots": slots}]) * count
        return self

    def count(self, type: str) -> int:  # noqa: A002  # As elsewhere.
        """Return the number of members of a type."""
        return sum(member.type == type for member in self.members)

    def total_slots(self, type: str | None = None) -> Slots:  # noqa: A002  # As elsewhere.
        """Return the sum of the slots of all members of a type; None: of all types."""
        return plain(total(m.slots for m in self.members if type in (None, m.type)))

    @property
    def resources(self) -> list[JsonObject]:
        """A copy of the members as documents, with their additional keys."""
        return [
            {**copy.deepcopy(dict(each.extra)), "type": each.type, "slots": plain(each.slots)}
            for each in self.members
        ]

    def totals(self) -> dict[str, Slots]:
        """Return the slots of all members, by type."""
        return {each.type: self.total_slots(each.type) for each in self.members}

    def freeze(self) -> tuple[tuple[tuple[str, Amount], ...], bool]:
        """Return the request as a hashable value; the order of members matters."""
        return tuple((each.type, each.slots) for each in self.members), self.exclusive

    def __repr__(self) -> str:
        wanted = ", ".join(f"{plain(each.slots)} of {each.type}" for each in self.members)
        return f"<{type(self).__name__} {wanted}{' exclusive' if self.exclusive else ''}>"


def _check_count(count: object) -> None:
    if type(count) is not int or not 0 <= count <= MEMBERS_MAX:
        raise InvalidRequest(f"count: expected a number from 0 to {MEMBERS_MAX}: {count!r}")


def parse_node_requests(request: Any) -> list[NodeRequest]:
    """Parse a request: node requests, or the members of a flat request."""
    if isinstance(request, NodeRequest):
        return [request]
    if not isinstance(request, str | Mapping) and isinstance(request, Iterable):
        request = list(request)
        if request and all(isinstance(each, NodeRequest) for each in request):
            return list[NodeRequest](request)
    members = parse_request(request)
    nodes = [plain(member.slots) for member in members if member.type in NODE_NAMES]
    wanted = NodeRequest()
    wanted.members = [member for member in members if member.type not in NODE_NAMES]
    if len(nodes) > 1 or not all(isinstance(each, int) and each <= NODES_MAX for each in nodes):
        raise InvalidRequest(f"nodes: expected a whole number up to {NODES_MAX}")
    return [wanted] * int(nodes[0] if nodes else 1)
