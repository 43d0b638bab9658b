"""`input_data` and its `cluster_data`: dicts of dicts whose parts are fetched at first use.

All classes really are dicts, so `isinstance`, `json.dumps`, `dict(…)`, `copy` and `pickle` behave.
Each unread value is a placeholder, which any read replaces first. Values that the documents do not
have, such as `fleet`, are found by key, but are not items: a policy that logs, copies or returns
its input gets only plain data. Each evaluation decodes afresh, so nothing that a policy changes
survives into the next evaluation.
"""

import gc
from collections import deque
from collections.abc import Callable, ItemsView, Iterator, Sequence, ValuesView
from sys import getrefcount
from typing import Any, Final

import msgspec

from moorage.policy import Fleet
from moorage.records.json_values import JsonMapping, JsonObject, JsonValue

LATER: Final[Any] = object()
"""Placeholder of a value that is made when it is first read."""
_NO_EXTRAS: Final[JsonObject] = {}
_UNREAD: Final = {"data": LATER, "cluster_metrics": LATER, "metrics": LATER}
_UNREAD_EXTRAS: Final = {"capacity": LATER}
_decode: Final = msgspec.msgpack.Decoder().decode
_encode: Final = msgspec.msgpack.Encoder().encode


class _DictType(type):
    """Makes `type(input_data) == dict` true, since some policies test it."""

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is dict

    __hash__ = type.__hash__  # Unlike dict's hash: otherwise `copy` would use `dict.copy`.

    def __repr__(cls) -> str:
        return repr(dict)


class LazyDict(JsonObject, metaclass=_DictType):
    """A dict that makes some of its values when they are first read.

    Attributes:
        extras: Values that are found by key but are not items; also made when first read.
    """

    extras: JsonObject

    def _make(self, keys: Sequence[str]) -> None:
        """Replace the placeholders of `keys`, if there are any."""

    def _make_extra(self, key: str) -> JsonValue:
        """Return the value of an additional key."""
        return self.extras[key]

    def __missing__(self, key: str) -> JsonValue:
        value = self.extras[key]
        if value is LATER:
            value = self.extras[key] = self._make_extra(key)
        return value

    def __contains__(self, key: object) -> bool:
        return dict.__contains__(self, key) or key in self.extras

    def _fill(self) -> None:
        missing = [key for key, value in dict.items(self) if value is LATER]
        if missing:
            self._make(missing)

    def __getitem__(self, key: str) -> JsonValue:
        value = dict.__getitem__(self, key)
        if value is LATER:
            self._make([key])
            value = dict.__getitem__(self, key)
        return value

    def get(self, key: str, default: JsonValue = None) -> JsonValue:
        """Return the value of a key, or the default, as in dict."""
        return self[key] if key in self else default  # noqa: SIM401  # This is `get` itself.

    def setdefault(self, key: str, default: JsonValue = None) -> JsonValue:
        """Return the value of a key; store the default if there is none, as in dict."""
        if key not in self:
            self[key] = default
        return self[key]

    def pop(self, key: str, *default: JsonValue) -> JsonValue:
        """Remove a key and return its value, or the default, as in dict."""
        if dict.__contains__(self, key):
            self[key]
        elif key in self.extras:
            default = (self[key],)
            del self.extras[key]
        return dict.pop(self, key, *default)

    def popitem(self) -> tuple[str, JsonValue]:
        """Remove an item and return it, as in dict."""
        self._fill()
        return dict.popitem(self)

    def __iter__(self) -> Iterator[str]:
        return dict.__iter__(self)

    def items(self) -> JsonValue:
        """Return the items, as in dict; all missing values are fetched together."""
        self._fill()
        return dict.items(self)

    def values(self) -> JsonValue:
        """Return the values, as in dict; all missing values are fetched together."""
        self._fill()
        return dict.values(self)

    def copy(self) -> JsonObject:
        """Return a plain dict with the same items."""
        return dict(self.items())

    def __copy__(self) -> JsonObject:
        return self.copy()

    def __deepcopy__(self, memo: dict[int, object]) -> JsonObject:
        import copy  # noqa: PLC0415  # Rarely needed.

        return copy.deepcopy(self.copy(), memo)

    def __reduce_ex__(self, _protocol: object) -> tuple[object, ...]:
        return (dict, (self.copy(),))

    def __or__(self, other: Any) -> Any:
        return self.copy() | dict(other)

    def __ror__(self, other: Any) -> Any:
        return dict(other) | self.copy()

    def __eq__(self, other: object) -> bool:
        self._fill()
        return dict.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = None  # As in dict: mutable, so unhashable.

    def __repr__(self) -> str:
        return repr(self.copy())


