"""The host's answers to a cell's calls: a literal list of allowed calls and their receivers.

`channel` uses this module. The host does not trust the cell: a name that is not on the list means
that the policy itself writes to the channel, and its cell is killed.
"""

import contextlib
import re
from collections.abc import Iterable, Sequence
from typing import Final, get_args

import msgspec

from moorage.policy import Fleet
from moorage.records.json_values import JsonValue
from moorage.sandbox.host.contract import CallRefusedError, HostServices, Method
from moorage.sandbox.wire import frames
from moorage.sandbox.wire.limits import (
    AHEAD_MAX,
    CALL_ANSWER_BYTES_MAX,
    DOCUMENTS_BYTES_MAX,
    FETCH_BYTES_MAX,
)

CALL_BYTES_MAX: Final = 64 << 10
"""Maximum bytes of the packed arguments of one call."""
WANT_SLACK: Final = 1024
"""Documents a cell may request beyond twice the existing documents; more is a forged request."""
_ID: Final = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_:-]|\.(?!\.)){0,252}")
_METHODS: Final = {
    ("cluster_client", "read_cluster"): "id",
    ("cluster_client", "execute_query"): "query",
    ("cluster_metrics_client", "get_cluster"): "id",
    ("cluster_metrics_client", "query_clusters"): "query or None",
    ("block_metrics_client", "get_block"): "id",
    ("block_metrics_client", "query_blocks"): "query or None",
}
_CLIENTS: Final = {method: client for client, method in _METHODS}
_NAMES: Final[dict[str, Method]] = {name: name for name in get_args(Method)}
_encoder: Final = msgspec.msgpack.Encoder()
_decode_arguments: Final = msgspec.msgpack.Decoder(tuple[JsonValue]).decode


class BreachError(Exception):
    """A cell sent a message that no correct cell sends."""


def read_call(frame: frames.Call) -> tuple[JsonValue, ...] | str:
    """Return the checked arguments of a call, or the fault in them.

    Raises:
        BreachError: The method is not on the list, or the arguments are not an array of one value.
    """
    kind = _METHODS.get((frame.client, frame.method))
    if kind is None:
        raise BreachError(f"it called {frame.client[:40]!r}.{frame.method[:40]!r}")
    if len(frame.arguments) > CALL_BYTES_MAX:
        return f"the arguments have {len(frame.arguments)} bytes; at most {CALL_BYTES_MAX}"
    return _read_id(frame.arguments) if kind == "id" else _read_query(frame.arguments, kind)


def _read_id(packed: bytes) -> tuple[str] | str:
    argument = _decode(packed)
    if isinstance(argument, str) and _ID.fullmatch(argument):
        return (argument,)
    return "expected a cluster id: letters, digits, '.', '_', ':' and '-'"


def _read_query(packed: bytes, kind: str) -> tuple[JsonValue] | str:
    argument = _decode(packed)
    if not isinstance(argument, dict) and (argument is not None or kind == "query"):
        return "expected a query object"
    return (argument,)


def _decode(packed: bytes) -> JsonValue:
    try:
        (argument,) = _decode_arguments(packed)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BreachError("its arguments were malformed") from error
    return argument


def answer_at_once(
    services: HostServices, frame: frames.Call, arguments: tuple[JsonValue, ...]
) -> frames.CallAnswer | None:
    """Return the frame that answers a call, if the services have the answer without waiting."""
    (name,) = arguments
    if not isinstance(name, str):
        return None
    packed = services.at_hand(frame.client, _NAMES[frame.method], arguments).get(name)
    return None if packed is None else _answer(frame.nonce, packed)


async def answer_call(
    services: HostServices, frame: frames.Call, arguments: tuple[JsonValue, ...]
) -> frames.CallAnswer:
    """Let the services answer a call; return the frame for the cell."""
    try:
        value = _encoder.encode(await services.call(frame.client, _NAMES[frame.method], arguments))
    except Exception as error:  # noqa: BLE001  # The client gets the error.
        return _refusal_frame(frame, error)
    return _answer(frame.nonce, value)


