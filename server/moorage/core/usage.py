"""What each tenant holds, and where capacity grew: kept, so that neither is summed up again.

`State` keeps both as it applies facts. The queue reads them: whose turn it is, and who may be
served now that could not be before.
"""

from collections.abc import Iterable
from typing import Final

import numpy as np
import numpy.typing as npt

from moorage.model import ClusterId, Lease, Tenant

PLACES_MAX: Final = 64
"""Places that are remembered one by one; of more, all count as grown."""

GrownPlace = tuple[str, str]
"""A cluster and a node of it; an empty node stands for all of the cluster."""


class TenantUsage:
    """GPU milli that each tenant holds, in a column.

    Attributes:
        held: int64 `[tenants]`, by the tenant's number.
        version: Counts the changes of what anybody holds.

    """

    def __init__(self) -> None:
        self.held: npt.NDArray[np.int64] = np.zeros(16, np.int64)
        self.version = 0
        self._numbers: dict[Tenant, int] = {}

    def number(self, tenant: Tenant) -> int:
        """Return the tenant's number: its place in the column, for good."""
        number = self._numbers.setdefault(tenant, len(self._numbers))
        if number >= len(self.held):
            self.held = np.concatenate([self.held, np.zeros_like(self.held)])
        return number

    def of(self, tenant: Tenant) -> int:
        """Return the GPU milli that a tenant holds."""
        number = self.number(tenant)
        return int(self.held[number])

    def add(self, lease: Lease, sign: int) -> None:
        """Count what a lease holds, or (`sign` -1) no longer."""
        milli = sum(len(share.gpus) * share.gpu_milli for share in lease.placement)
        number = self.number(lease.tenant)
        self.held[number] += sign * milli
        self.version += 1

    def by_tenant(self) -> dict[Tenant, int]:
        """Return what each tenant holds, less those that hold nothing."""
        return {name: int(self.held[n]) for name, n in self._numbers.items() if self.held[n]}


class Growth:
    """Where capacity grew, or began to give way, since it was last noted."""

    def __init__(self) -> None:
        self._places: dict[GrownPlace, None] = {}
        self._everywhere = False

    def note(self, places: Iterable[GrownPlace]) -> None:
        """Add places."""
        if self._everywhere:
            return
        self._places.update(dict.fromkeys(places))
        if len(self._places) > PLACES_MAX:
            self._everywhere = True

    def note_cluster(self, cluster: ClusterId) -> None:
        """Add a whole cluster."""
        self.note([(cluster, "")])

    def take(self) -> list[GrownPlace] | None:
        """Return the places and forget them; None means everywhere."""
        places = None if self._everywhere else list(self._places)
        self._places, self._everywhere = {}, False
        return places
