"""Bounds that no tenant uses up for others, and requests counted against one.

`State` counts those that wait, `core.queue.open_requests` those that are being decided.
"""

from typing import Final

from moorage.model import Ask, Tenant

OVERFLOW_SHARE: Final = 4
"""A full bound has a fourth more, for tenants that hold little."""
TENANT_SHARE: Final = 8
"""A tenant holds little up to an eighth of the bound."""


class TenantLoads:
    """The number of requests of each tenant, and the bytes of their JSON."""

    def __init__(self) -> None:
        self.count = 0
        self.bytes = 0
        self._of: dict[Tenant, tuple[int, int]] = {}

    def add(self, ask: Ask) -> None:
        """Count a request."""
        count, size = self._of.get(ask.tenant, (0, 0))
        self._of[ask.tenant] = count + 1, size + ask.size
        self.count += 1
        self.bytes += ask.size

    def remove(self, ask: Ask) -> None:
        """Stop counting a request."""
        count, size = self._of.pop(ask.tenant)
        if count > 1:
            self._of[ask.tenant] = count - 1, size - ask.size
        self.count -= 1
        self.bytes -= ask.size

    def has_room(self, ask: Ask, count_max: int, bytes_max: int) -> bool:
        """Return whether one more request may enter; see `fits`."""
        count, size = self._of.get(ask.tenant, (0, 0))
        return fits(self.count + 1, count + 1, count_max) and fits(
            self.bytes + ask.size, size + ask.size, bytes_max
        )


def fits(whole: int, own: int, most: int) -> bool:
    """Return whether a bound has room; a tenant cannot use up the part of small tenants.

    Args:
        whole: The sum over all tenants, with the new one.
        own: The same of the tenant that it is of.
        most: The bound.
    """
    spare = own <= most // TENANT_SHARE and whole <= most + most // OVERFLOW_SHARE
    return whole <= most or spare
