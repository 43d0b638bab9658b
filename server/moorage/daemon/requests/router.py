"""Routes each message from both ports to the part that handles its kind."""

import asyncio
from collections.abc import Sequence
from typing import Final

from moorage.core.state.facts import Refusal
from moorage.core.turns.effects import Address
from moorage.daemon.access.audit_log import AuditLog
from moorage.daemon.access.rates import EVALUATIONS, REQUESTS, TenantRates
from moorage.daemon.access.rights import RIGHT_OF, refusal
from moorage.daemon.answers import encode
from moorage.daemon.blocks.placement import BlockPlacement
from moorage.daemon.requests.admission import Admission
from moorage.daemon.requests.operations import Operations
from moorage.daemon.requests.replies import Replies
from moorage.gateway.deliver import Request, Taking
from moorage.model import SessionId, Tenant
from moorage.protocol.messages import AllocationRequest, BlockRequest
from moorage.records.rights import Caller, Right

PAUSE_SECONDS_MAX: Final = 1.0
"""Maximum seconds for which a session is not read after its requests exceeded the rate."""


class Router:
    """Routes messages of the WebSocket and of `POST /allocate`; implements `Deliver`.

    Args:
        audit: Records requests that were refused for lack of a right.
        rates: Refuses a tenant's requests beyond its rate of messages or processor time.
    """

    def __init__(
        self,
        admission: Admission,
        operations: Operations,
        blocks: BlockPlacement,
        replies: Replies,
        audit: AuditLog,
        rates: TenantRates,
    ) -> None:
        self._admission = admission
        self._operations = operations
        self._blocks = blocks
        self._replies = replies
        self._audit = audit
        self._rates = rates
        self.fail = replies.fail

    def open_session(self, session: SessionId, caller: Caller) -> None:
        """Record that a session has begun."""
        del caller  # Every request names its caller.
        self._replies.open_session(session)

    def drop_session(self, session: SessionId, caller: Caller) -> None:
        """Record that a session has ended."""
        self._replies.drop_session(session)
        self._operations.drop_session(session, caller.tenant)

    def leave(self, to: Address, caller: Caller) -> None:
        """Handle the disconnection of an HTTP caller as the end of a session."""
        self._replies.leave(to)
        self._operations.leave(to, caller.tenant)

    def request(
        self, to: Address, caller: Caller, message: Request, warnings: Sequence[str] = ()
    ) -> Taking:
        """Handle a request; the answer goes to `to`, now or later."""
        if (no := refusal(caller, message)) is not None:
            what = str(message.__struct_config__.tag or "allocate")
            self._audit.note_refusal(caller, self._replies.remote(to), what, no.reason)
            self._replies.send_later(to, self._note_answer(encode(no, message_id=message.id)))
        elif (surplus := self._surplus(caller.tenant, message)) is not None:
            setting, no = surplus
            self._audit.note_surplus(caller.tenant, self._replies.remote(to), setting)
            self._replies.send(to, encode(no, message_id=message.id))
            pause = min(PAUSE_SECONDS_MAX, no.details["retry_after_seconds"])
            # A future, since the gateway reads on while a coroutine of a message with `id` runs.
            return asyncio.ensure_future(asyncio.sleep(pause))
        elif isinstance(message, AllocationRequest):
            return self._admission.request(to, caller.tenant, message, warnings)
        elif isinstance(message, BlockRequest):
            # The gateway keeps the order of the replies.
            self._replies.send_later(to, self._blocks.answer(caller.tenant, message, warnings))
        else:
            self._operations.take(to, caller, message)
        return None

    def _surplus(self, tenant: Tenant, message: Request) -> tuple[str, Refusal] | None:
        """If a message exceeds a limit of its tenant, return the limit's name and the refusal."""
        rates = self._rates
        if RIGHT_OF[type(message)] is not Right.LEASE:  # No rate may cost a client its lease.
            no = rates.refusal(tenant)
            if no is not None:
                return REQUESTS, no
            if rates.evaluations is not None and isinstance(message, AllocationRequest):
                no = rates.evaluations.refusal(tenant)
                if no is not None:
                    return EVALUATIONS, no
        return None

    async def _note_answer(self, answer: bytes) -> bytes:
        """Return an answer once the audit log has its entry."""
        await self._audit.flush()
        return answer
