"""Views of a pool as dicts and lists: assignments change the pool; YAML dumps plain objects.

`resources` is a copy of the free slots. Writing into the copy changes the pool, node or inventory
from which it was read, after a check. A write changes only its own part: other parts keep their
present values, not those at the time of the read.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NoReturn, TypeVar

import yaml

from moorage.records.json_values import JsonMapping, JsonObject
from moorage.slots.errors import InvalidSpecification

_TOTALS: Final = (
    "this view is computed from the pool and cannot be written; change the pool with fill(), "
    "populate(), pop(), clear(), or by writing to resources"
)
_T = TypeVar("_T", bound=type)


@dataclass(frozen=True, slots=True)
class ResourceOwner:
    """The pool or node whose resources a view shows.

    Args:
        rows: Returns the present instances of a type; empty for an unknown type.
        write_slots: Sets the free slots of one instance; gets its type, its id and the slots.
        write: Sets the instances of some types, all or nothing; None removes a type.
    """

    rows: Callable[[str], list[JsonObject]]
    write_slots: Callable[[str, str, Any], None]
    write: Callable[[JsonMapping], None]


def in_yaml(kind: _T) -> _T:
    """Make YAML write a subclass of dict or list as a plain one."""
    for name in ("SafeDumper", "Dumper", "CSafeDumper", "CDumper"):
        dumper = getattr(yaml, name, None)  # The C classes are optional.
        if dumper is not None and issubclass(kind, dict):
            dumper.add_representer(kind, lambda to, data: to.represent_dict(dict(data)))
        elif dumper is not None:
            dumper.add_representer(kind, lambda to, data: to.represent_list(list(data)))
    return kind


def _writes(name: str, kind: type) -> Callable[..., Any]:
    """Return a method that changes a view like the method of dict or list with this name."""
    method = getattr(kind, name)

    def write(self: Any, *arguments: Any, **named: Any) -> Any:
        return self._change(lambda plain: method(plain, *arguments, **named))

    write.__name__ = name
    return write


class _Written:
    """Applies changes of a view to the owner of the resources."""

    __setitem__, __delitem__ = _writes("__setitem__", dict), _writes("__delitem__", dict)
    clear, pop, popitem = _writes("clear", dict), _writes("pop", dict), _writes("popitem", dict)
    setdefault, update = _writes("setdefault", dict), _writes("update", dict)

    def __ior__(self, other: Any) -> Any:
        self.update(other)
        return self


@in_yaml
class _Row(_Written, JsonObject):
    """A view of one instance."""

    def __init__(self, document: JsonObject, rows: "_Rows") -> None:
        dict.__init__(self, document)
        self._rows = rows

    def _change(self, change: Callable[[JsonObject], Any]) -> Any:
        owner, kind, name = self._rows.owner, self._rows.kind, self["id"]
        rows = owner.rows(kind)
        at = next((number for number, each in enumerate(rows) if each["id"] == name), None)
        if at is None:
            raise InvalidSpecification(f"{kind} {name}: there is no such instance any more")
        new = dict(rows[at])
        found = change(new)
        if {**new, "slots": 0} == {**rows[at], "slots": 0} and "slots" in new:
            owner.write_slots(kind, name, new["slots"])
        else:
            rows[at] = new
            owner.write({kind: rows})
        new = owner.rows(kind)[at]
        dict.clear(self)
        dict.update(self, new)
        return found

    def __reduce__(self) -> tuple[Any, ...]:
        """Make copies and pickles plain objects, not views."""
        return dict, (dict(self),)


@in_yaml
class _Rows(list[Any]):
    """A view of the instances of one type."""

    __setitem__, __delitem__ = _writes("__setitem__", list), _writes("__delitem__", list)
    append, extend, insert = (_writes(name, list) for name in ("append", "extend", "insert"))
    clear, pop, remove = (_writes(name, list) for name in ("clear", "pop", "remove"))
    reverse, sort = _writes("reverse", list), _writes("sort", list)

    def __init__(self, kind: str, documents: Iterable[JsonObject], owner: ResourceOwner) -> None:
        self.kind = kind
        self.owner = owner
        super().__init__(_Row(each, self) for each in documents)

    def __iadd__(self, others: Iterable[Any]) -> Any:  # type: ignore[misc]  # The view is written.
        self.extend(others)
        return self

    def __imul__(self, times: Any) -> Any:  # type: ignore[misc]  # The view is written.
        self._change(lambda plain: plain.__imul__(times))
        return self

    def _change(self, change: Callable[[list[Any]], Any]) -> Any:
        new: list[Any] = list(self)
        found = change(new)
        known = {each["id"]: each for each in self.owner.rows(self.kind)}
        ours = set(map(id, self))
        rows = [known.get(each["id"], each) if id(each) in ours else each for each in new]
        self.owner.write({self.kind: rows})
        list.clear(self)
        list.extend(self, (_Row(each, self) for each in self.owner.rows(self.kind)))
        return dict(found) if isinstance(found, _Row) else found

    def __reduce__(self) -> tuple[Any, ...]:
        """Make copies and pickles plain objects, not views."""
        return list, (list(self),)


@in_yaml
class FreeResources(_Written, JsonObject):
    """A view of the free slots by type: `{type: [{"id", "slots"}]}`.

    Args:
        listed: The instances by type.
        owner: The pool, node or inventory of the instances.
    """

    def __init__(self, listed: Mapping[str, list[JsonObject]], owner: ResourceOwner) -> None:
        dict.__init__(self, {kind: _Rows(kind, rows, owner) for kind, rows in listed.items()})
        self._owner = owner

    def _change(self, change: Callable[[JsonObject], Any]) -> Any:
        new: JsonObject = dict(self)
        found = change(new)
        changed: JsonObject = {
            kind: rows for kind, rows in new.items() if rows is not self.get(kind, self)
        }
        changed |= dict.fromkeys(self.keys() - new.keys())
        self._owner.write(changed)
        for kind, rows in changed.items():
            if rows is None:
                dict.pop(self, kind, None)
            else:
                dict.__setitem__(self, kind, _Rows(kind, self._owner.rows(kind), self._owner))
        return list(map(dict, found)) if isinstance(found, _Rows) else found

    def __reduce__(self) -> tuple[Any, ...]:
        """Make copies and pickles plain objects, not views."""
        return dict, (dict(self),)


def refuse_totals(*_: Any, **__: Any) -> NoReturn:
    """Refuse an assignment to totals; the message names the attribute to assign instead."""
    raise TypeError(_TOTALS)


@in_yaml
class Totals(Counter[str]):
    """A read-only counter of totals, whose copies are plain counters.

    Args:
        totals: The total slots by type.
    """

    def __init__(self, totals: Mapping[str, int]) -> None:
        dict.update(self, totals)

    __setitem__ = __delitem__ = __ior__ = __iadd__ = __isub__ = refuse_totals
    clear = pop = popitem = setdefault = update = subtract = refuse_totals

    def copy(self) -> Counter[str]:  # type: ignore[override]  # A copy may be written.
        """Return a plain, writable copy."""
        return Counter(dict(self))

    def __reduce__(self) -> tuple[Any, ...]:
        """Return the state for a copy."""
        return Counter, (dict(self),)
