"""Records the holders of a served pool's slots, and when each hold ends.

A checkout may name a process and a time. The holding ends when the process dies or when the time is
up, whichever comes first. The module's code runs in one event loop.
"""

import asyncio
import os
import select
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from secrets import token_hex
from typing import Final

from moorage.records.json_values import JsonMapping, JsonObject, JsonValue
from moorage.slots import Allocation, InvalidCheckin, InvalidRequest, ResourcePool

HOLDINGS_MAX: Final = 100_000
"""The largest number of checkouts of one pool at a time; further checkouts are refused."""
TTL_SECONDS_MAX: Final = 30 * 86_400.0
"""Maximum seconds that a checkout, or a renewal of it, may request."""

Note = Callable[[str], None]


class Busy(Exception):  # noqa: N818  # The name is part of the protocol.
    """A limit is reached; the message names the limit."""


@dataclass(slots=True)
class PoolHolding:
    """A checkout of slots, with its holder and its end.

    Args:
        allocation: The slots that were checked out.
        pid: The process that holds the slots; None: only a time limits the checkout.
        since: The time of the checkout, in seconds since the epoch.
        expires_at: The end of the checkout, in seconds since the epoch; None: when the process
            dies.
    """

    transaction: str
    allocation: Allocation
    pid: int | None
    since: float
    expires_at: float | None = None
    timer: asyncio.TimerHandle | None = field(default=None, repr=False)

    def document(self) -> JsonObject:
        """Return the checkout as `GET /state` shows it."""
        return {
            "transaction": self.transaction,
            "resources": self.allocation,
            "pid": self.pid,
            "since": self.since,
            "expires_at": self.expires_at,
        }


@dataclass(slots=True)
class _Watch:
    """A process and its transactions; the handle (pidfd) never refers to another process."""

    handle: int
    transactions: set[str] = field(default_factory=set)

    def dead(self) -> bool:
        poll = select.poll()
        poll.register(self.handle, select.POLLIN)
        return bool(poll.poll(0))


class Holdings:
    """Checks slots out of a pool, and takes back slots whose holders are gone.

    Args:
        pool: The pool; no other object may check slots out of the pool.
        ttl_seconds: Seconds that a checkout lasts if its request names neither a process nor a
            time.
        note: Called with a sentence about slots that were taken back, and why.
    """

    def __init__(self, pool: ResourcePool, ttl_seconds: float, note: Note) -> None:
        self.pool = pool
        self._ttl_seconds = ttl_seconds
        self._note = note
        self._holdings: dict[str, PoolHolding] = {}
        self._watches: dict[int, _Watch] = {}
        # A random prefix: transactions from before a restart never equal new ones.
        self._names = (f"{prefix}-{number}" for prefix in [token_hex(4)] for number in count(1))

    def __iter__(self) -> Iterator[PoolHolding]:
        return iter(self._holdings.values())

    def checkout(
        self, request: JsonValue, pid: int | None = None, ttl_seconds: float | None = None
    ) -> PoolHolding:
        """Check out slots for a process, for a time, or both.

        Raises:
            SlotsError: The errors of `ResourcePool.checkout`; or no process of this machine has the
                id `pid`.
            Busy: A limit is reached.
        """
        if len(self._holdings) >= HOLDINGS_MAX:
            raise Busy(f"{HOLDINGS_MAX} checkouts are held, the most that may be; check some in")
        watch = None if pid is None else self._watch(pid)
        try:
            allocation = self.pool.checkout(request)
        except BaseException:
            if pid is not None:
                self._unwatch(pid)
            raise
        holding = PoolHolding(next(self._names), allocation, pid, time.time())
        self._holdings[holding.transaction] = holding
        if watch:
            watch.transactions.add(holding.transaction)
        if ttl_seconds is not None or pid is None:
            self._expire_in(holding, self._ttl_seconds if ttl_seconds is None else ttl_seconds)
        return holding

    def checkin(self, transaction: str | None, resources: JsonMapping | None) -> None:
        """End the checkout of a transaction, or without one a checkout of exactly these slots.

        Raises:
            InvalidCheckin: There is no such checkout.
        """
        self._release(self._find(transaction, resources))

    def renew(self, transaction: str, ttl_seconds: float) -> PoolHolding:
        """Extend a checkout to some seconds from now.

        Raises:
            InvalidCheckin: No checkout has this transaction; it may have ended.
        """
        holding = self._find(transaction, None)
        self._expire_in(holding, ttl_seconds)
        return holding

    def close(self) -> None:
        """Stop watching processes and times; no slots are taken back from now on."""
        for holding in self._holdings.values():
            if holding.timer:
                holding.timer.cancel()
        for pid in list(self._watches):
            self._watches[pid].transactions.clear()
            self._unwatch(pid)

    def _find(self, transaction: str | None, resources: JsonMapping | None) -> PoolHolding:
        if transaction is not None:
            named = self._holdings.get(transaction)
            if named is None or resources not in (None, named.allocation):
                raise InvalidCheckin(
                    f"transaction {transaction!r} does not hold these slots (any more): they were "
                    "checked in, its time was up, its process died, or the server was restarted"
                )
            return named
        same = [each for each in self._holdings.values() if each.allocation == resources]
        if not same:
            raise InvalidCheckin(f"no checkout holds exactly these slots: {resources!r}")
        # A caller without a transaction probably named no process.
        return min(same, key=lambda each: (each.pid is not None, each.since))

    def _release(self, holding: PoolHolding) -> None:
        self.pool.checkin(holding.allocation)
        del self._holdings[holding.transaction]
        if holding.timer:
            holding.timer.cancel()
        if holding.pid is not None:
            self._watches[holding.pid].transactions.discard(holding.transaction)
            self._unwatch(holding.pid)

    def _expire_in(self, holding: PoolHolding, seconds: float) -> None:
        if holding.timer:
            holding.timer.cancel()
        holding.expires_at = time.time() + seconds
        loop = asyncio.get_running_loop()
        holding.timer = loop.call_later(seconds, self._take_back, holding, "its time is up")

    def _take_back(self, holding: PoolHolding, why: str) -> None:
        self._release(holding)
        self._note(f"{holding.transaction} was taken back, {why}: {dict(holding.allocation)}")

    def _watch(self, pid: int) -> _Watch:
        watch = self._watches.get(pid)
        if watch and watch.dead():  # Another process has this pid now.
            self._died(pid)
            watch = None
        if watch is None:
            try:
                watch = _Watch(os.pidfd_open(pid))
            except (ProcessLookupError, OverflowError) as error:  # Or an impossible pid.
                raise InvalidRequest(f"pid: there is no process {pid} here") from error
            except OSError as error:  # Out of file descriptors, or a kernel without them.
                raise Busy(f"pid: process {pid} cannot be watched: {error.strerror}") from error
            self._watches[pid] = watch
            asyncio.get_running_loop().add_reader(watch.handle, self._died, pid)
        return watch

    def _unwatch(self, pid: int) -> None:
        """Stop watching a process that holds no slots."""
        watch = self._watches[pid]
        if not watch.transactions:
            del self._watches[pid]
            asyncio.get_running_loop().remove_reader(watch.handle)
            os.close(watch.handle)

    def _died(self, pid: int) -> None:
        for transaction in sorted(self._watches[pid].transactions):
            self._take_back(self._holdings[transaction], f"process {pid} is gone")
