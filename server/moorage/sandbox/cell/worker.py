"""The jailed worker: serves one policy version over one channel, one frame at a time.

The zygote calls `live` in a fresh fork. `live` enters the jail and reports that; only then does the
host send a policy. The policy can corrupt this process at any time. So the checks in this file
protect nothing; they give the author of an honest policy clear errors.
"""

import builtins
import gc
import io
import logging
import os
import random
import sys
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, NoReturn

import msgspec
import numpy as np

from moorage.model import Demand
from moorage.policy import Fleet, FleetView
from moorage.records.json_values import JsonMapping, JsonObject, JsonValue
from moorage.sandbox.cell import jail, self_test
from moorage.sandbox.cell.clients import (
    APIError,
    ClusterClient,
    ContextClient,
    ContextConflict,
    GlobalBlockMetricsClient,
    GlobalClusterMetricsClient,
)
from moorage.sandbox.cell.cluster_data import LATER, ClusterData, InputData, unpack
from moorage.sandbox.cell.document_cache import DocumentCache
from moorage.sandbox.cell.plain import NotPlainError, to_plain, to_plain_and_packed
from moorage.sandbox.cell.policy import Policy, calls_of, describe, name_of
from moorage.sandbox.cell.replica import Replica
from moorage.sandbox.cell.syscalls import CHANNEL_FD
from moorage.sandbox.wire import frames, limits

_READ_BYTES: Final = 1 << 14
_READ_LONG_BYTES: Final = 1 << 20
_DEMANDS_MAX: Final = 256
_RESERVE_BYTES: Final = 1 << 20
_DEMANDED: Final = tuple(name for name in Demand.__struct_fields__ if name != "where")
"""The fields of a demand that policies see; the server itself compares the labels in `where`."""
_ANSWERS: Final = (frames.CallAnswer, frames.Documents)
_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder().decode


class _Unanswerable(Exception):  # noqa: N818  # A verdict on a value, not an error of the cell.
    """The policy returned a value that cannot be used."""

    def __init__(self, kind: frames.FailureKind, message: str) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message


class Channel:
    """Sends and receives frames over descriptor 3; both calls block.

    Args:
        cache: Applies the host's updates of documents as soon as they are read.
    """

    def __init__(self, cache: DocumentCache) -> None:
        self._cache = cache
        self._reader = frames.FrameReader(limits.HOST_FRAME_BYTES_MAX)
        self._unread: deque[bytes] = deque()
        self._early: deque[frames.ToCell] = deque()
        """Requests that arrived while an answer was awaited; `_unread` has later ones."""

    def receive(self) -> frames.ToCell:
        """Return the next request; end the process if the host is gone."""
        if self._early:
            return self._early.popleft()
        while True:
            frame: frames.ToCell = frames.decode_to_cell(self._next())
            if not isinstance(frame, frames.KeepDocuments):
                return frame
            self._cache.obey(frame)

    def receive_answer(self) -> frames.CallAnswer | frames.Documents:
        """Return the answer to the last call; other frames wait for their turn."""
        while True:
            frame = frames.decode_to_cell(self._next())
            if isinstance(frame, _ANSWERS):
                return frame
            self._take_in(frame)

    def take_in(self) -> bool:
        """Handle the frames that arrived together with the last answer; return whether any did."""
        if not self._unread:
            return False
        while self._unread:
            self._take_in(frames.decode_to_cell(self._unread.popleft()))
        return True

    def _take_in(self, frame: frames.ToCell) -> None:
        if isinstance(frame, frames.KeepDocuments):
            self._cache.obey(frame)
        else:
            self._early.append(frame)

    def _next(self) -> bytes:
        return self._unread.popleft() if self._unread else self._read()

    def _read(self) -> bytes:
        """Wait for the next frame; later frames of the same read wait in `_unread`.

        A large buffer is allocated only after a long frame has begun.
        """
        while True:
            missing = self._reader.missing
            size = min(missing, _READ_LONG_BYTES) if missing > _READ_BYTES else _READ_BYTES
            data = os.read(CHANNEL_FD, size)
            if not data:
                os._exit(0)
            bodies = self._reader.feed(data)
            if bodies:
                self._unread.extend(bodies[1:])
                return bodies[0]

    def send(self, frame: frames.FromCell) -> None:
        """Write a whole frame to the host."""
        data = frames.pack(frame)
        written = os.write(CHANNEL_FD, data)
        while written < len(data):
            written += os.write(CHANNEL_FD, data[written:])