def _refusal_frame(frame: frames.Call | frames.Want, error: Exception) -> frames.CallAnswer:
    if isinstance(error, CallRefusedError):
        return frames.CallAnswer(frame.nonce, b"", error.message or "unknown error", error.status)
    if isinstance(error, msgspec.MsgspecError | TypeError | OverflowError):
        return frames.CallAnswer(frame.nonce, b"", "the service's answer is not plain JSON", 0)
    return frames.CallAnswer(frame.nonce, b"", f"the service failed ({type(error).__name__})", 0)


def _answer(nonce: int, packed: bytes) -> frames.CallAnswer:
    if len(packed) > CALL_ANSWER_BYTES_MAX:
        message = f"the answer has {len(packed)} bytes; at most {CALL_ANSWER_BYTES_MAX}"
        return frames.CallAnswer(nonce, b"", f"{message}: request less data", 0)
    return frames.CallAnswer(nonce, packed, "", 0)


def read_want(
    frame: frames.Want, candidates: Sequence[str] | None, fleet: Fleet
) -> tuple[str, ...]:
    """Return the requested ids that are candidates, without duplicates.

    Raises:
        BreachError: More ids than an honest cell, whose fleet may be a little older, can know.
    """
    known = set(fleet.cluster_ids if candidates is None else candidates)
    if len(frame.ids) > 2 * len(known) + WANT_SLACK:
        raise BreachError(f"it requested {len(frame.ids)} documents, but there are {len(known)}")
    return tuple(name for name in dict.fromkeys(frame.ids) if name in known)


def answer_want(
    services: HostServices, frame: frames.Want, wanted: Sequence[str]
) -> list[frames.CallAnswer | frames.Documents]:
    """Return the frames with the requested documents."""
    try:
        documents = services.documents(wanted)
    except Exception as error:  # noqa: BLE001  # As in `answer_call`.
        return [_refusal_frame(frame, error)]
    total = sum(len(document.blob) for document in documents)
    if total > FETCH_BYTES_MAX:
        message = f"{total} bytes at once; at most {FETCH_BYTES_MAX}: read fewer clusters"
        return [frames.CallAnswer(frame.nonce, b"", message, 0)]
    answers: list[frames.CallAnswer | frames.Documents] = []
    items: frames.Items = {}
    size = 0
    for document in documents:
        if items and size + len(document.blob) > DOCUMENTS_BYTES_MAX:
            answers.append(frames.Documents(frame.nonce, items, more=True))
            items, size = {}, 0
        items[document.id] = document.blob
        size += len(document.blob)
    answers.append(frames.Documents(frame.nonce, items, more=False))
    return answers


def read_ahead(frame: frames.Call | frames.Want) -> tuple[str, ...]:
    """Return the clusters for which the cell also prefetches small answers.

    Raises:
        BreachError: The ids are more than an honest cell names, or are not ids.
    """
    if len(frame.ahead) > AHEAD_MAX or not all(map(_ID.fullmatch, frame.ahead)):
        raise BreachError("it prefetched a cluster that does not exist")
    return frame.ahead


def at_hand(
    services: HostServices, kind: str, cluster_ids: Sequence[str], bytes_max: int
) -> frames.Items:
    """Return the small answers about these clusters that are in memory."""
    items: frames.Items = {}
    with contextlib.suppress(CallRefusedError):  # The caller of `call` gets the error.
        for name, packed in _find(services, kind, cluster_ids):
            bytes_max -= len(packed)
            if bytes_max < 0:
                break
            items[name] = packed
    return items


def _find(
    services: HostServices, kind: str, cluster_ids: Sequence[str]
) -> Iterable[tuple[str, bytes]]:
    client = _CLIENTS.get(kind)
    if client is not None:
        return services.at_hand(client, _NAMES[kind], cluster_ids).items()
    # One after the other: the rest of large documents is not even packed.
    return ((each.id, each.blob) for name in cluster_ids for each in services.documents((name,)))
