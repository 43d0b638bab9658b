"""Requests that are held for tenants, counted against a bound that no tenant uses up for others.

`State` counts those that wait, `core.queue.open_requests` those that are being decided.
"""

from typing import Final

from moorage.model import Ask, Tenant

__all__ = ["OVERFLOW_SHARE", "TENANT_SHARE", "TenantLoads"]

OVERFLOW_SHARE: Final = 4
"""Beyond a bound there is room for one part more in so many, for tenants that hold little."""
TENANT_SHARE: Final = 8
"""Little is less than one part of the bound in so many."""


class TenantLoads:
    """How many requests tenants have here, and how many bytes of JSON these bring along."""

    def __init__(self) -> None:
        self.many = 0
        self.bytes = 0
        self._of: dict[Tenant, tuple[int, int]] = {}

    def add(self, ask: Ask) -> None:
        """Count a request."""
        many, size = self._of.get(ask.tenant, (0, 0))
        self._of[ask.tenant] = many + 1, size + ask.size
        self.many += 1
        self.bytes += ask.size

    def remove(self, ask: Ask) -> None:
        """Count a request no longer."""
        many, size = self._of.pop(ask.tenant)
        if many > 1:
            self._of[ask.tenant] = many - 1, size - ask.size
        self.many -= 1
        self.bytes -= ask.size

    def has_room(self, ask: Ask, many_max: int, bytes_max: int) -> bool:
        """Return whether one more may come in.

        Where a bound is reached, there is a part more for tenants that hold little: so one tenant,
        whatever it sends, leaves room for others.
        """
        many, size = self._of.get(ask.tenant, (0, 0))
        return _fits(self.many + 1, many + 1, many_max) and _fits(
            self.bytes + ask.size, size + ask.size, bytes_max
        )


def _fits(whole: int, own: int, most: int) -> bool:
    spare = own <= most // TENANT_SHARE and whole <= most + most // OVERFLOW_SHARE
    return whole <= most or spare
