"""Carries out `Start` and `Stop` at the engines, and posts what they report."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from moorage.core.words import EngineFailed, EngineStarted, EngineStopped, Event
from moorage.engines.base import Engine, EngineError
from moorage.model import Lease, RequestId

RETRY_SECONDS: Final = (0.5, 2.0, 10.0, 60.0)
"""Pauses before a stop that failed is tried again; the last one repeats. Until it succeeds the
lease keeps what it holds, because the workload may still be using it."""

_Order = Callable[[Engine | None, Lease], Awaitable[None]]


class EngineRoom:
    """Runs one order at a time for each lease, in the order they were given.

    Args:
        engines: By the name that `provision.backend` uses.
        post: Posts an event to the core.
        failed: Learns of a defect.

    """

    def __init__(
        self,
        engines: Mapping[str, Engine],
        post: Callable[[Event], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        self._engines = engines
        self._post = post
        self._failed = failed
        self._orders: dict[RequestId, asyncio.Task[None]] = {}

    def start(self, lease: Lease) -> None:
        """Have the workload of a lease started."""
        self._order(lease, self._start)

    def stop(self, lease: Lease) -> None:
        """Have the workload of a lease stopped. A start under way is given up first."""
        earlier = self._orders.get(lease.id)
        if earlier is not None:
            earlier.cancel()
        self._order(lease, self._stop)

    async def close(self) -> None:
        """Give up what is under way. The next start gives the orders again."""
        for task in self._orders.values():
            task.cancel()
        await asyncio.gather(*self._orders.values(), return_exceptions=True)
        for engine in self._engines.values():
            await engine.close()

    def _order(self, lease: Lease, order: _Order) -> None:
        earlier = self._orders.get(lease.id)
        task = asyncio.create_task(self._after(earlier, lease, order))
        self._orders[lease.id] = task
        task.add_done_callback(lambda done: self._done(lease.id, done))

    async def _after(self, earlier: asyncio.Task[None] | None, lease: Lease, order: _Order) -> None:
        if earlier is not None:
            await asyncio.wait([earlier])
        await order(self._engine(lease), lease)

    def _done(self, request: RequestId, task: asyncio.Task[None]) -> None:
        if self._orders.get(request) is task:
            del self._orders[request]
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failed(error)

    def _engine(self, lease: Lease) -> Engine | None:
        return self._engines.get(lease.provision.backend) if lease.provision else None

    async def _start(self, engine: Engine | None, lease: Lease) -> None:
        if engine is None:
            self._post(EngineFailed(lease.id, "this server no longer has its backend"))
            return
        try:
            endpoint = await engine.start(lease)
        except EngineError as error:
            self._post(EngineFailed(lease.id, str(error)))
        else:
            self._post(EngineStarted(lease.id, endpoint))

    async def _stop(self, engine: Engine | None, lease: Lease) -> None:
        pauses = iter(RETRY_SECONDS)
        pause = RETRY_SECONDS[0]
        while engine is not None:
            try:
                await engine.stop(lease)
                break
            except EngineError:
                pause = next(pauses, pause)
                await asyncio.sleep(pause)
        self._post(EngineStopped(lease.id))