class Worker:
    """Answers the host's frames with the results of one policy.

    Args:
        cache: The cache, which the host keeps current.
        memory_mib: Memory that the cell may use.
    """

    def __init__(
        self, channel: Channel, cache: DocumentCache, load: frames.LoadPolicy, memory_mib: int
    ) -> None:
        self._channel = channel
        self._decoded_bytes_max = int((memory_mib << 20) * limits.DECODED_SHARE_MAX)
        self._output = Capture(load.output_bytes_max)
        self._output.install()
        self._replica = Replica()
        self._contexts: dict[str, bytes] = {}
        self._cache = cache
        self._keeping = False
        """Whether the cache is current: only frames of evaluations keep it so."""
        self._demands: dict[frames.DemandFields, Demand] = {}
        self._all_keys: tuple[int, JsonObject] = (-1, {})
        self._nonce = 0
        self._spent = ""
        """Why the host answers no more calls in this evaluation."""
        self._reserve = bytearray(_RESERVE_BYTES)
        self._tenant: str | None = None
        """The tenant whose evaluation runs; None during `management`."""
        clients = {
            "cluster_client": ClusterClient(self._ask),
            "cluster_metrics_client": GlobalClusterMetricsClient(self._ask),
            "context_client": ContextClient(self._ask_context, self._pack_context),
            "cluster_metrics_api": GlobalClusterMetricsClient(self._ask),
            "block_metrics_api": GlobalBlockMetricsClient(self._ask),
        }
        self._policy = Policy(
            load.uri, load.files, load.entry, load.settings, load.parameters, clients
        )
        self._policy.load(construct=load.check)
        channel.send(
            frames.PolicyLoaded(
                tuple(self._policy.faults),
                self._policy.management,
                self._output.take(),
                tuple(self._policy.warnings) if load.check else (),
            )
        )

    def evaluate(self, frame: frames.Evaluate) -> None:
        """Run the policy once and send the answer; only then prepare for the next request."""
        answer, value = self._evaluate(frame)
        self._channel.send(answer)
        if frame.provisional and isinstance(answer, frames.Result):
            self._replica.propose(frame.request, value, self._demand(frame.demand))

    def _evaluate(self, frame: frames.Evaluate) -> tuple[frames.Result | frames.Failed, JsonValue]:
        """Run the policy once; return the frame with the answer, and the policy's value."""
        replica = self._replica
        replica.update(frame.snapshot, frame.parts, frame.rows, frame.settled)
        replica.reconsider(frame.request)
        self._begin(frame, keeping=True)
        candidates = frame.candidates
        self._cache.begin(lambda: replica.fleet.cluster_ids if candidates is None else candidates)
        try:
            demand = self._demand(frame.demand)
            packed = self._contexts.get(frame.tenant, b"")
            context = _decode(packed) if packed else {}
            policy, parameters = self._policy.instance(frame.overrides)
            view = FleetView(
                replica.fleet, demand, frame.candidates, frame.reserved, frame.matching
            )
            input_data = InputData(
                {"inputs": frame.inputs, "cluster_data": LATER},
                {"fleet": view, "seed": frame.seed, "resources": LATER},
                partial(self._later, demand, frame.candidates),
            )
            with replica.without(frame.excluded_parts):
                value, answer = self._answer(policy.eval(parameters, input_data, context))
            changed = self._context(context, packed)
        except BaseException as error:  # noqa: BLE001  # A policy may raise anything at all.
            return self._failure(error), None
        if changed is not None:
            self._contexts[frame.tenant] = changed
        return frames.Result(frame.nonce, answer, changed, self._output.take()), value

    def apply(self, frame: frames.Apply) -> frames.Result | frames.Failed:
        """Run the policy once on plain input."""
        self._begin(frame, keeping=False)
        try:
            packed = self._contexts.get(frame.tenant, b"")
            context = _decode(packed) if packed else {}
            policy, parameters = self._policy.instance(frame.overrides)
            given = _decode(frame.input_data)
            keys = keys_by_id(given) if frame.ids_only else {}
            if frame.fleet is not None and isinstance(given, dict):
                given = InputData(given, {"fleet": view_from_input(given, frame.fleet)})
            value = policy.eval(parameters, given, context)
            if frame.ids_only:
                value = ids_of(value, keys)
            _, answer = self._answer(value)
            changed = self._context(context, packed)
        except BaseException as error:  # noqa: BLE001  # As in evaluate.
            return self._failure(error)
        if changed is not None:
            self._contexts[frame.tenant] = changed
        return frames.Result(frame.nonce, answer, changed, self._output.take())

    def _begin(self, frame: frames.Evaluate | frames.Apply, *, keeping: bool) -> None:
        """Take over the contexts that the host sends with a frame, and note whose request runs."""
        if frame.forget_contexts:
            self._contexts.clear()
        if frame.context is not None:
            self._contexts[frame.tenant] = frame.context
        self._nonce, self._spent = frame.nonce, ""
        self._tenant = frame.tenant
        self._keeping = keeping

    def manage(self, frame: frames.RunManagement) -> frames.Result | frames.Failed:
        """Run a management command; return the frame with its answer."""
        self._nonce, self._spent = frame.nonce, ""
        self._tenant = None
        self._keeping = False
        try:
            policy, _ = self._policy.instance(frame.overrides)
            management = self._management_of(policy)
            arguments = self._policy.management_arguments(frame.action, frame.data)
            before = self._policy.snapshot(frame.overrides)
            try:
                _, answer = self._answer(management(*arguments))
                changed = self._policy.changes(frame.overrides, before)
                changes = self._answer(changed)[1] if changed else b""
            finally:  # The host decides which requests get these changes.
                self._policy.forget(frame.overrides, before)
        except BaseException as error:  # noqa: BLE001  # As in evaluate.
            return self._failure(error)
        return frames.Result(frame.nonce, answer, None, self._output.take(), changes)

    def _management_of(self, policy: Any) -> Callable[..., object]:
        if not self._policy.management:
            raise _Unanswerable(
                "unsupported", "the policy has no management(self, action, data) method"
            )
        management: Callable[..., object] = policy.management
        return management

    def _demand(self, fields: frames.DemandFields | None) -> Demand | None:
        if fields is None:
            return None
        demand = self._demands.get(fields)
        if demand is None:
            if len(self._demands) >= _DEMANDS_MAX:
                self._demands.clear()
            demand = Demand(*fields)  # type: ignore[arg-type]  # The host sends a topology.
            self._demands[fields] = demand
        return demand

    def _later(
        self, demand: Demand | None, candidates: tuple[str, ...] | None, key: str
    ) -> ClusterData | JsonObject | None:
        """Return the value of an input key; called when the policy first reads the key."""
        return self._cluster_data(candidates) if key == "cluster_data" else _resources(demand)

    def _cluster_data(self, candidates: tuple[str, ...] | None) -> ClusterData:
        fleet = self._replica.fleet
        if candidates is not None:
            keys = ClusterData.keys_of(candidates)
        else:
            if self._all_keys[0] != fleet.layout:
                self._all_keys = (fleet.layout, ClusterData.keys_of(fleet.cluster_ids))
            keys = self._all_keys[1]
        return ClusterData(keys, self._fetch, fleet, self._decoded_bytes_max)

    def _fetch(self, cluster_id: str) -> bytes | None:
        """Return the packed document of a cluster, from the cache or from the host."""
        kind = frames.DOCUMENTS
        found = self._read_cached(kind, cluster_id)
        if found is not None:
            return found
        if self._spent:
            raise OSError(f"cluster documents could not be read: {self._spent}")
        ahead = self._cache.ahead(kind, cluster_id)
        self._channel.send(frames.Want(self._nonce, (cluster_id,), ahead))
        more = True
        while more:
            frame = self._channel.receive_answer()
            if not isinstance(frame, frames.Documents):
                self._spent = frame.message if frame.status == limits.CALLS_SPENT else ""
                raise OSError(f"cluster documents could not be read: {frame.message}")
            self._cache.keep(kind, frame.items)
            found = frame.items.get(cluster_id, found)
            more = frame.more
        self._cache.came(kind, ahead)
        return found

    def _read_cached(self, kind: str, name: str) -> bytes | None:
        found = self._cache.find(kind, name)
        if found is None and self._channel.take_in():
            found = self._cache.find(kind, name)
        return found

    def _ask(
        self, client: str, method: str, arguments: list[JsonValue]
    ) -> tuple[JsonValue, str, int]:
        """Answer an injected client from the cache, or ask the host."""
        argument = arguments[0]
        ahead: tuple[str, ...] = ()
        try:
            if type(argument) is str:  # Usually an id, which needs no conversion.
                cached = self._read_cached(method, argument) if self._keeping else None
                if cached is not None:
                    return unpack(cached), "", 0
                packed = _encode(arguments)
                ahead = self._cache.ahead(method, argument) if self._keeping else ()
            else:
                packed = _encode(to_plain(arguments))
        except (NotPlainError, UnicodeEncodeError) as error:
            return None, f"the arguments cannot be sent: {error}", 0
        if self._spent:
            return None, self._spent, 0
        self._channel.send(frames.Call(self._nonce, client, method, packed, ahead))
        frame = self._channel.receive_answer()
        if not isinstance(frame, frames.CallAnswer):
            return None, "the host's answer belongs to another question", 0
        if frame.status == limits.CALLS_SPENT:
            self._spent = frame.message
            return None, frame.message, 0
        if frame.lasts:
            self._cache.keep(method, {argument: frame.value})
        self._cache.came(method, ahead)
        return (None if frame.message else unpack(frame.value)), frame.message, frame.status

    def _ask_context(self, method: str, arguments: list[JsonValue]) -> tuple[int, bytes]:
        """Ask the host to read or swap the context; return its version and, if read, its bytes."""
        packed = _encode(arguments)
        if self._spent:
            raise OSError(f"the context could not be read: {self._spent}")
        self._channel.send(frames.Call(self._nonce, "context_client", method, packed))
        frame = self._channel.receive_answer()
        if not isinstance(frame, frames.CallAnswer) or frame.message:
            if isinstance(frame, frames.CallAnswer) and frame.status == limits.CALLS_SPENT:
                self._spent = frame.message
            cause = frame.message if isinstance(frame, frames.CallAnswer) else "another answer"
            raise OSError(f"the context could not be read: {cause}")
        version, current = _decode(frame.value)
        if frame.status:
            raise ContextConflict(version)
        if method == "swap" and self._tenant is not None:
            self._contexts[self._tenant] = arguments[1]  # For the next evaluations in the pipe.
        return version, current

    def _pack_context(self, context: JsonObject) -> bytes:
        try:
            packed: bytes = _encode(to_plain(context))
        except (NotPlainError, UnicodeEncodeError) as error:
            raise TypeError(f"context has a value that is not plain JSON: {error}") from None
        if len(packed) > limits.CONTEXT_BYTES_MAX:
            raise ValueError(f"context has {len(packed)} bytes; at most {limits.CONTEXT_BYTES_MAX}")
        return packed

    def _answer(self, value: JsonValue) -> tuple[JsonValue, bytes]:
        """Return the policy's value as plain values, and as the JSON to send."""
        try:
            plain, answer = to_plain_and_packed(value)
        except NotPlainError as error:
            raise _Unanswerable("output", str(error)) from None
        except UnicodeEncodeError:
            raise _Unanswerable("output", "text with lone surrogates is not Unicode") from None
        if len(answer) > limits.ANSWER_BYTES_MAX:
            raise _Unanswerable(
                "output", f"{len(answer)} bytes as JSON; at most {limits.ANSWER_BYTES_MAX}"
            )
        return plain, answer

    def _context(self, context: JsonObject, packed: bytes) -> bytes | None:
        """Return the packed context if the policy changed it."""
        if not context and not packed:
            return None
        try:
            new: bytes = _encode(to_plain(context))
        except (NotPlainError, UnicodeEncodeError) as error:
            raise _Unanswerable(
                "context", f"context has a value that is not plain JSON: {error}"
            ) from None
        if len(new) > limits.CONTEXT_BYTES_MAX:
            raise _Unanswerable(
                "context", f"context has {len(new)} bytes; at most {limits.CONTEXT_BYTES_MAX}"
            )
        return None if new == packed else new

    def _failure(self, error: BaseException) -> frames.Failed:
        if isinstance(error, _Unanswerable):
            # The message has names of keys and classes, which may hold any characters.
            text = error.message[: limits.MESSAGE_CHARACTERS_MAX]
            text = text.encode("utf-8", "replace").decode()
            return frames.Failed(self._nonce, error.kind, "", text, "", 0, self._output.take())
        kind: frames.FailureKind = "memory" if isinstance(error, MemoryError) else "error"
        if kind == "memory":
            self._reserve.clear()  # The report needs memory; then the host ends this cell.
        message, file, line = describe(error)
        said = (name_of(error), message, file, line, self._output.take(), calls_of(error))
        return frames.Failed(self._nonce, kind, *said)


