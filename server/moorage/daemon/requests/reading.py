"""What a request says of itself, as `admission` needs to know it."""

import msgspec

from moorage.protocol.messages import AllocationRequest


def is_described(message: AllocationRequest) -> bool:
    """Return whether its candidates are described, not named."""
    return message.clusters is None and bool(message.filter or message.search)


def outranked(message: AllocationRequest) -> list[str]:
    """Say which descriptions of the candidates count for nothing, because another one wins."""
    given = [name for name in ("clusters", "filter", "search") if getattr(message, name)]
    return [f"{name} was ignored: {given[0]} was given and wins." for name in given[1:]]


def size_of(message: AllocationRequest) -> int:
    """Return the bytes of what a message brings along for the policy and the backend alone."""
    parts = (message.inputs, message.parameters, message.settings, message.provision)
    return sum(len(msgspec.json.encode(part)) for part in parts if part)
