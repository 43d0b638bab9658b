"""Free slots, and the only code that takes slots: best fit, all or nothing.

`Inventory` sorts the instances of each type by free slots, so bisection finds the best fit quickly.
`Allocator` takes slots of the best fit; `AllocationTransaction` returns all taken slots after an
error; `allocate`, which both pools call, combines the three. The pools lock; this module does not.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Self

from moorage.records.json_values import JsonMapping, JsonObject
from moorage.slots.amounts import NONE, SLOTS_MAX, Amount, Slots, exact, plain, total
from moorage.slots.errors import (
    InvalidRequest,
    InvalidSpecification,
    ResourceUnavailable,
    SlotsError,
    UnknownResourceType,
)
from moorage.slots.requests import Member
from moorage.slots.specification import Instance, documents, parse_resources
from moorage.slots.views import FreeResources, ResourceOwner


class _Place:
    """Counts the free slots of one instance, and whether it is blocked.

    Parts of an instance are instances, too. While a slot of the whole is in use, its parts are
    blocked, and vice versa. `relatives` are the places of the instances that this one blocks;
    `blocked_by` counts the places that block this one.
    """

    __slots__ = ("blocked_by", "bucket", "free", "instance", "position", "relatives")

    def __init__(self, bucket: _Bucket, position: int, instance: Instance) -> None:
        self.bucket = bucket
        self.position = position
        self.instance = instance
        self.free = instance.slots
        self.relatives: list[_Place] = []
        self.blocked_by = 0

    @property
    def idle(self) -> bool:
        return self.free == self.instance.slots

    def change(self, slots: Amount) -> None:
        """Add free slots, or take them if `slots` is negative."""
        free = Amount(self.free + slots)
        if not 0 <= free <= self.instance.slots:
            raise ValueError(
                f"{self.instance.id}: expected 0 to {plain(self.instance.slots)} free slots, "
                f"not {plain(free)}"
            )
        self.become(free, self.instance.slots)

    def become(self, free: Amount, slots: Amount) -> None:
        """Set the free slots and the total slots."""
        was_idle = self.idle
        self._leave()
        self.free = free
        if slots != self.instance.slots:
            self.instance = replace(self.instance, slots=slots)
        self._enter()
        if self.idle != was_idle:
            for each in self.relatives:
                each.block(1 if was_idle else -1)

    def block(self, change: int) -> None:
        self._leave()
        self.blocked_by += change
        self._enter()

    def _leave(self) -> None:
        if not self.blocked_by:
            self.bucket.remove(self)

    def _enter(self) -> None:
        if not self.blocked_by:
            self.bucket.insert(self)


class _Bucket:
    """Sorts the unblocked places of one type by free slots, then by position.

    An insert or a removal moves the later entries of the list: a microsecond for ten thousand
    instances.
    """

    __slots__ = ("available", "by_id", "order", "places")

    def __init__(self, instances: Sequence[Instance]) -> None:
        self.places = [_Place(self, number, each) for number, each in enumerate(instances)]
        self.by_id = {place.instance.id: place for place in self.places}
        self.order: list[tuple[Amount, int]] = sorted((p.free, p.position) for p in self.places)
        self.available = total(place.free for place in self.places)

    def best_fit(self, slots: Amount) -> _Place | None:
        """Return the place with the fewest free slots that are enough; the first of equal ones."""
        at = bisect_left(self.order, (slots, -1))
        return self.places[self.order[at][1]] if at < len(self.order) else None

    def most(self) -> Amount:
        """Return the largest number of free slots that one place has."""
        return self.order[-1][0] if self.order else NONE

    def insert(self, place: _Place) -> None:
        insort(self.order, (place.free, place.position))
        self.available = Amount(self.available + place.free)

    def remove(self, place: _Place) -> None:
        del self.order[bisect_left(self.order, (place.free, place.position))]
        self.available = Amount(self.available - place.free)


class Inventory:
    """Has the free slots of each instance, by type, and takes and returns slots.

    Args:
        resources: `{type: [{"id", "slots"}]}`; the listed slots are free.

    Raises:
        InvalidSpecification: `resources` is malformed; the message names the place.
    """

    __slots__ = ("_buckets",)

    def __init__(self, resources: Mapping[str, Sequence[JsonMapping]]) -> None:
        self._buckets = _buckets(parse_resources(resources, "resources"))

    @classmethod
    def of(cls, resources: Mapping[str, Sequence[Instance]]) -> Inventory:
        """Return the inventory of a parsed description."""
        self = cls({})
        self._buckets = _buckets(resources)
        return self

    @classmethod
    def partly(
        cls, free: Mapping[str, Sequence[Instance]], slots_of: Callable[[str, Instance], Amount]
    ) -> Inventory:
        """Return an inventory with some slots in use.

        Args:
            free: The instances by type, each with the slots that are free.
            slots_of: Returns how many slots an instance of a type has, free or not.
        """
        self = cls.of({})
        self._buckets = _partly(free, slots_of)
        return self

    @property
    def resources(self) -> dict[str, list[JsonObject]]:
        """The free slots by type, in the order of the description.

        The value is a view: writing into the view changes the inventory after a check. A smaller
        number takes slots, and a number above the total adds slots.
        """
        return FreeResources(self.listed(), ResourceOwner(self.rows, self.write_slots, self.write))

    @resources.setter
    def resources(self, resources: JsonMapping) -> None:
        self.write(resources, whole=True)

    def listed(self) -> dict[str, list[JsonObject]]:
        """Return the free slots by type, as a plain copy."""
        return {kind: self.rows(kind) for kind in self._buckets}

    def rows(self, kind: str) -> list[JsonObject]:
        """Return the free slots of a type as a plain copy; an empty list for an unknown type."""
        places = self._buckets[kind].places if kind in self._buckets else ()
        return documents(replace(each.instance, slots=each.free) for each in places)

    def write_slots(self, kind: str, name: str, slots: Any) -> None:
        """Set the free slots of an instance; a larger number also raises its total.

        Raises:
            InvalidSpecification: `slots` is not a number of slots, or the instance does not exist.
        """
        place = self._buckets[kind].by_id.get(name) if kind in self._buckets else None
        free = check_slots(slots, f"resources.{kind} {name}")
        if place is None:
            raise InvalidSpecification(f"{kind} {name}: there is no such instance")
        place.become(free, max(free, place.instance.slots))

    def write(self, types: JsonMapping, *, whole: bool = False) -> None:
        """Set the instances of some types; None removes a type.

        Args:
            types: For each type its instances, with the slots that are free.
            whole: Whether to remove all other types.

        Raises:
            InvalidSpecification: `types` is malformed; the message names the place, and the
                inventory is unchanged.
        """

        def slots_of(kind: str, each: Instance) -> Amount:
            old = self.instance(kind, each.id)
            return max(each.slots, old.slots) if old else each.slots

        free = rewritten(self, types, whole=whole)
        self._buckets = _partly(free, slots_of)

    def free(self, kind: str, name: str) -> Amount:
        """Return the free slots of an instance, blocked or not; 0 for an unknown instance."""
        place = self._buckets[kind].by_id.get(name) if kind in self._buckets else None
        return place.free if place else NONE

    def set_slots(self, kind: str, name: str, free: Amount, slots: Amount) -> None:
        """Set the free slots and all slots of an instance."""
        self._bucket(kind).by_id[name].become(free, slots)

    @property
    def types(self) -> list[str]:
        """The types of the inventory, sorted."""
        return sorted(self._buckets)

    def __contains__(self, rtype: object) -> bool:
        return rtype in self._buckets

    def count(self, rtype: str) -> int:
        """Return the number of instances of a type."""
        return len(self._bucket(rtype).places)

    def totals(self) -> Counter[str]:
        """Return the slots of each type, free or not."""
        totals: Counter[str] = Counter()
        for kind, bucket in self._buckets.items():
            all_of_it = total(place.instance.slots for place in bucket.places)
            totals[kind] = plain(all_of_it)  # type: ignore[assignment]  # Documented as int.
        return totals

    def slots_available(self, rtype: str) -> Slots:
        """Return the free slots of a type that a request could take now."""
        bucket = self._buckets.get(rtype)
        return plain(bucket.available) if bucket else 0

    def available(self, rtype: str) -> Amount:
        """Return the exact available slots of a type; an unknown type is an error."""
        return self._bucket(rtype).available

    def pop(self, rtype: str) -> list[JsonObject]:
        """Remove a type; return its free slots."""
        listed = self.listed()[rtype]
        for place in self._buckets.pop(rtype).places:
            for each in place.relatives:
                each.relatives.remove(place)
                if not place.idle:
                    each.block(-1)
        return listed

    def take(self, rtype: str, slots: Amount) -> str:
        """Take slots of the best fitting instance; return its id.

        Raises:
            ResourceUnavailable: No instance has enough free slots.
        """
        bucket = self._bucket(rtype)
        place = bucket.best_fit(slots)
        if place is None:
            raise ResourceUnavailable(
                insufficient({rtype: (slots, bucket.most())})
                + (" on any one instance" if bucket.available >= slots else "")
            )
        place.change(Amount(-slots))
        return place.instance.id

    def give(self, rtype: str, rid: str, slots: Amount) -> None:
        """Return slots of an instance.

        Raises:
            ValueError: The instance does not exist, or would get more free slots than it has in
                total.
        """
        place = self._bucket(rtype).by_id.get(rid)
        if place is None:
            raise ValueError(f"{rtype} {rid}: there is no such instance")
        place.change(slots)

    def standing(self) -> dict[tuple[str, str], tuple[Amount, Amount]]:
        """Return the free and the total slots of each instance, by type and id."""
        return {
            (kind, place.instance.id): (place.free, place.instance.slots)
            for kind, bucket in self._buckets.items()
            for place in bucket.places
        }

    def everything(self) -> list[Member]:
        """Return a request for all free slots.

        For an instance that is divided into parts, it requests the whole; if a part is in use, it
        requests the free parts instead.
        """
        return [
            Member(kind, place.free)
            for kind, bucket in self._buckets.items()
            for place in bucket.places
            if place.free
            and not place.blocked_by
            # If a part is free, its whole is also free, unless another part is in use.
            and (
                place.instance.part_of is None
                or all(whole.blocked_by or not whole.free for whole in place.relatives)
            )
        ]

    def instance(self, rtype: str, rid: str) -> Instance | None:
        """Return an instance with its total slots; None for an unknown instance."""
        bucket = self._buckets.get(rtype)
        place = bucket.by_id.get(rid) if bucket else None
        return place.instance if place else None

    def _bucket(self, rtype: str) -> _Bucket:
        if rtype not in self._buckets:
            raise UnknownResourceType(rtype, self.types)
        return self._buckets[rtype]


class Allocator:
    """Takes the best fit: of the instances with enough free slots, the one with the fewest.

    A subclass may use another rule: its `acquire` finds an instance in `inventory.resources`,
    subtracts from the instance's `slots`, and returns `{"id", "slots"}`. `pool.allocator = …`
    installs it.
    """

    __slots__ = ()

    def acquire(self, inventory: Inventory, rtype: str, slots: Slots) -> JsonObject:
        """Take slots of one instance.

        Args:
            inventory: The inventory to take from.
            rtype: The type.
            slots: Number of slots, above 0.

        Returns:
            `{"id", "slots"}`. Of equally full instances, the first in the description is taken.

        Raises:
            ResourceUnavailable: No instance has enough free slots; the message has the request and
                the free slots.
            UnknownResourceType: The inventory has no such type.
            InvalidRequest: `slots` is not a number of slots.
        """
        return {"id": inventory.take(rtype, _positive(slots)), "slots": slots}


class AllocationTransaction:
    """Gives recorded slots back if the block raises an exception, which is then raised again.

    Args:
        inventory: The inventory from which slots were taken.
    """

    __slots__ = ("deltas", "inventory")

    def __init__(self, inventory: Inventory) -> None:
        self.inventory = inventory
        self.deltas: list[tuple[str, str, Slots]] = []

    def record(self, rtype: str, rid: str, slots: Slots) -> None:
        """Record that slots of an instance were taken."""
        self.deltas.append((rtype, rid, slots))

    def rollback(self) -> None:
        """Return all recorded slots; a second rollback does nothing."""
        while self.deltas:
            rtype, rid, slots = self.deltas.pop()
            self.inventory.give(rtype, rid, _positive(slots))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        if kind is not None:
            self.rollback()


_ALLOCATOR: Final = Allocator()


def _put_back(
    inventory: Inventory,
    before: Mapping[tuple[str, str], tuple[Amount, Amount]],
    listed: JsonMapping,
) -> None:
    """Restore an inventory to its state before an allocator raised an error."""
    if inventory.standing().keys() != before.keys():
        inventory.write(listed, whole=True)
    for (kind, name), (free, has) in before.items():
        inventory.set_slots(kind, name, free, has)


def allocate(
    inventory: Inventory, request: Sequence[Member], allocator: Allocator = _ALLOCATOR
) -> dict[str, list[JsonObject]]:
    """Take all slots of a request, or none.

    Args:
        inventory: The inventory to take from.
        request: The members of the request.
        allocator: Takes the members one by one.

    Returns:
        `{type: [{"id", "slots"}]}`, in the order of the request.

    Raises:
        ResourceUnavailable: Some requested slots are not free.
        UnknownResourceType: The inventory has no such type.
        SlotsError: The allocator took other slots than it returned.
    """
    wanted: dict[str, Amount] = {}
    for member in request:
        wanted[member.type] = Amount(wanted.get(member.type, 0) + member.slots)
    free = {kind: inventory.available(kind) for kind in wanted}
    if short := {kind: (n, free[kind]) for kind, n in wanted.items() if n > free[kind]}:
        raise ResourceUnavailable(insufficient(short))
    taken: dict[str, list[JsonObject]] = {}
    with AllocationTransaction(inventory) as transaction:
        for kind, slots, _ in request:
            if type(allocator) is Allocator:
                found = allocator.acquire(inventory, kind, plain(slots))
            else:
                found = _acquire(allocator, inventory, kind, slots)
            transaction.record(kind, found["id"], found["slots"])
            taken.setdefault(kind, []).append(found)
    return taken


def _acquire(allocator: Allocator, inventory: Inventory, kind: str, slots: Amount) -> JsonObject:
    """Take slots with a user's allocator, and check that it took exactly the slots it returned."""
    before, buckets = inventory.standing(), inventory.listed()
    try:
        found: Any = allocator.acquire(inventory, kind, plain(slots))
        name = str(found["id"]) if isinstance(found, Mapping) and "id" in found else ""
        free, has = before.get((kind, name), (NONE, NONE))
        expected = before | {(kind, name): (Amount(free - slots), has)}
        if inventory.standing() == expected and exact(found.get("slots")) == slots:
            return {"id": name, "slots": plain(slots)}
    except BaseException:
        _put_back(inventory, before, buckets)
        raise
    _put_back(inventory, before, buckets)
    raise SlotsError(
        f"{type(allocator).__name__}.acquire({kind!r}, {plain(slots)}) returned {found!r}; "
        "expected {'id', 'slots'} of one instance, and as many slots taken from it, and no others"
    )


