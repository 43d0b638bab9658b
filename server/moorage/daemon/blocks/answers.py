"""Checks the answers of a block's policies: shapes, ids, scores, nodes.

`daemon.blocks.placement` uses a value that a policy returned only after a check here.
This module reads no file and calls no service.
"""

from collections.abc import Container, Mapping, Sequence
from typing import Final

import msgspec

from moorage.model import Code
from moorage.protocol.faults import ServiceError
from moorage.records.json_values import JsonObject, JsonValue

Nodes = Mapping[str, Sequence[str]]
"""The healthy nodes of a cluster, each with its device ids."""

SCORE_BYTES_MAX: Final = 16 << 10
"""Maximum bytes of one packed `selection_score_data`: a block has one for each cluster."""
SHOWN_CHARACTERS_MAX: Final = 300
"""Maximum characters of a policy's text that a reason quotes; the rest is cut off."""


def read_selection(value: JsonValue, offered: Container[str], at: str) -> list[str]:
    """Return the clusters that a clusterAllocator's `selection` named.

    Args:
        value: The value that the policy returned: `{"clusters": [documents or ids]}`.
        offered: Ids of the clusters that the policy was given.
        at: The policy's place in the block, for errors.

    Raises:
        ServiceError: The policy declined, returned something else, or named clusters that it was
            not given.
    """
    _refuse_error(value, "clusters", at)
    clusters = value.get("clusters") if isinstance(value, dict) else None
    if not isinstance(clusters, list):
        raise _wrong(at, "selection", '{"clusters": [cluster documents]}')
    names = [_id(each) for each in clusters]
    for number, name in enumerate(names):
        if name is None or name not in offered:
            what = f"selection clusters[{number}]"
            raise _wrong(at, what, "one of the clusters of filter_result, with its id")
    found = [name for name in names if name is not None]
    if len(set(found)) != len(found):
        raise _wrong(at, "selection clusters", "each cluster once")
    return found


def score_data(value: JsonValue, nodes: Nodes, at: str) -> JsonObject:
    """Return the `selection_score_data` that a resourceAllocator's `dry_run` returned.

    Args:
        value: `{"selection_score_data": {"score": 0..1, "node_info": {"node_id", "gpus"}}}`. An
            empty `node_info` leaves the node open; further keys stay.
        nodes: The nodes that the policy was given as `healthy_nodes`.
        at: The policy's place in the block, for errors.

    Raises:
        ServiceError: The policy declined (`{"error": …}`), or returned something else.
    """
    _refuse_error(value, "selection_score_data", at)
    data = value.get("selection_score_data") if isinstance(value, dict) else None
    if not isinstance(data, dict):
        raise _wrong(at, "dry_run", '{"selection_score_data": {"score", "node_info"}}')
    score: JsonValue = data.get("score")
    number = isinstance(score, int | float) and not isinstance(score, bool)
    if not number or not 0 <= score <= 1:  # What is not a number is in no range.
        raise _wrong(at, "selection_score_data.score", "a number from 0 to 1")
    if len(msgspec.msgpack.encode(data)) > SCORE_BYTES_MAX:
        raise _wrong(at, "selection_score_data", f"at most {SCORE_BYTES_MAX} bytes, packed")
    _check_node(data.get("node_info"), nodes, at)
    return data


def read_choice(value: JsonValue, offered: Mapping[str, Nodes], at: str) -> str:
    """Return the cluster that a clusterAllocator's `post_dry_run` chose.

    Args:
        value: The value that the policy returned: one of the entries in its input, or the id of an
            entry.
        offered: The nodes of each cluster that the policy was given.
        at: The policy's place in the block, for errors.

    Raises:
        ServiceError: The policy declined, or returned something else.
    """
    _refuse_error(value, "id", at)
    name = _id(value)
    if name is None or name not in offered:
        raise _wrong(at, "post_dry_run", "one of the entries of clusters, with its id")
    if isinstance(value, dict) and "score_data" in value:
        score_data({"selection_score_data": value["score_data"]}, offered[name], at)
    return name


def _check_node(info: JsonValue, nodes: Nodes, at: str) -> None:
    if info is None or info == {}:
        return
    if not isinstance(info, dict) or info.get("node_id") is None:
        raise _wrong(at, "node_info", '{"node_id", "gpus"}, or {}')
    name = _name(info["node_id"])
    if name is None or name not in nodes:
        raise _wrong(at, "node_info.node_id", "one of healthy_nodes")
    gpus = info.get("gpus")
    if gpus is None:
        return
    ids = [_name(gpu) for gpu in gpus] if isinstance(gpus, list) else None
    if ids is None or len(set(ids)) != len(ids) or not set(ids) <= set(nodes[name]):
        raise _wrong(at, "node_info.gpus", f"a list of GPU ids of node {name}, each once")


def _refuse_error(value: JsonValue, wanted: str, at: str) -> None:
    """Raise `policy_declined` if an answer has `error`: the policy found no place."""
    if isinstance(value, dict) and value.get("error") and wanted not in value:
        reason = str(value["error"])[:SHOWN_CHARACTERS_MAX]
        raise ServiceError(Code.POLICY_DECLINED, f"{at}: the policy declined: {reason}", field=at)


def _id(value: JsonValue) -> str | None:
    """Return the id of a document; an id given in its place is returned as it is."""
    return _name(value.get("id") if isinstance(value, dict) else value)


def _name(value: JsonValue) -> str | None:
    """Return an id as text: documents number their devices, policies return numbers or texts."""
    if isinstance(value, str):
        return value
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else None


def _wrong(at: str, what: str, expected: str) -> ServiceError:
    reason = f"{at}: the policy's {what} is wrong: expected {expected}"
    return ServiceError(Code.POLICY_BAD_OUTPUT, reason, field=at, expected=expected)
