"""The classes of waiters in columns: finds the classes that may be served now, and their order.

Waiters of one class agree in all that decides their turn: tenant, policy, demand, priority. The
columns are updated as classes come and go, so a wake-up reads arrays and the first few classes; it
neither sorts nor visits all waiters. `order` is the only caller.
"""

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Final, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from moorage.core.queue.device_filters import DeviceFilter, DeviceFilters, device_filter
from moorage.core.state.accounts import Account, Column, accounts_of
from moorage.core.state.growth import PLACES_MAX, GrownPlace
from moorage.core.state.state import State
from moorage.core.state.waiters import UNJUDGED, Shape, WaiterClass
from moorage.model import GPU_MILLI, RESOURCES, Nodes, PolicyRef, Tenant
from moorage.policy import Fleet

Rows = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
T = TypeVar("T", bound=Hashable)
_Key = Callable[[Rows], Column]
Kind = tuple[DeviceFilter, int, int]
"""A demand on one device: filter, memory in MiB, and least free thousandths."""
Rank = tuple[int, float, float, float, int]
"""Sort key: negated precedence, share of the tenant, share of the project, arrival, serial number.
Smaller keys come first."""

ALTERNATIVES_WIDTH: Final = 8
"""Columns for alternatives in a new table, which grows for requests with more alternatives."""
FILTERS_OF_TENANT_MAX: Final = 4_096
"""Maximum different filters (GPU models, labels, clusters) of a tenant's waiters; a request with
one more is refused as `busy`. The first release on a node costs some microseconds for each filter.
"""
COUNTED_MAX: Final = 16
"""Maximum lines whose position is counted one by one; for more, all lines are sorted."""


def _kind(shape: Shape) -> Kind:
    """Return the attributes of a demand that decide which nodes and devices it fits."""
    demand, _, _ = shape
    milli = GPU_MILLI if demand.gpu_milli == GPU_MILLI else 1  # Any free part will do.
    return device_filter(shape), demand.gpu_memory_mib, milli


def _alternatives(shape: Shape) -> list[Shape]:
    _, candidates, demands = shape
    return [(each, candidates, ()) for each in demands]


def _filters(shape: Shape) -> set[DeviceFilter]:
    return set(map(device_filter, (shape, *_alternatives(shape))))


class Table(Generic[T]):
    """A table with one row per item; a new row may get the number of a removed one."""

    def __init__(self, **columns: npt.DTypeLike) -> None:
        self.columns = {name: np.zeros(16, kind) for name, kind in columns.items()}
        self.numbers: dict[T, int] = {}
        self.users: dict[T, int] = {}
        self._unused: list[int] = []
        self.rows = 0

    def __getitem__(self, name: str) -> Column:
        """Return a column, cut to the number of rows."""
        return self.columns[name][: self.rows]

    def add(self, item: T, **values: object) -> int:
        """Count one more user of an item; return its row. A new item gets `values`."""
        number = self.numbers.get(item)
        self.users[item] = self.users.get(item, 0) + 1
        if number is not None:
            return number
        number = self._unused.pop() if self._unused else self.rows
        self.rows = max(self.rows, number + 1)
        for name, column in self.columns.items():
            if number >= len(column):
                self.columns[name] = np.concatenate([column, np.zeros_like(column)])
            self.columns[name][number] = values[name]
        self.numbers[item] = number
        return number

    def drop(self, thing: T) -> bool:
        """Count one user less of a row; return whether no user is left."""
        self.users[thing] -= 1
        if self.users[thing]:
            return False
        del self.users[thing]
        self._unused.append(self.numbers.pop(thing))
        return True


class WakeLimits(NamedTuple):
    """Classes of waiters that this turn may not serve.

    Args:
        capped: By policy at its limit of consultations: the priority up to which to skip waiters.
        spent: Tenants whose waiters were checked often enough in this turn.
    """

    capped: Mapping[PolicyRef, int]
    spent: frozenset[Tenant]


