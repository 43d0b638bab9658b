"""The time that is given to what ran out while the daemon heard no client."""

from dataclasses import dataclass

__all__ = ["Grace"]


@dataclass(frozen=True, slots=True)
class Grace:
    """Says until when something lasts at least, once the daemon runs again.

    Args:
        now: When it does, in seconds since the epoch.
        seconds: For how long it did not.
        grace_seconds: What those have at least whose time ran out meanwhile. Others have as long
            as the daemon stood still: their holders may have lost some of it.

    """

    now: float
    seconds: float
    grace_seconds: float

    def until(self, due: float) -> float:
        """Return until when something lasts that was due at a time, in seconds since the epoch."""
        least = self.grace_seconds if due <= self.now else min(self.seconds, self.grace_seconds)
        return max(due, self.now + least)
