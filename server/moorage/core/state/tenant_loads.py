"""Limits that one tenant cannot use up alone, and counts of requests against a limit.

`State` counts those that wait, `core.queue.open_requests` those that are being decided.
"""

from typing import Final

from moorage.model import Ask, Tenant

OVERFLOW_SHARE: Final = 4
"""Extra part of a limit, beyond the full limit, for tenants that use little."""
TENANT_SHARE: Final = 8
"""Part of a limit up to which a tenant counts as using little."""


class TenantLoads:
    """The number of requests per tenant, and the bytes of their JSON."""

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
        """Return whether the limits have room for one more request; see `fits`."""
        count, size = self._of.get(ask.tenant, (0, 0))
        return fits(self.count + 1, count + 1, count_max) and fits(
            self.bytes + ask.size, size + ask.size, bytes_max
        )


def fits(whole: int, own: int, most: int) -> bool:
    """Return whether a limit has room; a large tenant cannot use the extra part of small ones.

    Args:
        whole: The sum over all tenants, including the new one.
        own: The sum of its tenant, including the new one.
        most: The limit.
    """
    spare = own <= most // TENANT_SHARE and whole <= most + most // OVERFLOW_SHARE
    return whole <= most or spare
