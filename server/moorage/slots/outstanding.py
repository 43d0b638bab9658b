"""Records checked-out slots: only these can be returned, and only once.

A pool adds each allocation at its checkout and settles it at its checkin. Each member of an
`Allocation` has the allocation's number, so the pool tells equal allocations apart. A member that
was copied as a plain dict, or converted to JSON, has no number: the pool compares its contents, and
settles the oldest of equal ones.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from moorage.records.json_values import JsonMapping, JsonObject
from moorage.slots.amounts import Amount, exact, plain
from moorage.slots.errors import InvalidCheckin
from moorage.slots.views import in_yaml

_LAST: Final = {"number": 0}
"""The last number, shared by all pools of a process: no pool accepts another's allocation."""
_LOCK: Final = threading.Lock()


def next_number() -> int:
    """Return a new number for an allocation of this process."""
    with _LOCK:
        _LAST["number"] += 1
        return _LAST["number"]


def keep_number(number: int) -> None:
    """Reserve a number that an allocation of another process already has."""
    with _LOCK:
        _LAST["number"] = max(_LAST["number"], number)


class Held(NamedTuple):
    """One member of an allocation."""

    type: str
    id: str
    slots: Amount


@in_yaml
class _Row(JsonObject):
    """A member of an allocation, `{"id", "slots"}`, and the allocation's number."""

    __slots__ = ("number",)

    def __init__(self, document: JsonMapping, number: int | None) -> None:
        super().__init__(document)
        self.number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return _Row, (dict(self), self.number)


@in_yaml
class Allocation(dict[str, list[JsonObject]]):
    """The result of a checkout, `{type: [{"id", "slots"}]}`, and its number.

    The allocation is a plain dict in every other respect.

    Args:
        resources: The slots that were checked out.
        number: The allocation's number; None: the pool compares contents.
    """

    __slots__ = ("number",)

    def __init__(
        self, resources: Mapping[str, Iterable[JsonMapping]], number: int | None = None
    ) -> None:
        super().__init__(
            {k: [_Row(each, number) for each in rows] for k, rows in resources.items()}
        )
        self.number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return Allocation, (dict(self), self.number)


class Outstanding:
    """Records the members of all allocations of a pool that are still checked out."""

    __slots__ = ("_holders",)

    def __init__(self) -> None:
        # For each member, the numbers of its allocations, oldest first, and how often each has it.
        self._holders: dict[Held, dict[int, int]] = {}

    def add(self, allocation: Mapping[str, Iterable[JsonMapping]]) -> int:
        """Store an allocation; return its number."""
        number = next_number()
        for held, _ in parse_allocation(allocation):
            holders = self._holders.setdefault(held, {})
            holders[number] = holders.get(number, 0) + 1
        return number

    def settle(self, returned: Sequence[tuple[Held, int | None]]) -> None:
        """Remove the returned slots from the checked-out ones: all of them, or none.

        Args:
            returned: The members, each with the number of its allocation; None: unknown.

        Raises:
            InvalidCheckin: A member is not checked out; all checked-out slots stay recorded.
        """
        times, in_all = Counter(returned), Counter(held for held, _ in returned)
        for (held, number), wanted in times.items():
            holders = self._holders.get(held, {})
            if number is None:
                short = _some(holders, in_all[held]) < in_all[held]
            else:
                short = holders.get(number, 0) < wanted
            if short:
                raise InvalidCheckin(self._why_not(held, number))
        # Members with a number first: the others may only settle what is left.
        for held, number in sorted(returned, key=lambda each: each[1] is None):
            self._forget(held, number)

    def _why_not(self, wanted: Held, number: int | None) -> str:
        """Return why the slots of a member cannot be returned."""
        place, slots = f"{wanted.type} {wanted.id}", plain(wanted.slots)
        held = [
            plain(each.slots)
            for each, holders in self._holders.items()
            if each[:2] == wanted[:2] and (number is None or number in holders)
        ]
        if not held or plain(wanted.slots) in held:
            return (
                f"{place}: {slots} slots are not checked out (any more) by this allocation: it was"
                " checked in before, or belongs to another pool"
            )
        sizes = " and ".join(map(str, sorted(held)))
        return f"{place}: {sizes} slots are checked out there, not {slots}; return whole members"

    def keep_numbers(self) -> None:
        """Reserve the numbers of the recorded allocations, so that no new allocation gets one."""
        keep_number(max((max(each) for each in self._holders.values()), default=0))

    def forget(self, known: Callable[[str, str], object]) -> None:
        """Forget checked-out slots of instances that the pool no longer has, by type and id."""
        self._holders = {
            held: who for held, who in self._holders.items() if known(held.type, held.id)
        }

    def _forget(self, held: Held, number: int | None) -> None:
        holders = self._holders[held]
        who = next(iter(holders)) if number is None else number
        holders[who] -= 1
        if not holders[who]:
            del holders[who]
        if not holders:
            del self._holders[held]


def parse_allocation(resources: Any) -> list[tuple[Held, int | None]]:
    """Parse a returned allocation; return its members, each with its number if known.

    Raises:
        InvalidCheckin: The allocation is malformed; the message names the place.
    """
    if not isinstance(resources, Mapping):
        raise InvalidCheckin(f"expected {{type: [{{'id', 'slots'}}]}}, found {resources!r}")
    members = []
    whole = resources.number if isinstance(resources, Allocation) else None
    for kind, listed in resources.items():
        if not isinstance(kind, str) or not isinstance(listed, list | tuple):
            raise InvalidCheckin(f"{kind}: expected a list of {{'id', 'slots'}}")
        for number, row in enumerate(listed):
            if not isinstance(row, Mapping) or set(row) != {"id", "slots"}:
                raise InvalidCheckin(f"{kind}[{number}]: expected 'id' and 'slots', found {row!r}")
            slots = exact(row["slots"])
            if not slots:
                raise InvalidCheckin(f"{kind}[{number}].slots: not a number above 0: {row!r}")
            known = row.number if isinstance(row, _Row) else whole
            members.append((Held(kind, str(row["id"]), slots), known))
    return members


def _some(holders: Mapping[int, int], enough: int) -> int:
    """Return how many members of this kind all holders have, or at least `enough`."""
    found = 0
    for each in holders.values():
        found += each
        if found >= enough:
            break
    return found