class Ranking:
    """The classes of waiters in columns, unsorted; methods compute their order when needed.

    Args:
        state: The present state, which is only read.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self._classes = Table[WaiterClass](
            priority=np.int64,
            precedence=np.int64,
            tenant=np.int64,
            project=np.int64,
            gpu_milli=np.int64,
            cpu_milli=np.int64,
            memory_mib=np.int64,
            over=np.bool_,  # Over the quota of tenant or project at the last check.
            policy=np.int64,
            shape=np.int64,
            reserves=np.bool_,
            oldest=np.float64,  # Arrival of the first ready waiter; inf: none.
            since=np.float64,  # As `oldest`, of lines not yet visited in this wake-up.
            number=np.int64,  # Line number of this first waiter.
            fresh=np.bool_,  # Some waiters are still unchecked.
            refused_at=np.int64,  # `changes` at which the waiters did not fit.
        )
        self._shapes = Table[Shape](
            gpus=np.int64,
            cpu=np.int64,
            memory=np.int64,
            kind=np.int64,
            several=np.bool_,  # Fits where an alternative fits; each has a row.
        )
        self._others = np.zeros((16, ALTERNATIVES_WIDTH), np.int64)
        """For each shape with alternatives, their rows; the last is repeated to fill the width."""
        self._kinds = Table[Kind](filter=np.int64, gpu_memory=np.int64, milli=np.int64)
        self._filters = DeviceFilters(state)
        self._filters_of: dict[Tenant, Counter[DeviceFilter]] = {}
        self._policies = Table[PolicyRef]()
        self._lines = Table[int](
            of=np.int64,  # The row of their class.
            since=np.float64,
            waiters=np.int64,
            number=np.int64,
        )
        self._by_row: dict[int, WaiterClass] = {}
        self._overdue: dict[int, None] = {}
        self._found_over: dict[int, None] = {}
        self._grown: dict[GrownPlace, None] | None = {}
        self._quotas_as_of: object = None
        self._rooms = 0

    def add(self, waiters: WaiterClass) -> int:
        """Add a class, and return its row."""
        number = self._add_shape(waiters.shape)
        accounts = accounts_of(waiters.tenant, waiters.project)
        tenant, project = map(self._state.accounts.number, accounts)
        row = self._classes.add(
            waiters,
            priority=waiters.priority,
            precedence=waiters.precedence,
            tenant=tenant,
            project=project,
            **dict(zip(RESOURCES, waiters.needs, strict=True)),
            over=False,
            policy=self._policies.add(waiters.policy),
            shape=number,
            reserves=waiters.reserves,
            oldest=np.inf,
            since=np.inf,
            number=0,
            fresh=True,
            refused_at=UNJUDGED,
        )
        self._by_row[row] = waiters
        self._filters_of.setdefault(waiters.tenant, Counter()).update(_filters(waiters.shape))
        if waiters.overdue:
            self._overdue[row] = None
        return row

    def has_room(self, tenant: Tenant, shape: Shape) -> bool:
        """Return whether the filters of one more waiter stay within the tenant's maximum."""
        known = self._filters_of.get(tenant, Counter())
        more = sum(each not in known for each in _filters(shape))  # Usually fewer than in `known`.
        return len(known) + more <= FILTERS_OF_TENANT_MAX

    def _add_shape(self, shape: Shape) -> int:
        """Return the row of a shape; each of its alternatives gets a row, too."""
        demand = shape[0]
        others = list(map(self._add_shape, _alternatives(shape)))
        number = self._shapes.add(
            shape,
            gpus=demand.gpus,
            cpu=demand.cpu_milli,
            memory=demand.memory_mib,
            kind=self._add_kind(_kind(shape)),
            several=bool(others),
        )
        if others:
            wider = max(0, len(others) - self._others.shape[1])
            longer = max(0, len(self._shapes.columns["gpus"]) - len(self._others))
            if wider or longer:
                self._others = np.pad(self._others, ((0, longer), (0, wider)), mode="edge")
            self._others[number] = others[-1]
            self._others[number, : len(others)] = others
        return number

    def _add_kind(self, kind: Kind) -> int:
        accepts, gpu_memory, milli = kind
        number = self._filters.add(accepts)
        return self._kinds.add(kind, filter=number, gpu_memory=gpu_memory, milli=milli)

    def _drop_shape(self, shape: Shape) -> None:
        for each in (*_alternatives(shape), shape):
            self._filters.drop(device_filter(each))
            self._kinds.drop(_kind(each))
            self._shapes.drop(each)

    def remove(self, waiters: WaiterClass) -> None:
        """Remove a class without waiters."""
        row = self._classes.numbers[waiters]
        self._classes["oldest"][row] = self._classes["since"][row] = np.inf
        del self._by_row[row]
        self._overdue.pop(row, None)
        self._classes.drop(waiters)
        self._policies.drop(waiters.policy)
        self._drop_shape(waiters.shape)
        its = self._filters_of[waiters.tenant]
        its.subtract(_filters(waiters.shape))
        for each in _filters(waiters.shape):
            if not its[each]:
                del its[each]
        if not its:
            del self._filters_of[waiters.tenant]

    def waiters(self, row: int) -> WaiterClass:
        """Return the class of a row."""
        return self._by_row[row]

    def ready_since(self, row: int, since: float, number: int, oldest: float) -> None:
        """Store the arrival of the first ready waiters of a class; inf: no waiter is ready.

        Args:
            row: The row of the class.
            since: Arrival of the first waiter that the wake has not visited, in seconds since the
                epoch.
            number: Sequence number among equal arrivals.
            oldest: Arrival of the first of all ready waiters.
        """
        self._classes["since"][row], self._classes["number"][row] = since, number
        self._classes["oldest"][row] = oldest

    def line(self, number: int, row: int, since: float, waiters: int) -> None:
        """Store a line by its number: its class, the arrival of its first waiter, its length.

        A line without waiters is removed.
        """
        lines = self._lines
        if not waiters:
            lines["waiters"][lines.numbers[number]] = 0
            lines.drop(number)
        elif number in lines.numbers:
            at = lines.numbers[number]
            lines["since"][at], lines["waiters"][at] = since, waiters
        else:
            lines.add(number, of=row, since=since, waiters=waiters, number=number)

    # Servable classes ------------------------------------------------------------------------

    def judge_again(self, row: int) -> None:
        """Mark a class to be checked again when capacity grows next, on any node."""
        self._classes["fresh"][row] = True

    def note_refused_class(self, row: int, changes: int) -> None:
        """Record that a class did not fit at this value of `changes`; `UNJUDGED`: forget it."""
        self._classes["refused_at"][row] = changes

    def note_judgement(self, row: int) -> None:
        """Record that all ready waiters of a class have been checked."""
        self._classes["fresh"][row] = False

    def note_refusal(self, row: int, changes: int, reserved: Nodes) -> None:
        """Record that a class, and all of equal demand, did not fit at this value of `changes`."""
        shapes = self._classes["shape"]
        alike: Bools | int = row
        if self._shapes.users[self._by_row[row].shape] > 1:
            alike = shapes == shapes[row]
            if reserved:  # Holds only for classes with these exclusions.
                alike &= self._classes["reserves"] == self._classes["reserves"][row]
        self._classes["refused_at"][alike] = changes
        self._classes["fresh"][alike] = False

    def is_refused(self, row: int, changes: int) -> bool:
        """Return whether the demand of a class did not fit at this value of `changes`."""
        return bool(self._classes["refused_at"][row] == changes)

    def grew(self, places: Collection[GrownPlace] | None, *, wanted: bool) -> list[int]:
        """Record the places where capacity grew or is about to grow; None: everywhere.

        Returns:
            With `wanted`, the rows of the classes of waiters that may be served at these places.
        """
        if places is None or self._grown is None:
            self._grown = None
        else:
            self._grown.update(dict.fromkeys(places))
            if len(self._grown) > PLACES_MAX:
                self._grown = None
        if not wanted:
            return []
        found: list[int] = np.flatnonzero(self._open(places)[self._classes["shape"]]).tolist()
        return [row for row in found if row in self._by_row]

    def note_exhausted(self) -> None:
        """Record that all waiters that may be served on the grown capacity have been checked."""
        self._grown = {}

    def servable(self, changes: int, limits: "WakeLimits", reserved: Nodes) -> tuple[Rows, bool]:
        """Return the classes that may be served now, and whether only `limits` hold back others.

        Args:
            changes: The counter of capacity gains and ended reservations. A class that did not fit
                is not checked again before the counter changes.
            limits: Classes that are not served now.
            reserved: Nodes reserved for the head, closed to other classes that reserve nodes.
        """
        self.rooms()
        if not self._grown and self._grown is not None and not self._classes["fresh"].any():
            return np.zeros(0, np.int64), False
        shape = self._classes["shape"]
        grown = self._open(self._grown)[shape]
        if self._grown and not self._grown.keys().isdisjoint(reserved):
            left = self._open(self._grown.keys() - set(reserved))[shape]
            grown = np.where(self._classes["reserves"], left, grown)
        live = np.isfinite(self._classes["since"]) & (grown | self._classes["fresh"])
        live &= self._classes["refused_at"] != changes
        if self._state.accounts.quotas:
            rows = np.flatnonzero(live)
            rows = rows[self._over(rows)]
            self._classes["over"][rows], self._classes["fresh"][rows] = True, False
            live[rows] = False
            if self._state.warm or self._state.resetting:
                self._found_over.update(dict.fromkeys(rows.tolist()))
        if not any(limits):
            return np.flatnonzero(live), False
        waits = np.zeros(len(live), np.bool_)
        for policy, priority in limits.capped.items():
            its = self._classes["policy"] == self._policies.numbers.get(policy, -1)
            waits |= its & (self._classes["priority"] <= priority)
        for tenant in limits.spent:
            waits |= self._classes["tenant"] == self._state.accounts.number((tenant, None))
        return np.flatnonzero(live & ~waits), bool((live & waits).any())

    def is_over(self, row: int) -> bool:
        """Return whether a class exceeds its quota; it is checked again when the quota has room."""
        over = bool(self._over(np.array([row], np.int64))[0])
        if over:
            self._classes["over"][row] = True
        return over

    def take_over_quota(self, many: int) -> list[int]:
        """Return and forget the classes that `servable` found over their quota, at most `many`.

        `servable` finds only classes for which a warm lease could be evicted.
        """
        if not self._found_over:
            return []
        found, self._found_over = self._found_over, {}
        rows = np.array([row for row in found if row in self._by_row], np.int64)
        return self.first(rows[np.isfinite(self._classes["oldest"][rows])], many)

    def is_any_over(self, tenant: int | None) -> bool:
        """Return whether any class, or any class of one tenant, exceeds its quota."""
        live = np.isfinite(self._classes["since"])
        if tenant is not None:
            live &= self._classes["tenant"] == tenant
        return bool(self._over(np.flatnonzero(live)).any())

    def rooms(self) -> int:
        """Return a counter, from 1, that grows when quotas may have gained room.

        Classes that no longer exceed their quota are then checked on all capacity.
        """
        claims = {account: self._by_row[row] for account, row in self.claims().items()}
        as_of = self._state.accounts.falls, claims
        if as_of != self._quotas_as_of:
            self._quotas_as_of = as_of
            self._rooms += 1
            over = np.flatnonzero(self._classes["over"])
            free = over[~self._over(over)]
            self._classes["over"][free], self._classes["fresh"][free] = False, True
        return self._rooms

    def claims(self) -> dict[int, int]:
        """Return, by account number, the row of the class that reserves the account's quota.

        The reserving class is the first one that was overtaken too often and fits into its own
        quota; a class reserves no borrowed quota.
        """
        accounts, classes = self._state.accounts, self._classes
        claims: dict[int, int] = {}
        ready = [row for row in self._overdue if classes["oldest"][row] < np.inf]
        for row in sorted(ready, key=lambda x: (-classes["priority"][x], classes["oldest"][x], x)):
            for account in (int(classes["tenant"][row]), int(classes["project"][row])):
                if (accounts["nominal"][account] >= self._by_row[row].needs).all():
                    claims.setdefault(account, row)
        return claims

    def _over(self, rows: Rows) -> Bools:
        """Return which classes exceed the quota of their tenant or project: bool `[rows]`."""
        return self._short(rows, "tenant") | self._short(rows, "project")

    def _short(self, rows: Rows, column: str) -> Bools:
        """Return which classes exceed the quota of their `column`, tenant or project."""
        if not self._state.accounts.quotas or not len(rows):
            return np.zeros(len(rows), np.bool_)
        classes, accounts = self._classes, self._classes[column][rows]
        reserved = np.zeros((len(rows), len(RESOURCES)), np.int64)
        for account, first in self.claims().items():
            behind = (accounts == account) & (rows != first)
            behind &= classes["priority"][rows] <= classes["priority"][first]
            reserved[behind] = self._by_row[first].needs
        needs = [classes[name][rows] for name in RESOURCES]
        short: Bools = self._state.accounts.over(accounts, needs, reserved)
        return short

    def _open(self, places: Collection[GrownPlace] | None, *, empty: bool = False) -> Bools:
        """Return which demand shapes may fit at some places (None: anywhere): bool `[shapes]`.

        The check is against the free capacity, or with `empty` against the total capacity.
        """
        shapes, fleet = self._shapes, self._state.fleet
        rows = None if places is None else _rows(fleet, places)
        if rows is None:
            return np.ones(shapes.rows, np.bool_)
        fits = np.zeros(shapes.rows, np.bool_)
        gives_way = empty or bool(self._state.warm or self._state.resetting)
        gpus = fleet.gpu_total if gives_way else fleet.gpu_free
        cpu = fleet.cpu_total if gives_way else fleet.cpu_free
        memory = fleet.memory_total if gives_way else fleet.memory_free
        kinds = self._kinds
        shared = np.flatnonzero(kinds["milli"] < GPU_MILLI)
        for row in rows:
            is_candidate, accepted = self._filters.accepted(row)
            usable = accepted[kinds["filter"]]
            usable &= gpus[row] >= kinds["milli"][:, None]
            usable &= fleet.gpu_memory[row] >= kinds["gpu_memory"][:, None]
            usable[shared] &= ~fleet.gpu_exclusive[row]
            devices = np.where(is_candidate[kinds["filter"]], usable.sum(axis=1), -1)
            here = shapes["gpus"] <= devices[shapes["kind"]]
            here &= shapes["cpu"] <= cpu[row]
            here &= shapes["memory"] <= memory[row]
            fits |= here
        several = np.flatnonzero(shapes["several"])
        fits[several] = fits[self._others[several]].any(axis=1)
        return fits

    # Order -----------------------------------------------------------------------------------

    def overtaken(
        self, nodes: Nodes, of: tuple[Account, Account], priority: int, since: float
    ) -> int | None:
        """Return the oldest class whose first waiter a grant overtakes.

        An overtaken waiter came earlier, has no lower priority, and is not overdue yet. The waiter
        might fit on one of the nodes if they were empty, or it exceeds a quota that the grant uses,
        too.

        Args:
            nodes: The granted nodes.
            of: The accounts of the request.
            priority: The request's priority.
            since: Arrival of the request, in seconds since the epoch.
        """
        classes = self._classes
        older = (classes["oldest"] < since) & (classes["priority"] >= priority)
        rows = np.flatnonzero(older & (classes["precedence"] % 2 == 0))
        if len(rows):
            shares, over = np.zeros(len(rows), np.bool_), np.zeros(len(rows), np.bool_)
            for column, account in zip(("tenant", "project"), of, strict=True):
                short = self._short(rows, column)
                over |= short
                shares |= short & (classes[column][rows] == self._state.accounts.number(account))
            there = self._open(nodes, empty=True)[classes["shape"][rows]]
            rows = rows[shares | (there & ~over)]
        return int(rows[classes["oldest"][rows].argmin()]) if len(rows) else None

    def head(self) -> int | None:
        """Return the row of the first class that may reserve nodes; None: no class may."""
        reserves = self._classes["reserves"] & np.isfinite(self._classes["since"])
        rows = np.flatnonzero(reserves)
        first = self.first(rows[~self._over(rows)], 1)
        return first[0] if first else None

    def first(self, rows: Rows, many: int) -> list[int]:
        """Return the rows of the first classes, in order: at most `many`."""
        return _first(rows, many, (*self._shared, self._since, self._number))

    def first_lines(self, many: int) -> list[int]:
        """Return the numbers of the first lines, in order: at most `many`."""
        lines = self._lines
        rows = np.flatnonzero(lines["waiters"])
        found = _first(rows, many, self._line_keys())
        numbers: list[int] = lines["number"][found].tolist()
        return numbers

    def ahead(self, lines: Sequence[int]) -> list[int]:
        """Return the number of waiters before each of these lines, by line number."""
        rows, waiters = [self._lines.numbers[each] for each in lines], self._lines["waiters"]
        if len(rows) <= COUNTED_MAX:
            return [self._ahead(row) for row in rows]
        all_rows = np.arange(self._lines.rows)
        order = np.lexsort([key(all_rows) for key in reversed(self._line_keys())])
        before = np.zeros(len(order), np.int64)
        before[order] = waiters[order].cumsum() - waiters[order]
        counted: list[int] = before[rows].tolist()
        return counted

    def _ahead(self, row: int) -> int:
        lines, classes = self._lines, np.arange(self._classes.rows)
        of, since, number = lines["of"], lines["since"], lines["number"]
        sooner, tied = np.zeros(len(classes), np.bool_), np.ones(len(classes), np.bool_)
        for key in self._shared:
            values = key(classes)
            own = values[of[row]]
            sooner |= tied & (values < own)
            tied &= values == own
        older = (since < since[row]) | ((since == since[row]) & (number < number[row]))
        return int(lines["waiters"] @ (sooner[of] | (tied[of] & older)))

    @property
    def _shared(self) -> tuple[_Key, ...]:
        """Return the keys that order classes, except the age of their waiters."""
        return self._precedence, self._held_by_tenant, self._held_by_project

    def _line_keys(self) -> list[_Key]:
        """Return the keys that order the rows of lines."""
        lines = self._lines
        of = lines["of"]
        by_class = [lambda rows, key=key: key(of[rows]) for key in self._shared]
        return [*by_class, lines["since"].__getitem__, lines["number"].__getitem__]

    def _precedence(self, rows: Rows) -> Column:
        return -self._classes["precedence"][rows]

    def _held_by_tenant(self, rows: Rows) -> Column:
        return self._shares(rows, "tenant")

    def _held_by_project(self, rows: Rows) -> Column:
        return self._shares(rows, "project")

    def _shares(self, rows: Rows, of: str) -> Column:
        shares = self._state.accounts.shares(self._classes[of][rows])
        return np.where(self._classes["precedence"][rows] % 2, 0.0, shares)

    def _since(self, rows: Rows) -> Column:
        return self._classes["since"][rows]

    def _number(self, rows: Rows) -> Column:
        return self._classes["number"][rows]


def _first(rows: Rows, many: int, keys: Sequence[_Key]) -> list[int]:
    """Return the first rows by some sort keys, in order: at most `many`."""
    chosen, tied = [rows[:0]], rows
    for key in keys:
        if len(tied) <= many:
            break
        values = key(tied)
        # Partition: a full sort would cost more than the rest of a wake-up.
        bound = values.min() if many == 1 else np.partition(values, many - 1)[many - 1]
        chosen.append(tied[values < bound])
        many -= len(chosen[-1])
        tied = tied[values == bound]
    found = np.concatenate([*chosen, tied[:many]])
    ordered: list[int] = found[np.lexsort([key(found) for key in reversed(keys)])].tolist()
    return ordered


def _rows(fleet: Fleet, places: Collection[GrownPlace]) -> list[int] | None:
    """Return the rows of the places that still exist; None if they are more than `PLACES_MAX`."""
    rows: list[int] = []
    for cluster, node in places:
        if node:
            row = fleet.row(cluster, node)
            rows += [] if row is None else [row]
        elif cluster in fleet.cluster_ids:
            number = fleet.cluster_ids.index(cluster)
            rows += np.flatnonzero(fleet.cluster == number).tolist()
    return rows if len(rows) <= PLACES_MAX else None
