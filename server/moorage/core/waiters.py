"""One place in the queue. `core.state` keeps them, the queue puts them in order."""

from dataclasses import dataclass

from moorage.model import Ask, Lease

__all__ = ["Waiter"]


@dataclass(frozen=True, slots=True)
class Waiter:
    """An ask that waits, or a lease that waits for another place.

    Args:
        ask: What for.
        at: Since when; of a lease, when it was first asked for.
        deadline: Until when; of a lease, when it ends unless it is renewed.
        lease: The lease, which holds nothing meanwhile; None for an ask that has none.

    """

    ask: Ask
    at: float
    deadline: float
    lease: Lease | None = None

    @property
    def pauses(self) -> bool:
        """Whether it is not tried now, whatever is free."""
        return self.lease is not None and self.lease.retry_at > 0

    @property
    def due(self) -> float:
        """When something happens to it unless something else does before."""
        if self.lease is None or not self.pauses:
            return self.deadline
        return min(self.deadline, self.lease.retry_at)
