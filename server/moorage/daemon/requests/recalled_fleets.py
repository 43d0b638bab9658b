"""The fleet as it was when a request was decided, made again of the ledger's facts.

The console's playground asks for it. A ledger whose first facts were pruned can tell no more.
"""

import asyncio
from typing import Any, Final

from moorage.core.facts import Fact, Granted, Queued
from moorage.core.state import State, apply
from moorage.ledger.base import Ledger, LedgerError
from moorage.model import Ask, Code, Lease, Tenant
from moorage.protocol.faults import ServiceError

FACTS_MAX: Final = 200_000
"""Facts that are applied again for one answer."""


class RecalledFleets:
    """Makes fleets of facts.

    Args:
        ledger: Has them.

    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    async def before(self, request: str, tenant: Tenant) -> dict[str, Any]:
        """Return the clusters as they were when a request was decided, and what was held there.

        Raises:
            ServiceError: `unknown_request`, `unavailable`.

        """
        try:
            seq, _ = await self.decided(request, tenant)
            state = await self._state(seq)
        except LedgerError as error:
            raise ServiceError(Code.UNAVAILABLE, f"the ledger cannot be read: {error}") from error
        leases = state.leases.values()
        return {
            "clusters": [state.offered(each) for each in state.clusters.values()],
            "held": [share for lease in leases for share in lease.placement],
        }

    async def decided(self, request: str, tenant: Tenant) -> tuple[int, Ask | Lease]:
        """Return the place of a request's first decision in the ledger, and what was decided.

        Raises:
            LedgerError: It cannot be read.
            ServiceError: `unknown_request`.

        """
        for entry in await self._ledger.history(request):
            found = _subject(entry.fact)
            if found is not None and found.tenant == tenant:
                return entry.seq, found
        reason = f"the ledger has no decision about {request} of yours; refusals are not kept there"
        raise ServiceError(Code.UNKNOWN_REQUEST, reason, field="request")

    async def _state(self, seq: int) -> State:
        if seq > FACTS_MAX or await self._ledger.kept_since() is not None:
            reason = (
                f"the fleet of then cannot be made again: that takes all facts before "
                f"it, {FACTS_MAX} at most, and none may be pruned"
            )
            raise ServiceError(Code.UNAVAILABLE, reason)
        state, after = State(), 0
        while after < seq - 1:
            page = await self._ledger.read(after)
            for entry in page:
                if entry.seq < seq:
                    apply(state, entry.fact)
            after = page[-1].seq if page else seq
            await asyncio.sleep(0)
        return state


def _subject(fact: Fact) -> Ask | Lease | None:
    match fact:
        case Queued(ask):
            return ask
        case Granted(lease):
            return lease
        case _:  # It decides about no request.
            return None