def insufficient(short: Mapping[str, tuple[Amount, Amount]]) -> str:
    """Return a sentence that names the types with too few slots."""
    counts = (
        f"{kind} (requested {plain(wanted)}, available {plain(free)})"
        for kind, (wanted, free) in sorted(short.items())
    )
    return f"insufficient slots of {', '.join(counts)}"


def merged(*taken: Mapping[str, Sequence[JsonMapping]]) -> dict[str, list[JsonObject]]:
    """Return the sum of allocations of one inventory, in which each instance appears once."""
    slots: dict[str, dict[str, Amount]] = {}
    for each in taken:
        for kind, rows in each.items():
            for row in rows:
                have = slots.setdefault(kind, {})
                more = exact(row["slots"]) or NONE
                have[row["id"]] = Amount(have.get(row["id"], NONE) + more)
    return {
        kind: [{"id": name, "slots": plain(amount)} for name, amount in have.items()]
        for kind, have in slots.items()
    }


def rewritten(
    now: Inventory, types: JsonMapping, *, whole: bool
) -> dict[str, tuple[Instance, ...]]:
    """Return the free slots after an assignment to some types, as `Inventory.write` makes it."""
    if not isinstance(types, Mapping):
        raise InvalidSpecification(f"resources: expected an object, found {type(types).__name__}")
    resources: JsonObject = {} if whole else now.listed()
    for kind, rows in types.items():
        if rows is None:
            resources.pop(kind, None)
        else:
            resources[kind] = rows
    return parse_resources(resources, "resources")


