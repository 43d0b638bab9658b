"""Limits that one tenant cannot use up alone, and counts of requests against a limit.

`State` counts the requests that wait, `core.queue.open_requests` the requests being decided.
"""

from typing import Final

from moorage.model import Ask, Tenant

OVERFLOW_SHARE: Final = 4
"""Tenants that use little may exceed a limit together, by the limit divided by this number."""
TENANT_SHARE: Final = 8
"""A tenant uses little if it holds at most the limit divided by this number."""


class TenantLoads:
    """The number of requests per tenant, and the bytes of their JSON."""

    def __init__(self) -> None:
        self.count = 0
        self.bytes = 0
        self._of: dict[Tenant, tuple[int, int]] = {}

    def add(self, ask: Ask) -> None:
        """Count a request for its tenant."""
        count, size = self._of.get(ask.tenant, (0, 0))
        self._of[ask.tenant] = count + 1, size + ask.size
        self.count += 1
        self.bytes += ask.size

    def remove(self, ask: Ask) -> None:
        """Stop counting a request for its tenant."""
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
    """Return whether a limit has room; only tenants that use little may exceed the limit.

    Args:
        whole: The sum over all tenants, the new request included.
        own: The sum of the new request's tenant, the new request included.
        most: The limit.
    """
    spare = own <= most // TENANT_SHARE and whole <= most + most // OVERFLOW_SHARE
    return whole <= most or spare
