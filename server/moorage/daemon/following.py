"""The followed state of a standby: applies the leader's facts, and answers reads from them.

`daemon.start` makes a `Follower` while another server leads.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Final

import structlog
from prometheus_client.metrics_core import Metric

from moorage.catalog.embedded.following import FollowedRecords
from moorage.catalog.ports import Catalog
from moorage.core.allocator import Allocator
from moorage.core.state.facts import Fact
from moorage.core.turns.effects import Recall, Respond
from moorage.core.turns.events import Event, Inquired
from moorage.daemon.history import recall
from moorage.daemon.inbox import Inbox
from moorage.daemon.observability.counters import gauge
from moorage.daemon.requests.replies import Replies
from moorage.ledger.base import LedgerFailed
from moorage.ledger.following import FollowedLedger
from moorage.model import Tenant
from moorage.protocol.faults import ServiceError

POLL_SECONDS: Final = 0.05
"""Seconds between two checks for facts, if the last check found none."""
BUSY_POLL_SECONDS: Final = 0.02
"""Seconds between two checks for facts, if the last check found some."""
CATALOG_SECONDS: Final = 0.25
"""Seconds between two checks for changed documents."""
RETRY_SECONDS: Final = 0.5
"""Seconds between two attempts to reach the database."""
AGE_SECONDS_MAX: Final = 30.0
"""Greatest age of an answer in seconds; clients that need newer data ask the leader."""
WAIT_SECONDS_MAX: Final = 5.0
"""Seconds that a read waits for the facts that it must reflect."""
log = structlog.get_logger("moored")


@dataclass(frozen=True, slots=True)
class Applied:
    """The state that a standby has applied; when the standby leads, it continues with this state.

    Args:
        ledger: The standby's ledger, with the position up to which facts are applied.
        closing: Releases all resources of this state.
    """

    ledger: FollowedLedger
    allocator: Allocator
    catalog: Catalog
    closing: AsyncExitStack


class Follower:
    """Applies the facts that the leader stores to this standby's state.

    Args:
        ledger: The loaded ledger.
        loaded_at: The time at which loading began, in seconds since the epoch.

    Attributes:
        as_of: Time up to which all facts are known, in seconds since the epoch.
        documents_as_of: Time up to which all documents are known.
    """

    def __init__(
        self,
        ledger: FollowedLedger,
        allocator: Allocator,
        catalog: FollowedRecords,
        loaded_at: float,
    ) -> None:
        self.as_of = self.documents_as_of = loaded_at
        self._ledger = ledger
        self._allocator = allocator
        self._catalog = catalog
        self._looked = time.monotonic()
        self._grown = asyncio.Event()

    @property
    def revision(self) -> int:
        """The number of the last applied fact."""
        return self._ledger.last_seq

    @property
    def known_at(self) -> float:
        """When this standby last knew all facts, by the monotonic clock in seconds."""
        return self._looked

    @property
    def is_fresh(self) -> bool:
        """Whether the state is recent enough to answer reads."""
        return time.monotonic() - self._looked <= AGE_SECONDS_MAX

    async def has(self, revision: int) -> bool:
        """Wait for a fact, for a bounded time; return whether it was applied."""
        try:
            async with asyncio.timeout(WAIT_SECONDS_MAX):
                while self.revision < revision:
                    await self._grown.wait()
        except TimeoutError:
            return False
        return True

    async def run(self, durable: Callable[[Sequence[Fact]], None]) -> None:
        """Apply new facts until cancelled.

        Args:
            durable: Called with all facts that were applied.

        Raises:
            LedgerError: The stored facts do not continue the applied ones, or this release cannot
                read them.
        """

        def take(facts: Sequence[Fact]) -> None:
            self._allocator.follow(facts)
            durable(facts)

        finding = ""
        while True:
            at, looked, before = time.time(), time.monotonic(), self.revision
            pause = RETRY_SECONDS
            try:
                is_all = await self._ledger.follow(take)
            except LedgerFailed as error:
                if str(error) != finding:
                    finding = str(error)
                    log.warning("standby_read_failed", finding=finding)
            else:
                finding, pause = "", POLL_SECONDS
                if is_all:
                    self.as_of, self._looked = at, looked
                if self.revision > before:
                    pause = BUSY_POLL_SECONDS if is_all else 0.0
                    self._grown.set()
                    self._grown = asyncio.Event()
            await asyncio.sleep(pause)

    async def run_catalog(self) -> None:
        """Load the documents that the leader changed, again and again, until cancelled."""
        finding = ""
        while True:
            at = time.time()
            try:
                await self._catalog.refresh()
            except ServiceError as error:
                if error.reason != finding:
                    finding = error.reason
                    log.warning("standby_read_failed", finding=finding)
            else:
                finding, self.documents_as_of = "", at
            await asyncio.sleep(CATALOG_SECONDS)

    def gauges(self) -> Iterable[Metric]:
        """Yield the number of applied facts."""
        yield gauge("moorage_standby_revision", "Facts that a standby has applied", self.revision)


class Reads(Inbox):
    """Answers read requests at once; on a standby, other events have no effect.

    Args:
        ledger: The ledger, which has the facts that the allocator has forgotten.
        replies: Returns where answers go.
    """

    def __init__(
        self, allocator: Allocator, ledger: FollowedLedger, replies: Callable[[], Replies]
    ) -> None:
        super().__init__()
        self._allocator = allocator
        self._ledger = ledger
        self._replies = replies

    def post(self, event: Event, tenant: Tenant | None = None) -> None:
        """Answer a read at once; ignore any other event."""
        del tenant
        if not isinstance(event, Inquired):
            return
        replies = self._replies()
        for effect in self._allocator.read(event, time.time()).effects:
            if isinstance(effect, Respond):
                replies.answer(effect.to, effect.answer)
            elif isinstance(effect, Recall):
                replies.answer_later(effect.to, recall.recall(effect, self._ledger))