def check_slots(slots: Any, at: str) -> Amount:
    """Return an assigned number of slots; refuse a value that is not such a number.

    Raises:
        InvalidSpecification: The value is not a number of slots.
    """
    amount = exact(slots)
    if amount is None:
        raise InvalidSpecification(
            f"{at}.slots: expected a number from 0 to {SLOTS_MAX}, found {slots!r}"
        )
    return amount


def _positive(slots: Any) -> Amount:
    amount = exact(slots)
    if not amount:
        raise InvalidRequest(f"slots: expected a number above 0, found {slots!r}")
    return amount


def _buckets(resources: Mapping[str, Sequence[Instance]]) -> dict[str, _Bucket]:
    buckets = {kind: _Bucket(instances) for kind, instances in resources.items()}
    for bucket in buckets.values():
        for place in bucket.places:
            if place.instance.part_of:
                kind, name = place.instance.part_of
                whole = buckets[kind].by_id[name]
                whole.relatives.append(place)
                place.relatives.append(whole)
    return buckets


def _partly(
    free: Mapping[str, Sequence[Instance]], slots_of: Callable[[str, Instance], Amount]
) -> dict[str, _Bucket]:
    buckets = _buckets(free)
    for kind, bucket in buckets.items():
        for place in bucket.places:
            place.become(place.free, slots_of(kind, place.instance))
    return buckets
