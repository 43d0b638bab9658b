"""Selects which tenant's entry is forgotten first when too many are stored.

The first is the oldest entry of the tenant with most entries, so a tenant cannot displace entries
of a tenant with fewer. `State` uses this class for ended leases, `TurnWriter` for decisions,
`daemon.history` for refusals.
"""

from collections import OrderedDict
from typing import Generic, TypeVar

from moorage.model import Tenant

T = TypeVar("T")


class TenantMemory(Generic[T]):
    """The names of stored values, by tenant."""

    def __init__(self) -> None:
        # A plain `dict` skips the slots of all deleted keys to find its oldest key.
        self._of: dict[Tenant, OrderedDict[T, None]] = {}
        self._holding: dict[int, dict[Tenant, None]] = {}
        """The tenants by the number of their values."""
        self._most = 0

    def add(self, tenant: Tenant, name: T) -> None:
        """Add a name of a tenant; a known name becomes the newest again."""
        its = self._of.get(tenant)
        if its is None:
            its = self._of[tenant] = OrderedDict()
        if name in its:
            its.move_to_end(name)
            return
        its[name] = None
        self._count(tenant, len(its) - 1, len(its))
        self._most = max(self._most, len(its))

    def forget(self) -> T:
        """Remove and return the oldest name of the tenant with most names."""
        tenant = min(self._holding[self._most])  # `min` gives the same tenant after a restart.
        its = self._of[tenant]
        oldest = next(iter(its))
        del its[oldest]
        self._count(tenant, len(its) + 1, len(its))
        if not its:
            del self._of[tenant]
        while self._most and self._most not in self._holding:
            self._most -= 1
        return oldest

    def _count(self, tenant: Tenant, before: int, now: int) -> None:
        if before:
            del self._holding[before][tenant]
            if not self._holding[before]:
                del self._holding[before]
        if now:
            self._holding.setdefault(now, {})[tenant] = None
