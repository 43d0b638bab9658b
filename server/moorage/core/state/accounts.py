"""Tracks use, limits and past use of tenants and their projects.

`State` updates accounts as it applies facts. The queue reads shares (a smaller share goes first)
and room (the rest of a quota). The cost of a change does not grow with the number of accounts.
"""

import math
from collections.abc import Iterable, Iterator
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from moorage.model import GPU_MILLI, RESOURCES, Ask, Cluster, Lease, Placement, Quota, Tenant

Amounts = tuple[int, ...]
"""GPU milli, CPU milli, memory in MiB: in the order of `RESOURCES`."""
Account = tuple[Tenant, str | None]
"""A tenant and its project; None: the tenant as a whole; "": requests that name no project."""
EVERYONE: Final = Tenant("*")
"""The account whose quota applies to each tenant that has no quota of its own."""
UNLIMITED: Final = 1 << 60
STEPS: Final = 64
"""Steps of time per half-life. Past use decays step by step, so that the result does not depend on
how often it is added up, e.g. in a replay."""
_HALVING: Final = np.array([2.0 ** (-step / STEPS) for step in range(STEPS)])

Numbers = npt.NDArray[np.int64]
Column: TypeAlias = npt.NDArray[Any]
"""One value per row: numbers of one type, or booleans."""


class Past(NamedTuple):
    """The past use of one account.

    Args:
        share: Weighted average of the account's dominant share, the largest share of any resource;
            older use weighs less.
        step: Time of the average, in steps (`STEPS` per half-life) since the epoch.
    """

    share: float
    step: int


def demand_amounts(ask: Ask) -> Amounts:
    """Return the amounts that a request demands; zeros if only its policy knows the demand."""
    demand = ask.demand
    if demand is None:
        return (0, 0, 0)
    gpus = demand.gpus * demand.gpu_milli
    return tuple(demand.nodes * each for each in (gpus, demand.cpu_milli, demand.memory_mib))


def placement_amounts(placement: Placement) -> tuple[int, int, int]:
    """Return the GPU milli, CPU milli and memory MiB that a placement holds."""
    gpus = cpu = memory = 0
    for share in placement:
        gpus += len(share.gpus) * share.gpu_milli
        cpu += share.cpu_milli
        memory += share.memory_mib
    return gpus, cpu, memory


def capacity_of(cluster: Cluster | None) -> tuple[int, int, int]:
    """Return the capacity of a cluster by resource."""
    nodes = () if cluster is None else cluster.nodes
    counted = [node for node in nodes if not node.duplicate_of]
    gpus = sum(len(node.gpus) for node in counted)
    cpu, memory = (node.cpu_milli for node in counted), (node.memory_mib for node in counted)
    return gpus * GPU_MILLI, sum(cpu), sum(memory)


def accounts_of(tenant: Tenant, project: str) -> tuple[Account, Account]:
    """Return the accounts to which the amounts of a lease are added."""
    return (tenant, None), (tenant, project)