def view_from_input(input_data: JsonObject, snapshot: bytes) -> FleetView:
    """Return the view of the fleet that is part of the input of one execution."""
    fleet = Fleet()
    fleet.restore(_decode(snapshot))
    resources = input_data.get("resources")
    fields = {name: resources[name] for name in _DEMANDED if name in resources} if resources else {}
    if "models" in fields:
        fields["models"] = tuple(fields["models"])
    reserved = tuple((str(cluster), str(node)) for cluster, node in input_data.get("reserved", ()))
    return FleetView(fleet, Demand(**fields) if resources else None, None, reserved)


def _resources(demand: Demand | None) -> JsonObject | None:
    """Return the `resources` of a request as a policy gets them, every field filled in."""
    if demand is None:
        return None
    fields = {name: getattr(demand, name) for name in _DEMANDED}
    return fields | {"models": list(demand.models)}


def keys_by_id(given: JsonValue) -> dict[str, frozenset[str]]:
    """Return the keys of each document by its id, from a list or from the lists of an object."""
    lists = given.values() if isinstance(given, dict) else [given]
    documents = (each for found in lists if isinstance(found, list) for each in found)
    return {
        each["id"]: frozenset(each)
        for each in documents
        if isinstance(each, dict) and isinstance(each.get("id"), str)
    }


