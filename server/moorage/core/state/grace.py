"""The grace after a stall: time for clients to renew what ran out meanwhile."""

__all__ = ["Grace"]
import msgspec


class Grace(msgspec.Struct, frozen=True, gc=False):
    """Computes new deadlines after a stall.

    Args:
        now: The end of the stall, in seconds since the epoch.
        seconds: Its length.
        grace_seconds: Time left, at least, for what ran out meanwhile. Anything else has the length
            of the stall, at most this: its holder may have tried to renew it in vain.

    """

    now: float
    seconds: float
    grace_seconds: float

    def until(self, due: float) -> float:
        """Return the new deadline for an old one, in seconds since the epoch."""
        least = self.grace_seconds if due <= self.now else min(self.seconds, self.grace_seconds)
        return max(due, self.now + least)
