"""The thread that uses the store of agents, so that no request waits for its disk.

Changes that arrive while another becomes durable share the next transaction: a thousand machines
that regain power together take some dozens of transactions.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from moorage.daemon.agents.agent_store import AgentStore, AgentStoreError

T = TypeVar("T")


class StoreThread:
    """Calls methods of the store of agents in a thread; each may raise `AgentStoreError`."""

    def __init__(self, store: AgentStore) -> None:
        self._store = store
        self._thread = ThreadPoolExecutor(1, "agents")
        self._waiting: deque[tuple[Callable[[], object], Future[object]]] = deque()

    async def read(self, look: Callable[..., T], *arguments: object) -> T:
        """Return the result of a method that changes nothing."""
        return await asyncio.wrap_future(self._submit(partial(look, *arguments)))

    async def change(self, change: Callable[..., T], *arguments: object) -> T:
        """Return the result of a method that makes a change, once the change is durable."""
        outcome: Future[T] = Future()
        self._waiting.append((partial(change, *arguments), outcome))  # type: ignore[arg-type]  # The outcome gets the result.
        self._submit(self._change_all)
        return await asyncio.wrap_future(outcome)

    def _submit(self, work: Callable[[], T]) -> Future[T]:
        try:
            return self._thread.submit(work)
        except RuntimeError as error:
            raise AgentStoreError("the server stops") from error

    def _change_all(self) -> None:
        jobs = [self._waiting.popleft() for _ in range(len(self._waiting))]
        jobs = [job for job in jobs if job[1].set_running_or_notify_cancel()]
        if not jobs:
            return
        done: list[object] = []
        try:
            with self._store.together():
                for change, _ in jobs:
                    try:
                        done.append(change())
                    except AgentStoreError as error:
                        done.append(error)
        except BaseException as error:  # noqa: BLE001  # The callers get any error.
            done = [error] * len(jobs)
        for (_, outcome), value in zip(jobs, done, strict=True):
            if isinstance(value, BaseException):
                outcome.set_exception(value)
            else:
                outcome.set_result(value)

    def close(self) -> None:
        """Make the pending changes, and end the thread."""
        self._thread.shutdown()