def ids_of(value: JsonValue, keys: Mapping[str, frozenset[str]]) -> JsonValue:
    """Replace each document in a value, or in its lists, by the document's id; return the result.

    Args:
        value: The value that a policy returned.
        keys: Keys of the given documents; keys that the policy added, such as a score, stay.
    """
    if isinstance(value, dict):
        if "id" in value:
            return _brief(value, keys)
        return {
            name: ids_of(each, keys) if isinstance(each, list) else each
            for name, each in value.items()
        }
    if isinstance(value, list | tuple):
        return [
            _brief(each, keys) if isinstance(each, dict) and "id" in each else each
            for each in value
        ]
    return value


def _brief(document: JsonMapping, keys: Mapping[str, frozenset[str]]) -> JsonValue:
    name = document["id"]
    known = keys.get(name) if isinstance(name, str) else None
    added = {} if known is None else {k: v for k, v in document.items() if k not in known}
    return {"id": name, **added} if added else name


def live(plan: jail.JailPlan) -> NoReturn:
    """Enter the jail, report that, and serve until the host closes the channel."""
    memory_bytes = plan.memory_mib << 20
    cache = DocumentCache(min(limits.KEPT_BYTES_MAX, int(memory_bytes * limits.KEPT_SHARE_MAX)))
    channel = Channel(cache)
    random.seed()
    np.random.seed(int.from_bytes(os.urandom(4), "little"))  # noqa: NPY002  # Old policies use it.
    try:
        layers = jail.lock_down(plan)
    except jail.LockDownError as error:
        channel.send(frames.CellJailed({}, error.layer, error.reason))
        os._exit(1)
    channel.send(frames.CellJailed(layers, "", ""))
    frame = channel.receive()
    while isinstance(frame, frames.Probe):
        channel.send(frames.Probed(self_test.attack(frame.attack)))
        frame = channel.receive()
    if not isinstance(frame, frames.LoadPolicy):
        os._exit(1)
    jail.forget_tools()
    builtins.APIError = APIError  # type: ignore[attr-defined]  # The documentation uses this name without an import.
    gc.enable()
    worker = Worker(channel, cache, frame, plan.memory_mib)
    while True:
        frame = channel.receive()
        if isinstance(frame, frames.Evaluate):
            worker.evaluate(frame)
        elif isinstance(frame, frames.RunManagement):
            channel.send(worker.manage(frame))
        elif isinstance(frame, frames.Apply):
            channel.send(worker.apply(frame))
        else:
            os._exit(1)


