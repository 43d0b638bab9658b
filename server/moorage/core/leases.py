"""What happens to a lease after its grant: renewal, release, expiry, and its engine's word.

The allocator is the only caller.
"""

from collections.abc import Callable

from moorage.core.desk import Desk
from moorage.core.words import (
    Address,
    Ended,
    Ending,
    LeaseNews,
    Refusal,
    Renewed,
    Start,
    Started,
    Stop,
)
from moorage.model import Code, Lease, RequestId


class Leases:
    """The clerk for leases.

    Args:
        desk: What the turn is written on.
        wake: Called when capacity was freed.

    """

    def __init__(self, desk: Desk, wake: Callable[[], None]) -> None:
        self._desk = desk
        self._wake = wake

    def release(self, to: Address, request: RequestId, token: str) -> None:
        """End a lease for its owner. A second release answers the same."""
        lease = self._owned(to, request, token)
        if lease is None:
            return
        if lease.state not in {"ending", "ended"}:
            self.end(lease, "released")
            lease = self._desk.state.lease(request) or lease
        self._desk.tell(to, LeaseNews(lease))

    def renew(self, to: Address, request: RequestId, token: str, ttl_seconds: float | None) -> None:
        """Let a lease last `ttl_seconds` (its own by default) from now."""
        lease = self._owned(to, request, token)
        if lease is None:
            return
        if lease.state in {"ending", "ended"}:
            reason = f"Lease {request} is over: {lease.reason}."
            expected = "a lease that still holds"
            self._desk.tell(to, Refusal(Code.LEASE_ENDED, reason, "lease", expected))
            return
        ttl = lease.terms.ttl_seconds if ttl_seconds is None else ttl_seconds
        self._desk.be(Renewed(request, self._desk.now + ttl))
        self._desk.tell(to, LeaseNews(self._desk.state.leases[request]))

    def end(self, lease: Lease, reason: str) -> None:
        """End a lease: at once, or when its engine says that nothing of it is left."""
        if lease.provision is None:
            self._desk.be(Ended(lease.id, self._desk.now, reason))
            self._wake()
        else:
            self._desk.be(Ending(lease.id, self._desk.now, reason))
            self._desk.do(Stop(lease))

    def started(self, request: RequestId, endpoint: str) -> None:
        """Note that the workload of a lease runs."""
        lease = self._desk.state.leases.get(request)
        if lease is not None and lease.state == "starting":
            self._desk.be(Started(request, self._desk.now, endpoint))

    def over(self, request: RequestId, reason: str) -> None:
        """Note that the workload of a lease ended by itself, and have the rest of it put away."""
        lease = self._desk.state.leases.get(request)
        if lease is not None and lease.provision is not None and lease.state != "ending":
            self.end(lease, reason)

    def gone(self, request: RequestId, reason: str) -> None:
        """Note that nothing is left of the workload of a lease: only now is it free."""
        lease = self._desk.state.leases.get(request)
        if lease is not None and lease.provision is not None:
            self._desk.be(Ended(request, self._desk.now, lease.reason or reason))
            self._wake()

    def restarted(self, grace_seconds: float) -> None:
        """Give leases time to be renewed, and engines their orders again."""
        until = self._desk.now + grace_seconds
        for lease in list(self._desk.state.leases.values()):
            if lease.state != "ending" and lease.expires_at < until:
                self._desk.be(Renewed(lease.id, until))
            if lease.provision is not None:
                self._desk.do(Stop(lease) if lease.state == "ending" else Start(lease))

    def _owned(self, to: Address, request: RequestId, token: str) -> Lease | None:
        """Return the lease, or answer why it is not the caller's."""
        lease = self._desk.state.lease(request)
        if lease is None:
            reason = f"There is no lease {request}, or it ended long ago."
            self._desk.tell(to, Refusal(Code.UNKNOWN_LEASE, reason, "lease", "the id of a lease"))
        elif lease.token != token:
            reason = f"This is not the token of lease {request}."
            expected = "the `token` that came with the grant"
            self._desk.tell(to, Refusal(Code.WRONG_TOKEN, reason, "token", expected))
            return None
        return lease