class InputData(LazyDict):
    """The argument of `eval`; some parts are made only when the policy reads them.

    Fast policies read the arrays in `fleet`, and never pay for a dict of ten thousand clusters.

    Args:
        given: The items; `LATER` stands for values that are made later.
        extras: Values that are found by key but are not items; `LATER` has the same meaning.
        later: Makes the value of an item or extra.
    """

    def __init__(
        self,
        given: JsonMapping,
        extras: JsonObject,
        later: Callable[[str], JsonValue] = lambda key: None,  # noqa: ARG005  # None is made.
    ) -> None:
        super().__init__(given)
        self.extras = extras
        self._later = later

    def _make(self, keys: Sequence[str]) -> None:
        for key in keys:
            dict.__setitem__(self, key, self._later(key))

    def _make_extra(self, key: str) -> JsonValue:
        return self._later(key)


class ClusterData(LazyDict):
    """Maps a cluster id to `{"data", "cluster_metrics", "metrics"}`, with the extra key `capacity`.

    Args:
        fetch: Returns the packed document of a cluster, from the host if needed; None if the
            cluster has none.
        fleet: The fleet from which `capacity` is read.
        bytes_max: Packed bytes of the clusters that are decoded at a time.
    """

    def __init__(
        self,
        ids: JsonMapping,
        fetch: Callable[[str], bytes | None],
        fleet: Fleet,
        bytes_max: int = 4 << 20,
    ) -> None:
        super().__init__(ids)
        self.extras = _NO_EXTRAS
        self._fetch = fetch
        self._decoded = _Decoded(bytes_max)
        self._fleet = fleet

    __contains__ = dict.__contains__  # No extras, and called often.

    @staticmethod
    def keys_of(ids: Sequence[str]) -> JsonObject:
        """Return the constructor's argument `ids`; reuse the result, since a copy is quicker."""
        return dict.fromkeys(ids, LATER)

    def items(self) -> JsonValue:
        """Return the items, as in dict; each value is made when a loop reaches it."""
        return _Items(self)

    def values(self) -> JsonValue:
        """Return the values, as in dict; each value is made when a loop reaches it."""
        return _Values(self)

    def _make(self, keys: Sequence[str]) -> None:
        for key in keys:
            blob = self._fetch(key)
            if blob is None:
                blob = _encode({"data": {"id": key}, "cluster_metrics": None})
            dict.__setitem__(self, key, ClusterEntry(key, blob, self._decoded, self._fleet))


class _Items(ItemsView[str, JsonValue]):
    _mapping: ClusterData

    def __reversed__(self) -> Iterator[tuple[str, JsonValue]]:
        return ((key, self._mapping[key]) for key in reversed(self._mapping))


class _Values(ValuesView[JsonValue]):
    _mapping: ClusterData

    def __reversed__(self) -> Iterator[JsonValue]:
        return (self._mapping[key] for key in reversed(self._mapping))