class Accounts:
    """The accounts of all tenants and projects, in columns.

    Attributes:
        version: Counts changes of held amounts and limits.
        falls: Counts changes that may leave more room in quotas.
        quotas: The quotas set by operators; (tenant, None) is the tenant as a whole.
        half_life: Half-life of past use, in seconds; 0: only present use counts.
    """

    def __init__(self) -> None:
        self.version = self.falls = 0
        self.quotas: dict[Account, Quota] = {}
        self.half_life = 0.0
        self._numbers: dict[Account, int] = {}
        self._names: list[Account] = []
        self._groups: dict[Tenant | None, int] = {}
        self._columns: dict[str, Column] = {
            "held": np.zeros((16, len(RESOURCES)), np.int64),
            "nominal": np.zeros((16, len(RESOURCES)), np.int64),
            "borrow": np.zeros((16, len(RESOURCES)), np.int64),
            "lend": np.zeros((16, len(RESOURCES)), np.int64),
            "weight": np.zeros(16, np.float64),
            "share": np.zeros(16, np.float64),
            "past": np.zeros(16, np.float64),
            "step": np.zeros(16, np.int64),
            "group": np.zeros(16, np.int64),
        }
        self._pool = np.zeros((16, len(RESOURCES)), np.int64)
        """Per group: the unused quota that members lend, less the amounts that members borrow."""
        self._totals = np.ones(len(RESOURCES), np.int64)
        self._capacity = np.zeros(len(RESOURCES), np.int64)
        self._outdated = False
        """Whether the capacity changed since all shares were computed."""
        self._stale: set[int] = set()
        """The accounts whose share must be computed again at the next read."""
        self._clock = 0
        self._uncounted: dict[tuple[Tenant, str], Amounts] = {}
        """Amounts that leases of a tenant and project took since the columns were last read. Most
        servers never read the columns, as they have no quotas and no waiting requests."""

    def __getitem__(self, name: str) -> Column:
        if self._uncounted:
            self._count()
        return self._columns[name]

    def number(self, account: Account) -> int:
        """Return an account's number: its fixed row in the columns."""
        if self._uncounted:
            self._count()
        number = self._numbers.get(account)
        if number is None:
            number = self._numbers[account] = len(self._names)
            self._names.append(account)
            for name, column in self._columns.items():
                if number >= len(column):
                    self._columns[name] = np.concatenate([column, np.zeros_like(column)])
            tenant, project = account
            group = self._groups.setdefault(None if project is None else tenant, len(self._groups))
            if group >= len(self._pool):
                self._pool = np.concatenate([self._pool, np.zeros_like(self._pool)])
            self["group"][number] = group
            self["step"][number] = self._clock
            self._limit(number)
            self._offer(number, 1)
        return number

    # Held amounts ----------------------------------------------------------------------------

    def add(self, lease: Lease, sign: int, at: float | None) -> None:
        """Count the amounts of a lease, or (`sign` -1) subtract them.

        Args:
            lease: The lease.
            sign: 1 or -1.
            at: Time of the change, in seconds since the epoch; None: the lease is from a
                checkpoint.
        """
        self.version += 1
        self.falls += sign < 0
        holder = lease.tenant, lease.terms.project
        if self.half_life:  # Past use depends on the time of each change.
            if at is not None:
                self._clock = max(self._clock, self._step(at))
            for number in map(self.number, accounts_of(*holder)):
                if at is not None:
                    self._remember(number)
        gpus, cpu, memory = placement_amounts(lease.placement)
        before = self._uncounted.get(holder, (0, 0, 0))
        self._uncounted[holder] = (
            before[0] + sign * gpus,
            before[1] + sign * cpu,
            before[2] + sign * memory,
        )

    def _count(self) -> None:
        """Add the amounts collected since the last call to the columns."""
        changes, self._uncounted = self._uncounted, {}
        for holder, change in changes.items():
            for account in accounts_of(*holder):
                number = self.number(account)
                if self.quotas:  # Without quotas, accounts lend nothing.
                    self._offer(number, -1)
                self._columns["held"][number] += np.array(change, np.int64)
                if self.quotas:
                    self._offer(number, 1)
                self._stale.add(number)

    def add_capacity(self, gpus: int, cpu: int, memory: int) -> None:
        """Add a change of the fleet's capacity: GPU milli, CPU milli, memory in MiB."""
        self._capacity += np.array([gpus, cpu, memory], np.int64)
        self._outdated = True
        self.version += 1

    def shares(self, numbers: Numbers) -> npt.NDArray[np.float64]:
        """Return the values by which the queue compares accounts: present share plus past use."""
        self._up_to_date()
        share = self["share"][numbers]
        if not self.half_life:
            return share
        decay = _decay(self._clock - self["step"][numbers])
        past: npt.NDArray[np.float64] = self["past"][numbers] * decay + share * (1.0 - decay)
        return share + past

    def share(self, account: Account) -> float:
        """Return exactly the value that `shares` returns for this account."""
        number = self.number(account)
        self._up_to_date()
        share = float(self["share"][number])
        if not self.half_life:
            return share
        many, rest = divmod(self._clock - int(self["step"][number]), STEPS)
        decay = math.ldexp(float(_HALVING[rest]), -many)
        return share + (float(self["past"][number]) * decay + share * (1.0 - decay))

    def _up_to_date(self) -> None:
        """Compute the outdated shares."""
        if self._uncounted:
            self._count()
        if self._outdated:
            self._outdated = False
            self._totals = np.maximum(self._capacity, 1)
            self._stale.update(range(len(self._names)))
        if self._stale:
            numbers = np.fromiter(self._stale, np.int64, len(self._stale))
            shares = (self["held"][numbers] / self._totals).max(axis=1)
            self["share"][numbers] = shares / self["weight"][numbers]
            self._stale.clear()

    # Past use --------------------------------------------------------------------------------

    def _step(self, at: float) -> int:
        return int(at * STEPS // self.half_life)

    def _remember(self, number: int) -> None:
        """Add an account's use until now to its past use."""
        if self.half_life:
            one = np.array([number], np.int64)
            self["past"][number] = (self.shares(one) - self["share"][one])[0]
            self["step"][number] = self._clock

    def set_half_life(self, seconds: float, at: float) -> None:
        """Set the seconds after which past use counts half as much; 0: past use does not count."""
        self._count()
        if self.half_life:
            self._clock = max(self._clock, self._step(at))
        for number in range(len(self._names)):
            self._remember(number)
        if not seconds:
            self["past"][:] = 0.0
        self.half_life = seconds
        self._clock = self._step(at) if seconds else 0
        self["step"][:] = self._clock
        self.version += 1

    def move_times(self, seconds: float) -> None:
        """Shift the times of past use by `seconds`."""
        if self.half_life:
            steps = round(seconds * STEPS / self.half_life)
            self._clock += steps
            self["step"][: len(self._names)] += steps

    def as_of(self) -> float:
        """Return the time up to which past use is computed, in seconds since the epoch."""
        return (self._clock + 0.5) * self.half_life / STEPS

    def past(self) -> Iterator[tuple[Account, Past]]:
        """Yield accounts with past use."""
        if self.half_life:
            self._up_to_date()
            for number, account in enumerate(self._names):
                past, step = float(self["past"][number]), int(self["step"][number])
                if past or self["share"][number]:
                    yield account, Past(past, step)

    def carry(self, account: Account, past: Past) -> None:
        """Restore the past use of an account."""
        number = self.number(account)
        self["past"][number], self["step"][number] = past
        self._clock = max(self._clock, past.step)
        self.version += 1

    # Quotas ----------------------------------------------------------------------------------

    def set_quota(self, account: Account, quota: Quota | None) -> None:
        """Set the quota of an account; None: the quota of `*` applies."""
        self._count()
        if quota is None:
            del self.quotas[account]
        else:
            self.quotas[account] = quota
        if account[0] == EVERYONE:
            known = [n for n, each in enumerate(self._names) if each not in self.quotas]
        else:
            known = [self.number(account)]
        for number in known:
            self._offer(number, -1)
            self._limit(number)
            self._offer(number, 1)
            self._stale.add(number)
        self.version += 1
        self.falls += 1

    def quota(self, account: Account) -> Quota | None:
        """Return the quota that applies to an account, its own or that of `*`."""
        own = self.quotas.get(account)
        return own if own or account[1] is not None else self.quotas.get((EVERYONE, None))

    def _limit(self, number: int) -> None:
        """Write an account's limits into the columns."""
        account = self._names[number]
        quota = self.quota(account)
        own = account in self.quotas
        self["weight"][number] = quota.weight if quota else 1.0
        for column, name in enumerate(RESOURCES):
            nominal = getattr(quota.nominal, name) if quota else None
            borrow = getattr(quota.borrow, name) if quota else None
            lend = getattr(quota.lend, name) if quota else None
            limited = nominal is not None
            self["nominal"][number, column] = nominal if limited else UNLIMITED
            self["borrow"][number, column] = borrow or 0
            # Without a limit, the amount to lend is unknown: lend nothing.
            given = 0 if not limited or not own else nominal if lend is None else lend
            self["lend"][number, column] = given

    def _offer(self, number: int, sign: int) -> None:
        """Add the quota that an account lends to its group, or (`sign` -1) remove it."""
        over = self["held"][number] - self["nominal"][number]
        spare = np.minimum(np.maximum(-over, 0), self["lend"][number])
        self._pool[self["group"][number]] += sign * (spare - np.maximum(over, 0))

    def room(self, numbers: Numbers, freed: Amounts | None = None) -> npt.NDArray[np.int64]:
        """Return the amounts that accounts may still hold: int64 `[accounts, resources]`.

        The amounts are the rest of the accounts' own quota, plus the unused quota that others of
        their group lend, up to their own limit on borrowing.

        Args:
            numbers: The accounts: int64 `[accounts]`.
            freed: The amounts that each account would give back first.
        """
        over = self["held"][numbers] - self["nominal"][numbers]
        spare = np.minimum(np.maximum(-over, 0), self["lend"][numbers])
        others = self._pool[self["group"][numbers]] - spare + np.maximum(over, 0)
        over = over - (0 if freed is None else np.array(freed, np.int64))
        own, borrowed = np.maximum(-over, 0), np.maximum(over, 0)
        room: npt.NDArray[np.int64] = own + np.minimum(
            np.maximum(self["borrow"][numbers] - borrowed, 0), np.maximum(others - borrowed, 0)
        )
        return room

    def over(
        self, numbers: Numbers, wanted: Iterable[Numbers], reserved: Numbers
    ) -> npt.NDArray[np.bool_]:
        """Return which accounts lack room for the wanted amounts: bool `[accounts]`.

        Args:
            numbers: The accounts: int64 `[accounts]`.
            wanted: The wanted amounts, by resource: int64 `[accounts]`.
            reserved: Room reserved for other requests: int64 `[accounts, resources]`.
        """
        room = self.room(numbers) - reserved
        short = np.zeros(len(numbers), np.bool_)
        for column, amount in enumerate(wanted):
            short |= (amount > room[:, column]) & (amount > 0)
        return short

    # Listings --------------------------------------------------------------------------------

    def row(self, account: Account) -> dict[str, dict[str, int | None]]:
        """Return use, limit and borrowed amount of an account, by resource; None: no limit."""
        number = self.number(account)
        one = np.array([number], np.int64)
        room = self.room(one)[0]
        rows: dict[str, dict[str, int | None]] = {}
        for column, name in enumerate(RESOURCES):
            used, nominal = int(self["held"][number, column]), int(self["nominal"][number, column])
            limited = nominal < UNLIMITED
            rows[name] = {
                "used": used,
                "quota": nominal if limited else None,
                "borrowed": max(0, used - nominal),
                "borrow_max": int(self["borrow"][number, column]) if limited else None,
                "room": int(room[column]) if limited else None,
            }
        return rows

    def own_room(self, account: Account) -> Amounts:
        """Return the amounts of its own quota that an account may still hold."""
        number = self.number(account)
        return tuple((self["nominal"][number] - self["held"][number]).tolist())

    def borrowed_amounts(self, account: Account) -> Amounts:
        """Return the amounts that an account holds beyond its own quota."""
        return tuple(max(0, -room) for room in self.own_room(account))

    def amounts(self, account: Account) -> Amounts:
        """Return the amounts that an account holds."""
        return tuple(self["held"][self.number(account)].tolist())

    def usages(self) -> dict[Account, Amounts]:
        """Return the amounts that each account holds, without accounts that hold nothing."""
        self._count()
        rows = ((name, self["held"][n]) for n, name in enumerate(self._names))
        return {name: tuple(row.tolist()) for name, row in rows if row.any()}


def _decay(steps: Numbers) -> npt.NDArray[np.float64]:
    """Return the weight of past use by its age in steps."""
    decay: npt.NDArray[np.float64] = np.ldexp(_HALVING[steps % STEPS], -(steps // STEPS))
    return decay
