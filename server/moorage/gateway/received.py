"""Limits the bytes of incomplete messages: of all tenants together, and of each tenant.

Every connection reports how much it holds of an incomplete message. If the tenant holds too much,
its incomplete messages are read no further until others are complete or gone.
"""

from collections import Counter
from typing import Final, Protocol

RECEIVED_BYTES_MAX: Final = 128 * 1024 * 1024
"""Maximum bytes of incomplete messages; one tenant may use three quarters of it. Beyond it, such
messages are read no further until there is room.
"""
PART_BYTES_MIN: Final = 64 * 1024
"""Messages below this size are not counted: they are read at once."""


class Receiver(Protocol):
    """A connection that receives messages."""

    def hold_back(self) -> None:
        """Stop reading until `go_on`."""

    def go_on(self) -> None:
        """Continue to read."""


class Received:
    """Bytes of incomplete messages, by connection and by tenant.

    One connection of each tenant is always read, so that it makes room for the others.
    """

    def __init__(self, most: int = RECEIVED_BYTES_MAX) -> None:
        self._most = most
        self._held: dict[Receiver, tuple[str, int]] = {}
        self._bytes_of: Counter[str] = Counter()
        self._read_of: Counter[str] = Counter()
        self._waiting: dict[Receiver, None] = {}

    def note(self, receiver: Receiver, tenant: str, count: int) -> None:
        """Set how many bytes of messages a connection holds; 0 once it is gone."""
        count = 0 if count < PART_BYTES_MIN else count
        _, before = self._held.pop(receiver, (tenant, 0))
        self._bytes_of[tenant] += count - before
        if receiver not in self._waiting:
            self._read_of[tenant] += (count > 0) - (before > 0)
        elif not count:
            del self._waiting[receiver]
        if count:
            self._held[receiver] = tenant, count
            if count > before and receiver not in self._waiting and not self._may_go_on(tenant, 1):
                self._waiting[receiver] = None
                self._read_of[tenant] -= 1
                receiver.hold_back()
        if count < before:
            self._wake()

    def _may_go_on(self, tenant: str, others: int) -> bool:
        held = (
            self._bytes_of[tenant] <= self._most * 3 // 4 and self._bytes_of.total() <= self._most
        )
        return held or self._read_of[tenant] <= others

    def _wake(self) -> None:
        for receiver in list(self._waiting):
            tenant, _ = self._held[receiver]
            if self._may_go_on(tenant, 0):
                del self._waiting[receiver]
                self._read_of[tenant] += 1
                receiver.go_on()
        self._bytes_of += Counter()  # Drops counts of 0.
        self._read_of += Counter()