class ClusterEntry(LazyDict):
    """One cluster: decoded when it is first read, and packed again when memory is short.

    Args:
        decoded: The list of decoded entries.
        fleet: The fleet from which the extra `capacity` is read when the policy first uses it.
    """

    def __init__(self, cluster_id: str, blob: bytes, decoded: "_Decoded", fleet: Fleet) -> None:
        super().__init__(_UNREAD)
        self.extras = {"capacity": LATER}
        self._cluster_id = cluster_id
        self._blob = blob
        self._decoded = decoded
        self._fleet = fleet

    def _make(self, keys: Sequence[str]) -> None:
        del keys  # One document has all keys.
        document = unpack(self._blob)
        document["metrics"] = document.setdefault("cluster_metrics", None)
        for key, value in dict.items(self):
            if value is LATER:
                dict.__setitem__(self, key, document[key])
        self._decoded.add(self, len(self._blob))

    def _make_extra(self, key: str) -> JsonValue:
        del key  # The only extra is `capacity`.
        return capacity_of(self._fleet, self._cluster_id)

    def fold(self) -> None:
        """Drop the decoded values, unless the policy could notice that they are decoded again.

        A policy notices if it has changed a value, or still refers to a part of the values.
        """
        if dict.keys(self) != _UNREAD.keys():
            return
        parts = [dict.__getitem__(self, key) for key in _UNREAD]
        data, metrics, again = parts
        if again is not metrics or any(each is LATER for each in parts):
            return
        try:
            if _encode({"data": data, "cluster_metrics": metrics}) != self._blob:
                return
        except Exception:  # noqa: BLE001  # A policy's own values may raise anything.
            return
        capacity = self.extras.get("capacity", LATER)
        if capacity is not LATER and capacity != capacity_of(self._fleet, self._cluster_id):
            return
        parts = [data, metrics, None if capacity is LATER else capacity]
        del data, metrics, again, capacity
        dict.update(self, _UNREAD)
        self.extras.update(_UNREAD_EXTRAS)
        if _references(parts) > _UNSHARED:
            data, metrics, capacity = parts
            dict.update(self, {"data": data, "cluster_metrics": metrics, "metrics": metrics})
            if capacity is not None:
                self.extras["capacity"] = capacity


class _Decoded:
    """The decoded entries, oldest first; beyond a limit the oldest ones are packed again."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        self._entries: deque[tuple[ClusterEntry, int]] = deque()

    def add(self, entry: ClusterEntry, size: int) -> None:
        """Add an entry that has just been decoded."""
        while self._entries and self._bytes + size > self._bytes_max:
            oldest, freed = self._entries.popleft()
            self._bytes -= freed
            oldest.fold()
        self._entries.append((entry, size))
        self._bytes += size


def unpack(packed: bytes) -> JsonValue:
    """Return the value in packed bytes.

    Unpacking makes many containers but no cycles, so garbage collection would find nothing.
    """
    if not gc.isenabled():
        return _decode(packed)
    gc.disable()
    try:
        return _decode(packed)
    finally:
        gc.enable()


def _references(parts: list[JsonValue]) -> int:
    """Return the reference count of the most referenced list or dict within `parts`."""
    most, pending = 0, [each for each in parts if type(each) is dict or type(each) is list]
    while pending:
        container: Any = pending.pop()
        most = max(most, getrefcount(container))
        values = container if type(container) is list else container.values()
        pending += [each for each in values if type(each) is dict or type(each) is list]
    return most


_UNSHARED: Final = _references([{"a": [{}]}])
"""The result of `_references` when nothing else refers to these containers."""


def capacity_of(fleet: Fleet, cluster_id: str) -> JsonObject:
    """Return the free amounts of a cluster: `{"cpu_milli", "memory_mib", "gpus"}` by node id."""
    capacity: JsonObject = {}
    for row in fleet.rows_of(cluster_id):
        cpu, memory, gpus = fleet.capacity(row)
        ids = fleet.gpu_ids[row]
        capacity[fleet.node_ids[row][1]] = {
            "cpu_milli": cpu,
            "memory_mib": memory,
            "gpus": dict(zip(ids, gpus, strict=False)),
        }
    return capacity
