"""The store of `ResourceEngine`: carries out the decisions of `pools`, under one lock.

The methods of the store may be called from any event loop and any thread. A resource is started in
the loop of its first caller; no code awaits under the lock.
"""

import asyncio
import contextlib
import threading
from collections.abc import Coroutine, Mapping
from concurrent.futures import Future
from typing import Any, Final, TypeVar

from moorage.backends.base import BackendError, EngineClosedError
from moorage.backends.completion import finish
from moorage.backends.spec_documents import pool_key
from moorage.backends.specs import BaseResourceSpec
from moorage.resources.pools import ClaimStage, ResourceClaim, SpecPool
from moorage.resources.resources import BaseResource, ResourceStatus, Runner

STATUS_SECONDS_MAX: Final = 60.0
"""Maximum seconds to wait for a status if the caller gave no limit; then, a resource is not fit."""

_T = TypeVar("_T")


class ResourceStore:
    """Starts, binds and ends resources: free ones by pool, and acquired ones by id."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pools: dict[str, SpecPool] = {}
        self._claims: dict[str, ResourceClaim] = {}

    async def counts(self) -> dict[str, dict[str, int]]:
        """Count resources by pool, without free resources that have died."""
        with self._lock:
            pools = dict(self._pools)
        dead = dict(zip(pools, await asyncio.gather(*map(self._dead, pools.values())), strict=True))
        counts = {}
        with self._lock:
            for key, pool in pools.items():
                free = sum(each not in dead[key] for each in pool.free)
                if total := free + pool.acquired:
                    counts[key] = {"total": total, "free": free, "acquired": pool.acquired}
        return counts

    async def stock(
        self,
        spec: BaseResourceSpec,
        backend: str,
        runner: Runner,
        size: int,
        timeout_seconds: float | None,
        options: Mapping[str, Any],
    ) -> tuple[int, int]:
        """Start resources until `size` are free, or the pool is full.

        Returns:
            The number of resources that were missing, and the number that was started.
        """
        loop = asyncio.get_running_loop()
        with self._lock:
            pool = self._pool(spec, backend, runner)
        await self._clear(pool)
        with self._lock:
            pool = self._pool(spec, backend, runner)  # A new pool if the old one was closed.
            wanted = max(0, size - len(pool.free) - pool.stocking)
            made = wanted if pool.room is None else min(wanted, pool.room)
            claims = [
                ResourceClaim(
                    None, pool, timeout_seconds, loop, options=options, release_at_once=True
                )
                for _ in range(made)
            ]
            for claim in claims:
                claim.callers = 1
                pool.stock(claim)
        for claim in claims:
            self._begin(claim)
        outcomes = [asyncio.wrap_future(claim.outcome) for claim in claims]
        try:
            await asyncio.shield(asyncio.gather(*outcomes, return_exceptions=True))
        except asyncio.CancelledError:
            await finish(asyncio.gather(*(self._give_up(claim) for claim in claims)))
            raise
        for outcome in outcomes:
            outcome.result()
        return wanted, made

    async def acquire(
        self,
        name: str,
        spec: BaseResourceSpec,
        backend: str,
        runner: Runner,
        *,
        timeout_seconds: float | None,
        wait_seconds: float | None,
    ) -> BaseResource:
        """Bind a resource to an id and return it, as `ResourceEngine.acquire` does."""
        begin = False
        with self._lock:
            claim = self._claims.get(name)
            if claim is None:
                pool = self._pool(spec, backend, runner)
                claim = ResourceClaim(name, pool, timeout_seconds, asyncio.get_running_loop())
                self._claims[name] = claim
                begin = pool.enter(claim)
            elif claim.pool.key != (key := pool_key(spec, backend)):
                raise ValueError(f"{name!r} has a resource of {claim.pool.key}, not of {key}")
            claim.callers += 1
        if begin:
            self._begin(claim)
        try:
            try:
                async with asyncio.timeout(wait_seconds):
                    await _wait_shielded(claim.admitted)
            except TimeoutError:
                await finish(self._give_up(claim))
                reason = (
                    f"no resource of {claim.pool.key} was free for {name!r} within {wait_seconds} s"
                )
                raise TimeoutError(reason) from None
            resource = await _wait_shielded(claim.outcome)
        except asyncio.CancelledError:
            await finish(self._give_up(claim))
            raise
        with self._lock:
            claim.taken = True
            claim.callers -= 1
        return resource

    async def release(self, name: str) -> None:
        """Return a resource to its pool."""
        with self._lock:
            claim = self._claims.get(name)
            if claim is None:
                return
            if claim.stage is not ClaimStage.HELD:
                claim.release_at_once = True
                return
            resource = self._detach(claim)
        await finish(self._recycle(claim.pool, resource))

    async def end(self, name: str) -> None:
        """End the resource of an id."""
        with self._lock:
            claim = self._claims.get(name)
            if claim is None:
                return
            resource = self._detach(claim) if claim.stage is ClaimStage.HELD else None
        if resource is not None:
            await finish(self._end(claim.pool, resource))
        else:
            await finish(self._abandon(claim, BackendError(f"{name!r} was ended during its start")))

    async def close(self) -> None:
        """End all resources."""
        with self._lock:
            pools, self._pools = self._pools, {}
            self._claims = {}
            ends: list[Coroutine[Any, Any, None]] = []
            for pool in pools.values():
                pool.closed = True
                claims = [*pool.claims, *pool.waiters]
                resources = [*pool.free, *pool.stuck]
                pool.free.clear()
                pool.stuck.clear()
                pool.moving += len(resources)
                resources += [
                    self._detach(each) for each in claims if each.stage is ClaimStage.HELD
                ]
                ends += [self._end(pool, resource) for resource in resources]
                for claim in claims:
                    if self._disown(claim, EngineClosedError("engine closed")):
                        ends.append(self._quiet(claim))
        errors = await finish(asyncio.gather(*ends, return_exceptions=True))
        reasons = [str(error) for error in errors if error is not None]
        if reasons:
            raise BackendError(f"resources did not end ({len(reasons)}): {'; '.join(reasons)}")

    def _pool(self, spec: BaseResourceSpec, backend: str, runner: Runner) -> SpecPool:
        key = pool_key(spec, backend)
        pool = self._pools.get(key)
        if pool is None:
            pool = self._pools[key] = SpecPool(key, backend, spec, runner)
        return pool

    def resource(self, name: str) -> BaseResource:
        """Return the resource of an id.

        Raises:
            ValueError: The id has no resource, or its resource has not started yet.
        """
        with self._lock:
            claim = self._claims.get(name)
            if claim is None:
                raise ValueError(f"{name!r} has no resource: acquire one first")
            if claim.resource is None:
                raise ValueError(f"the resource of {name!r} is still being made")
            return claim.resource

    def _detach(self, claim: ResourceClaim) -> BaseResource:
        """Remove the resource from a claim and return the resource. Call this under the lock."""
        resource = claim.resource
        assert resource is not None
        claim.resource = None
        claim.stage = ClaimStage.OVER
        claim.pool.claims.discard(claim)
        claim.pool.moving += 1
        self._forget(claim)
        return resource

    def _forget(self, claim: ResourceClaim) -> None:
        """Free the id of a claim, if the claim still has the id. Call this under the lock."""
        if claim.id is not None and self._claims.get(claim.id) is claim:
            del self._claims[claim.id]

    def _begin(self, claim: ResourceClaim) -> None:
        """Start the resource of an admitted claim, in the loop of its first caller."""

        def begin() -> None:
            claim.task = asyncio.ensure_future(self._make(claim))
            claim.task.add_done_callback(note_end)

        def note_end(task: asyncio.Task[None]) -> None:
            # Do this outside of the task: a task that is cancelled before its first step never
            # runs.
            if task.cancelled():
                self._over(claim, BackendError(f"the start of {claim.id!r} was cancelled"))
            claim.quiet.set_result(None)

        try:
            if asyncio.get_running_loop() is claim.loop:
                begin()
                return
        except RuntimeError:
            pass  # No loop runs in this thread.
        try:
            claim.loop.call_soon_threadsafe(begin)
        except RuntimeError:  # The claim's loop was closed while it waited.
            self._over(claim, BackendError("the event loop that waited was closed"))

    async def _make(self, claim: ResourceClaim) -> None:
        pool = claim.pool
        try:
            resource = await self._ready(claim)
        except TimeoutError as error:
            reason = f"{claim.id!r} of {pool.key} was not ready within {claim.timeout_seconds} s"
            late = TimeoutError(f"{reason}: {error}" if str(error) else reason)
            late.__cause__ = error
            self._over(claim, late)
        except Exception as error:  # noqa: BLE001  # The caller gets every error.
            self._over(claim, error)
        else:
            await finish(self._hand_over(claim, resource))

    async def _ready(self, claim: ResourceClaim) -> BaseResource:
        """Return a usable resource: the claim's warm resource, or a new resource in its place."""
        pool, warm = claim.pool, claim.warm
        if claim.stage is ClaimStage.OVER:
            raise BackendError(f"{claim.id!r} was cancelled before its start began")
        if warm is not None:
            if await _is_fit(pool.runner, warm, claim.timeout_seconds):
                return warm
            claim.spoiled = True
            await finish(_discard(claim, warm))
        return await pool.runner.start_resource(
            pool.spec, resource_id=claim.id, timeout=claim.timeout_seconds, **claim.options
        )

    async def _hand_over(self, claim: ResourceClaim, resource: BaseResource) -> None:
        """Give a started resource to its claim; end the resource if the claim was given up."""
        with self._lock:
            unwanted = claim.stage is ClaimStage.OVER
            claim.warm = None
            if not unwanted:
                claim.stage = ClaimStage.HELD
                claim.resource = resource
                claim.outcome.set_result(resource)
                if not claim.release_at_once:
                    return
                self._detach(claim)
            else:
                claim.pool.claims.discard(claim)
                claim.pool.moving += 1
        if unwanted:
            await self._end(claim.pool, resource)
        else:
            self._put(claim.pool, resource)

    def _over(self, claim: ResourceClaim, error: BaseException) -> None:
        """End a claim without a resource, and give its slot to the next waiter."""
        pool = claim.pool
        with self._lock:
            if claim not in pool.claims or claim.stage is ClaimStage.HELD:
                return  # The claim has ended already, or has a resource.
            claim.fail(error)
            pool.claims.discard(claim)
            self._forget(claim)
            warm, claim.warm = claim.warm, None
            if warm is not None and claim.spoiled:
                pool.stuck.append(warm)
            elif warm is not None:  # No caller used the resource: no reset is needed.
                pool.moving += 1
        if warm is None or claim.spoiled:
            self._pass_on(pool)
        else:
            self._put(pool, warm)

    async def _give_up(self, claim: ResourceClaim) -> None:
        """Record that a caller stopped waiting; abandon the claim after its last caller."""
        with self._lock:
            claim.callers -= 1
            if claim.callers or claim.taken:
                return
            stage = claim.stage
            resource = self._detach(claim) if stage is ClaimStage.HELD else None
        if resource is not None:  # The resource started as its caller left.
            await self._recycle(claim.pool, resource)
        elif stage is not ClaimStage.OVER:
            await self._abandon(claim, BackendError(f"{claim.id!r} was cancelled"))

    async def _abandon(self, claim: ResourceClaim, error: BackendError) -> None:
        """End a claim without a resource; wait until its start has ended."""
        with self._lock:
            begun = self._disown(claim, error)
        if begun:
            await self._quiet(claim)

    def _disown(self, claim: ResourceClaim, error: BackendError) -> bool:
        """Mark a claim as failed and free its id; return whether its resource is being started."""
        stage = claim.stage
        if stage in {ClaimStage.HELD, ClaimStage.OVER}:
            return False
        claim.fail(error)
        self._forget(claim)
        if stage is ClaimStage.WAITING:
            claim.pool.waiters.remove(claim)
        return stage is ClaimStage.STARTING

    async def _quiet(self, claim: ResourceClaim) -> None:
        """Cancel the start of a claim's resource, and wait until the start has ended."""
        with contextlib.suppress(RuntimeError):  # A closed loop has no tasks to cancel.
            claim.loop.call_soon_threadsafe(_cancel, claim)
            await asyncio.wrap_future(claim.quiet)

    # Resources on their way --------------------------------------------------------------------

    async def _recycle(self, pool: SpecPool, resource: BaseResource) -> None:
        """Reset a used resource for the next user, or end it."""
        # A resource that has finished or died is not reset.
        fit = not pool.closed and await _is_fit(pool.runner, resource, STATUS_SECONDS_MAX)
        if fit:
            try:
                await resource.reset()
            except NotImplementedError:  # A user's class: the status decides.
                pass
            except Exception:  # noqa: BLE001  # Any error: end the resource.
                fit = False
        if fit and not pool.closed and await _is_fit(pool.runner, resource, STATUS_SECONDS_MAX):
            self._put(pool, resource)
        else:
            await self._end(pool, resource)

    async def _end(self, pool: SpecPool, resource: BaseResource) -> None:
        try:
            await pool.runner.end_resource(resource)
        except Exception as error:
            with self._lock:
                pool.moving -= 1
                pool.stuck.append(resource)
                if pool.closed:  # The new pool counts the resource; `close` tries again.
                    heir = self._pool(pool.spec, pool.backend, pool.runner)
                    heir.stuck.append(pool.stuck.pop())
            reason = f"{resource.resource_id} of {pool.key} could not be ended: {error}"
            raise BackendError(reason) from error
        with self._lock:
            pool.moving -= 1
        self._pass_on(pool)

    async def _dead(self, pool: SpecPool) -> list[BaseResource]:
        """Return the free resources that are not usable."""
        with self._lock:
            free = list(pool.free)
        fit = await asyncio.gather(
            *(_is_fit(pool.runner, each, STATUS_SECONDS_MAX) for each in free)
        )
        return [each for each, well in zip(free, fit, strict=True) if not well]

    async def _clear(self, pool: SpecPool) -> None:
        """End dead free resources. Resources that cannot be ended keep their slots."""
        dead = await self._dead(pool)
        with self._lock:
            dead = [each for each in dead if each in pool.free]
            for each in dead:
                pool.free.remove(each)
                pool.moving += 1
        ends = (self._end(pool, each) for each in dead)
        await finish(asyncio.gather(*ends, return_exceptions=True))

    def _put(self, pool: SpecPool, resource: BaseResource) -> None:
        with self._lock:
            pool.moving -= 1
            heir = pool.put(resource)
        if heir is not None:
            self._begin(heir)

    def _pass_on(self, pool: SpecPool) -> None:
        with self._lock:
            heirs = list(pool.vacate())
        for heir in heirs:
            self._begin(heir)


def _wait_shielded(news: Future[_T]) -> asyncio.Future[_T]:
    """Wait for `news`; a cancelled wait does not cancel `news` for other waiters."""
    future = asyncio.wrap_future(news)
    future.add_done_callback(_look)  # `shield` drops results that come after the cancellation.
    return asyncio.shield(future)


def _look(future: asyncio.Future[Any]) -> None:
    """Read a future's error, so that asyncio does not log it as never retrieved."""
    if not future.cancelled():
        future.exception()


async def _discard(claim: ResourceClaim, warm: BaseResource) -> None:
    """End the warm resource of a claim; if the call is cancelled, the claim keeps the resource."""
    await claim.pool.runner.end_resource(warm)
    claim.warm, claim.spoiled = None, False


async def _is_fit(runner: Runner, resource: BaseResource, seconds: float | None) -> bool:
    """Return whether a resource runs; without a status within `seconds`, it does not."""
    try:
        async with asyncio.timeout(seconds):
            return await runner.get_status(resource) is ResourceStatus.RUNNING
    except Exception:  # noqa: BLE001  # Without a status, the resource is not fit.
        return False


def _cancel(claim: ResourceClaim) -> None:
    if claim.task is not None:
        claim.task.cancel()
