"""Parses requests to a pool: members, each of which one instance must satisfy."""

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any, Final, NamedTuple

from moorage.records.json_values import JsonValue
from moorage.slots.amounts import DECIMALS_MAX, SLOTS_MAX, Amount, exact
from moorage.slots.errors import InvalidRequest
from moorage.slots.specification import MISSPELT

MEMBERS_MAX = 1_000_000
"""Maximum members in one request."""
_KEYS: Final = ("type", "slots")


class Member(NamedTuple):
    """A number of slots of one instance of a type.

    Args:
        type: The type of the resource.
        slots: The number of slots.
        extra: Other keys of the member, which are ignored.
    """

    type: str
    slots: Amount
    extra: Mapping[str, JsonValue] = {}


def parse_request(request: Any) -> list[Member]:
    """Parse a request: a list of `{"type", "slots"}`, where `slots` is 1 by default.

    A member may have other keys, unless a key is similar to `type` or `slots`.

    Raises:
        InvalidRequest: The request is malformed; the message names the member.
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
    extra = {key: value for key, value in document.items() if key not in _KEYS}
    for key in extra:
        if meant := get_close_matches(str(key).lower(), _KEYS, 1, MISSPELT):
            raise InvalidRequest(f"{at}: unknown {key!r}; expected {meant[0]!r}")
    slots = exact(document.get("slots", 1))
    if not slots:
        raise InvalidRequest(
            f"{at}: slots: expected a number above 0 and up to {SLOTS_MAX}, of at most "
            f"{DECIMALS_MAX} decimals: {document['slots']!r}"
        )
    return Member(document["type"], slots, extra)
