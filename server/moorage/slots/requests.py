"""A request to a pool, read: members, each of which one instance must satisfy."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from moorage.slots.amounts import DECIMALS_MAX, SLOTS_MAX, Amount, exact
from moorage.slots.errors import InvalidRequest

__all__ = ["MEMBERS_MAX", "Member", "parse_request"]

MEMBERS_MAX = 1_000_000
"""Members of one request."""


class Member(NamedTuple):
    """So many slots of one instance of a type."""

    type: str
    slots: Amount


def parse_request(request: Any) -> list[Member]:
    """Read a request: a list of `{"type", "slots"}`, where `slots` is 1 if left out.

    Raises:
        InvalidRequest: It is malformed; the message names the member.

    """
    if isinstance(request, str | Mapping) or not isinstance(request, Iterable):
        raise InvalidRequest(f"expected a list of members, found {type(request).__name__}")
    members = []
    for number, document in enumerate(request):
        if number >= MEMBERS_MAX:
            raise InvalidRequest(f"a request has at most {MEMBERS_MAX} members")
        members.append(_member(document, f"member {number}"))
    return members


def _member(document: Any, at: str) -> Member:
    if not isinstance(document, Mapping) or not isinstance(document.get("type"), str):
        raise InvalidRequest(f'{at}: expected {{"type": text, "slots": number}}: {document!r}')
    if unknown := sorted(set(map(str, document)) - {"type", "slots"}):
        raise InvalidRequest(f"{at}: unknown {', '.join(unknown)}; there are type and slots")
    slots = exact(document.get("slots", 1))
    if not slots:
        raise InvalidRequest(
            f"{at}: slots: expected a number above 0 and up to {SLOTS_MAX}, of at most "
            f"{DECIMALS_MAX} decimals: {document['slots']!r}"
        )
    return Member(document["type"], slots)
