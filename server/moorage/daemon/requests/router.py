"""The daemon's side of both front doors: each message goes where its kind is seen to."""

from collections.abc import Sequence

from moorage.core.effects import Address
from moorage.daemon.blocks.placement import BlockPlacement
from moorage.daemon.requests.admission import Admission
from moorage.daemon.requests.operations import Operations
from moorage.daemon.requests.replies import Replies
from moorage.daemon.tasks import Tasks
from moorage.gateway.deliver import Request, Taking
from moorage.model import SessionId, Tenant
from moorage.protocol.messages import AllocationRequest, BlockRequest


class Router:
    """See `gateway.deliver.Deliver`; `POST /allocate` comes here, too.

    Args:
        admission: Takes requests for a placement.
        operations: Does what operations say.
        blocks: Finds places for blocks.
        replies: Where all of them answer.
        tasks: Learns of a defect.

    """

    def __init__(
        self,
        admission: Admission,
        operations: Operations,
        blocks: BlockPlacement,
        replies: Replies,
        tasks: Tasks,
    ) -> None:
        self._admission = admission
        self._operations = operations
        self._blocks = blocks
        self._replies = replies
        self.failed = tasks.fail

    def opened(self, session: SessionId, tenant: Tenant) -> None:
        """Note that a session exists."""
        del tenant  # Every request brings it along.
        self._replies.opened(session)

    def lost(self, session: SessionId, tenant: Tenant) -> None:
        """Note that a session is over."""
        self._replies.lost(session)
        self._operations.lost(session, tenant)

    def request(
        self, to: Address, tenant: Tenant, message: Request, warnings: Sequence[str] = ()
    ) -> Taking:
        """Take a request; it is answered at `to`, now or later."""
        if isinstance(message, AllocationRequest):
            return self._admission.request(to, tenant, message, warnings)
        if isinstance(message, BlockRequest):
            # The gateway keeps the order of the replies.
            self._replies.send_later(to, self._blocks.answer(tenant, message, warnings))
        else:
            self._operations.take(to, tenant, message)
        return None
