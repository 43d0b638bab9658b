"""Checks and measures requests for `admission`."""

from collections.abc import Sequence
from typing import Final

import msgspec

from moorage.core.state.facts import Refusal
from moorage.core.state.refusals import closest_policies
from moorage.model import Code
from moorage.protocol.messages import AllocationRequest

NEAREST: Final = 3
"""Maximum known names that a refusal suggests for an unknown name."""
REGISTERED_SHOWN_MAX: Final = 20
"""Maximum registered names that the details of a refusal list."""


def is_described(message: AllocationRequest) -> bool:
    """Return whether a request describes its candidates instead of naming them."""
    return message.clusters is None and bool(message.filter or message.search)


def overridden_fields(message: AllocationRequest) -> list[str]:
    """Return warnings about ignored fields: another field already names the candidates."""
    if message.filter is None and message.search is None:
        return []
    given = [name for name in ("clusters", "filter", "search") if getattr(message, name)]
    return [f"{name} was ignored: {given[0]} was given and wins." for name in given[1:]]


def size_of(message: AllocationRequest) -> int:
    """Return the bytes of the parts of a message that only the policy and the backend read."""
    parts = (message.inputs, message.parameters, message.settings, message.provision)
    return sum(len(msgspec.json.encode(part)) for part in parts if part)


def unknown_policy(uri: str, known: Sequence[str]) -> Refusal:
    """Return the refusal of a request whose policy is unknown."""
    near = closest_policies(uri, known, NEAREST)
    hint = f" Did you mean {' or '.join(near)}?" if near else " Register it with POST /policy."
    reason = f"No policy “{uri}” is registered.{hint}"
    expected = "the URI of a registered policy"
    details = {"nearest": near, "registered": sorted(known)[:REGISTERED_SHOWN_MAX]}
    return Refusal(Code.UNKNOWN_POLICY, reason, "policy_rule_uri", expected, details)


def too_long(field: str, longest: float, advice: str = "") -> Refusal:
    """Return the refusal of a time that exceeds this server's maximum."""
    expected = f"at most {longest:g}"
    return Refusal(Code.BAD_MESSAGE, f"{field}: expected {expected}{advice}.", field, expected)
