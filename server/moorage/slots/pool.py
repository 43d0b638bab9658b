"""The flat pool: instances of types, on one machine."""

import copy
import os
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import IO, Any, Final

from moorage.records.json_values import JsonMapping, JsonObject
from moorage.slots.amounts import NONE, Amount, Slots
from moorage.slots.errors import (
    EmptyResourcePoolError,
    InvalidCheckin,
    InvalidSpecification,
    ResourceUnavailable,
)
from moorage.slots.inventory import Allocator, Inventory, allocate, check_slots, rewritten
from moorage.slots.outcome import Outcome
from moorage.slots.outstanding import Allocation, Outstanding, parse_allocation
from moorage.slots.requests import parse_request
from moorage.slots.specification import (
    NODE_NAMES,
    Format,
    Instance,
    count_instances,
    documents,
    format_pool,
    parse_specification,
)
from moorage.slots.views import FreeResources, ResourceOwner, Totals, refuse_totals

ALWAYS: Final = "gpus"
"""A type that `fill` adds to each pool, even without instances: jobs may request 0 GPUs."""


class ResourcePool:
    """The resources of a computer, by type, instance and slot.

    Every method is atomic: threads need no lock of their own. For each instance, the free and the
    checked-out slots always add up to its total slots.

    Args:
        pool: A description in a form of `fill`; None or empty: the pool is empty.

    Attributes:
        additional_properties: Other data of the user; `count` reads `slots.nodes.count` in it.
        allocator: The `Allocator` that chooses instances and takes their slots, by default the best
            fit.

    Raises:
        InvalidSpecification: The description is wrong; the message names the place.
    """

    allocator: Allocator = Allocator()

    def __init__(self, pool: JsonMapping | None = None) -> None:
        self._lock = threading.RLock()
        self.additional_properties: JsonObject = {}
        self._now = self._idle = Inventory({})
        self._outstanding = Outstanding()
        if pool:
            self.fill(pool)

    @property
    def resources(self) -> dict[str, list[JsonObject]]:
        """The free slots: `{type: [{"id", "slots"}]}`, also instances without free slots.

        The value is a view. Writing into the view, or assigning to `resources`, sets the free slots
        of the pool after a check. Checked-out slots stay checked out, unless their instance is no
        longer listed. A copy of the view is a plain dict.
        """
        with self._lock:
            owner = ResourceOwner(self._rows, self._write_slots, self._write)
            return FreeResources(self._now.listed(), owner)

    @resources.setter
    def resources(self, resources: JsonMapping) -> None:
        self._write(resources, whole=True)

    @property
    def slots_per_resource_type(self) -> Counter[str]:
        """The total slots of each type; an assignment raises an error."""
        with self._lock:
            return Totals(self._idle.totals())

    @slots_per_resource_type.setter
    def slots_per_resource_type(self, totals: Mapping[str, int]) -> None:
        if Counter(totals) != self.slots_per_resource_type:  # Equal totals change nothing.
            refuse_totals()

    @property
    def types(self) -> list[str]:
        """The types of the pool, sorted."""
        with self._lock:
            return self._now.types

    def __contains__(self, type: object) -> bool:  # noqa: A002  # The documents' word.
        with self._lock:
            return type in self._now

    def __getstate__(self) -> JsonObject:
        """Return the state for a copy, in which the same slots are checked out."""
        with self._lock:
            return copy.deepcopy({k: each for k, each in vars(self).items() if k != "_lock"})

    def __setstate__(self, state: JsonObject) -> None:
        self._lock = threading.RLock()
        vars(self).update(state)
        self._outstanding.keep_numbers()

    def __repr__(self) -> str:
        return format_pool(self.getstate(), "yaml")

    def empty(self) -> bool:
        """Return whether the pool has no types."""
        return not self.types

    def count(self, type: str) -> int:  # noqa: A002  # The documents' word.
        """Return the number of instances of a type.

        Args:
            type: A type, in singular or plural; `node` and `nodes` are counted in the additional
                properties, and are 1 if these have no count.

        Raises:
            ResourceUnavailable: The pool has no such type.
            InvalidSpecification: The count in the additional properties is not a number.
        """
        with self._lock:
            if type in NODE_NAMES:
                nodes = self.additional_properties.get("nodes")
                count = nodes.get("count", 1) if isinstance(nodes, Mapping) else 1
                try:
                    return int(count)
                except (TypeError, ValueError) as error:
                    raise InvalidSpecification(
                        f"additional_properties.nodes.count: expected a number, found {count!r}"
                    ) from error
            for name in (type, f"{type}s"):
                if name in self._now:
                    return self._now.count(name)
            raise ResourceUnavailable(f"Resource unavailable: {type}")

    def slots_available(self, type: str) -> Slots:  # noqa: A002  # The documents' word.
        """Return the free slots of a type; 0 for an unknown type."""
        with self._lock:
            return self._now.slots_available(type)

    def fill(self, pool: JsonMapping) -> None:
        """Replace the contents by a description; all checkouts are forgotten.

        Args:
            pool: `{"resources": {type: [{"id", "slots"}]}, "additional_properties": {}}`, or one of
                the other layouts of `specification`.

        Raises:
            InvalidSpecification: The description is wrong; the message names the place. The pool is
                unchanged.
        """
        read = parse_specification(pool)
        resources = read.resources | {ALWAYS: read.resources.get(ALWAYS, ())}
        now, idle = Inventory.of(resources), Inventory.of(resources)
        properties = copy.deepcopy(read.additional_properties)
        with self._lock:
            self.additional_properties = properties
            self._now, self._idle = now, idle
            self._outstanding = Outstanding()

    def populate(self, **kwds: int) -> None:
        """Fill the pool with a number of instances of each type, with one slot each.

        Args:
            kwds: Counts by type. Default of `cpus`: the CPUs that this process may use; of `gpus`:
                0.

        Raises:
            InvalidSpecification: A count is negative, or not a whole number.
        """
        self.fill({"resources": instances_of(kwds)})

    def pop(self, type: str) -> list[JsonObject] | None:  # noqa: A002  # The documents' word.
        """Remove a type with its checkouts; return its free slots, or None for an unknown type."""
        with self._lock:
            if type not in self._now:
                return None
            self._outstanding.forget(lambda kind, _: kind != type)
            self._idle.pop(type)
            return self._now.pop(type)

    def clear(self) -> None:
        """Remove all types and forget all checkouts."""
        with self._lock:
            self.additional_properties = {}
            self._now = self._idle = Inventory({})
            self._outstanding = Outstanding()

    def getstate(self) -> JsonObject:
        """Return a copy of the current `{"additional_properties", "resources"}`."""
        with self._lock:
            return {
                "additional_properties": copy.deepcopy(self.additional_properties),
                "resources": self._now.listed(),
            }

    def dump(self, file: IO[Any], format: Format = "yaml") -> None:  # noqa: A002  # As in `json.dump` elsewhere.
        """Write the result of `getstate` under the key `resource_pool`, as input for `fill`."""
        file.write(format_pool(self.getstate(), format))

    def accommodates(self, request: Sequence[JsonMapping]) -> Outcome:
        """Determine whether the pool could grant a request if nothing were checked out.

        The same code decides `accommodates` and `checkout`, so the two agree.

        Args:
            request: Members in the form of `checkout`.

        Raises:
            EmptyResourcePoolError: The pool has no types.
            InvalidRequest: The request is malformed.
        """
        members = parse_request(request)
        with self._lock:
            self._refuse_if_empty()
            if missing := sorted({each.type for each in members if each.type not in self._idle}):
                noun = "Resource" if len(missing) == 1 else "Resources"
                return Outcome(ok=False, reason=f"{noun} unavailable: {','.join(missing)}")
            try:
                taken = allocate(self._idle, members, self.allocator)
            except ResourceUnavailable as error:
                return Outcome(ok=False, reason=str(error) or "the allocator refuses")
            for held, _ in parse_allocation(taken):
                self._idle.give(*held)
        return Outcome(ok=True)

    def checkout(self, request: Sequence[JsonMapping], **kwds: Any) -> Allocation:
        """Take all slots of a request, or none.

        Args:
            request: Members `{"type", "slots"}`; each is satisfied by one instance: that with the
                fewest free slots that are enough, and of equal instances the first.
            kwds: Ignored.

        Returns:
            `{type: [{"id", "slots"}]}`, in the order of the request, to be checked in.

        Raises:
            ResourceUnavailable: Some slots are not free; the message has the request and the free
                slots.
            EmptyResourcePoolError: The pool has no types.
            UnknownResourceType: The pool does not have a requested type. Also a `TypeError`.
            InvalidRequest: The request is malformed. Also a `ValueError`.
        """
        del kwds
        members = parse_request(request)
        with self._lock:
            self._refuse_if_empty()
            taken = allocate(self._now, members, self.allocator)
            return Allocation(taken, self._outstanding.add(taken))

    def checkin(self, resources: Mapping[str, Sequence[JsonMapping]]) -> None:
        """Take back slots that were checked out: all slots of `resources`, or none.

        Args:
            resources: The result of `checkout`, or some of its members, also after a conversion to
                JSON and back.

        Raises:
            InvalidCheckin: The slots are malformed, of another pool, or were checked in before.
                Also a `ValueError`.
        """
        returned = parse_allocation(resources)
        with self._lock:
            for held, _ in returned:
                if self._now.instance(held.type, held.id) is None:
                    raise InvalidCheckin(f"{held.type} {held.id}: this pool has no such instance")
            self._outstanding.settle(returned)
            for held, _ in returned:
                self._now.give(*held)

    def _rows(self, kind: str) -> list[JsonObject]:
        with self._lock:
            return self._now.rows(kind)

    def _write_slots(self, kind: str, name: str, slots: Any) -> None:
        """Set the free slots of an instance; its checkouts stay unchanged."""
        free = check_slots(slots, f"resources.{kind} {name}")
        with self._lock:
            if self._now.instance(kind, name) is None:
                raise InvalidSpecification(f"{kind} {name}: there is no such instance any more")
            has = Amount(free + self._out(kind, name))
            self._now.set_slots(kind, name, free, has)
            self._idle.set_slots(kind, name, has, has)

    def _write(self, types: JsonMapping, *, whole: bool = False) -> None:
        """Set the free slots of some types; checkouts of listed instances stay unchanged."""

        def has(kind: str, row: Instance) -> Amount:
            return Amount(row.slots + self._out(kind, row.id))

        with self._lock:
            free = rewritten(self._now, types, whole=whole)
            idle = Inventory.of(
                {
                    kind: [replace(r, slots=has(kind, r)) for r in rows]
                    for kind, rows in free.items()
                }
            )
            self._now, self._idle = Inventory.partly(free, has), idle
            self._outstanding.forget(self._now.instance)

    def _out(self, kind: str, name: str) -> Amount:
        """Return the checked-out slots of an instance."""
        known = self._now.instance(kind, name)
        return Amount(known.slots - self._now.free(kind, name)) if known else NONE

    def _refuse_if_empty(self) -> None:
        if not self._now.types:
            raise EmptyResourcePoolError


def instances_of(counts: Mapping[str, int]) -> dict[str, list[JsonObject]]:
    """Return the instances for the counts of `populate`."""
    counts = {"cpus": len(cpus_here()), ALWAYS: 0, **counts}
    return {kind: documents(count_instances(n, kind)) for kind, n in counts.items()}


def cpus_here() -> list[int]:
    """Return the ids of the CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))