class Capture(io.TextIOBase):
    """A stream for stdout, stderr and logging.

    Args:
        bytes_max: Bytes stored of one evaluation; the rest is counted and dropped.
    """

    def __init__(self, bytes_max: int) -> None:
        super().__init__()
        self._bytes_max = bytes_max
        self._parts: list[str] = []
        self._space = bytes_max
        self._dropped = 0

    def writable(self) -> bool:
        """Return True: the stream can be written."""
        return True

    def write(self, text: str) -> int:
        """Store `text`, cut to the remaining space."""
        size = len(text)
        # A character has up to four bytes, so no encoding is needed to count.
        part = text if size * 4 <= self._space else text[: self._space // 4]
        self._space -= len(part) * 4
        self._dropped += size - len(part)
        if part:
            self._parts.append(str(part))
        return size

    def take(self) -> str:
        """Return the output since the last call, and forget it."""
        if not self._parts and not self._dropped:
            return ""
        text = "".join(self._parts)
        if self._dropped:
            text += f"\n[{self._dropped} more characters were dropped]\n"
        self._parts.clear()
        self._space, self._dropped = self._bytes_max, 0
        return text.encode("utf-8", "replace").decode()

    def install(self) -> None:
        """Replace stdout, stderr and the root logger's handler by this stream."""
        sys.stdout = sys.stderr = self
        for name in ("__stdout__", "__stderr__"):
            setattr(sys, name, self)  # The real streams are /dev/null.
        handler = logging.StreamHandler(self)
        handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
        logging.raiseExceptions = False
        logging.root.handlers[:] = [handler]
        logging.root.setLevel(logging.INFO)
