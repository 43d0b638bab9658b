"""Reads the value that a policy returned as a proposal of nodes and GPUs.

The cell calls `parse_proposal` to remember its own proposal, the server to verify the proposal (it
does not trust the cell), and authors' offline tests call it, too.
"""

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from moorage.model import GPU_MILLI, ClusterId, Demand, NodeId, Share
from moorage.records.json_values import JsonMapping, JsonValue

SHARES_MAX: Final = 1024
"""At most this many nodes in one proposal."""
GPUS_MAX: Final = 1024
"""At most this many devices in one share."""
AMOUNT_MAX: Final = 2**53
"""Largest whole number in a proposal: every JSON reader and every column holds it exactly."""
_OBJECTS: Final = (dict, Mapping)
"""Classes of JSON objects; Python is slow to ask `Mapping`, so it asks `dict` first."""


class ProposedShare(msgspec.Struct, frozen=True, gc=False):
    """One node's part of a proposal; the policy may have omitted some fields.

    `node_id` and `gpus` are None if the policy left the choice to the allocator.
    """

    cluster_id: ClusterId
    node_id: NodeId | None
    gpus: tuple[str, ...] | None
    gpu_milli: int
    cpu_milli: int
    memory_mib: int

    def share(self) -> Share | None:
        """Return the proposal as a share, or None if the allocator still has to choose devices."""
        if self.node_id is None or self.gpus is None:
            return None
        return Share(
            self.cluster_id,
            self.node_id,
            self.gpus,
            self.gpu_milli,
            self.cpu_milli,
            self.memory_mib,
        )

    def is_on(self, other: "ProposedShare") -> bool:
        """Return whether this share and another share name the same node."""
        node = (self.cluster_id, self.node_id)
        return self.node_id is not None and node == (other.cluster_id, other.node_id)

    def lies_beside(self, other: "ProposedShare") -> bool:
        """Return whether two shares can be granted together: on one node, their GPUs differ."""
        if not self.is_on(other):
            return True
        if self.gpus is None or other.gpus is None or self.gpu_milli != other.gpu_milli:
            return False
        return set(self.gpus).isdisjoint(other.gpus)


class ProposalError(ValueError):
    """The returned value names a cluster, but is not a valid proposal.

    Args:
        field: Path of the wrong part, e.g. `[1].gpus[0]`.
        expected: The value that was expected in the field.
    """

    def __init__(self, field: str, expected: str) -> None:
        super().__init__(f"{field}: expected {expected}")
        self.field = field
        self.expected = expected


def parse_proposal(value: JsonValue, demand: Demand | None) -> tuple[ProposedShare, ...]:
    """Return the nodes and GPUs that the value of `eval` proposes.

    Args:
        value: A dict with `cluster_id` (or `clusterId`), and optionally `node_id` (`nodeId`),
            `gpus`, `gpu_milli`, `cpu_milli`, `memory_mib`; or a list of them for a gang, or for
            several requests in one. A request whose part names no cluster is granted nothing.
        demand: Fills in the amounts that the policy did not name.

    Returns:
        One share per node, or part; empty if the value names no cluster, which grants nothing.

    Raises:
        ProposalError: The value names a cluster, but another part of it is malformed.
    """
    if isinstance(value, _OBJECTS):
        return (_read_share(value, demand, ""),) if _names_cluster(value) else ()
    if not isinstance(value, list) or not any(_names_cluster(item) for item in value):
        return ()
    if len(value) > SHARES_MAX:
        raise ProposalError("(list)", f"at most {SHARES_MAX} nodes")
    partial = has_empty_parts(value, demand)
    shares = [
        _read_share(item, demand, f"[{number}].")
        for number, item in enumerate(value)
        if not partial or _names_cluster(item)
    ]
    return tuple(shares if demand is not None else _join(shares))


def has_empty_parts(value: JsonValue, demand: Demand | None) -> bool:
    """Return whether a value is a list for several requests, some of them without a place."""
    if not isinstance(value, list) or (demand is not None and demand.nodes > 1):
        return False  # A gang is whole or not at all.
    named = sum(map(_names_cluster, value))
    return 0 < named < len(value)


def _join(shares: Sequence[ProposedShare]) -> list[ProposedShare]:
    """Merge shares of several requests by node into one share each."""
    joined: list[ProposedShare] = []
    for share in shares:
        for place, other in enumerate(joined):
            if share.is_on(other) and share.lies_beside(other):
                joined[place] = msgspec.structs.replace(
                    other,
                    gpus=(*(other.gpus or ()), *(share.gpus or ())),
                    cpu_milli=other.cpu_milli + share.cpu_milli,
                    memory_mib=other.memory_mib + share.memory_mib,
                )
                break
        else:
            joined.append(share)
    return joined


def _names_cluster(value: JsonValue) -> bool:
    return isinstance(value, _OBJECTS) and (
        value.get("cluster_id") is not None or value.get("clusterId") is not None
    )


def _read_share(value: JsonValue, demand: Demand | None, path: str) -> ProposedShare:
    if not _names_cluster(value):
        raise ProposalError(f"{path}cluster_id", "a cluster id in every item of the list")
    node = value.get("node_id", value.get("nodeId"))
    gpus = value.get("gpus")
    return ProposedShare(
        cluster_id=ClusterId(
            _name(value.get("cluster_id", value.get("clusterId")), f"{path}cluster_id")
        ),
        node_id=None if node is None else NodeId(_name(node, f"{path}node_id")),
        gpus=None if gpus is None else _gpus(gpus, f"{path}gpus"),
        gpu_milli=_amount(value, "gpu_milli", demand.gpu_milli if demand else GPU_MILLI, path),
        cpu_milli=_amount(value, "cpu_milli", demand.cpu_milli if demand else 0, path),
        memory_mib=_amount(value, "memory_mib", demand.memory_mib if demand else 0, path),
    )


def _name(value: JsonValue, field: str) -> str:
    """Return an id as text: strings unchanged, whole numbers as their digits."""
    if isinstance(value, str) and value:
        return value
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) <= AMOUNT_MAX:
        return str(value)
    raise ProposalError(field, "a non-empty string or a whole number")


def _gpus(value: JsonValue, field: str) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or len(value) > GPUS_MAX:
        raise ProposalError(field, f"a list of at most {GPUS_MAX} GPU ids")
    gpus: tuple[str, ...] = tuple(value)
    for gpu in gpus:
        if type(gpu) is not str or not gpu:
            gpus = tuple(_name(each, f"{field}[{number}]") for number, each in enumerate(value))
            break
    if len(set(gpus)) != len(gpus):
        raise ProposalError(field, "each GPU once")
    return gpus


def _amount(value: JsonMapping, key: str, default: int, path: str) -> int:
    amount = value.get(key)
    if amount is None:
        return default
    most = GPU_MILLI if key == "gpu_milli" else AMOUNT_MAX
    if type(amount) is int and 0 < amount <= most:
        return amount  # Nearly all amounts; the checks below reject others.
    if isinstance(amount, bool) or not isinstance(amount, int | float):
        raise ProposalError(f"{path}{key}", "a number")
    if not 0 <= amount <= AMOUNT_MAX or amount != int(amount):
        raise ProposalError(f"{path}{key}", f"a whole number, 0 to {AMOUNT_MAX}")
    if key == "gpu_milli" and not 1 <= amount <= GPU_MILLI:
        raise ProposalError(f"{path}{key}", f"1 to {GPU_MILLI}, per GPU")
    return int(amount)
