"""The engine that starts nothing: workloads are entries of a dictionary, faults come on demand.

Ships with the server for rehearsals (`"provision": {"backend": "memory"}`) and stands for every
other backend in the tests of the core and the daemon.
"""

import asyncio
from collections.abc import Collection
from typing import Any, Final

from moorage.engines.base import EngineError
from moorage.model import Lease, RequestId

DELAY_SECONDS_MAX: Final = 60.0
"""Longest delay that a spec may ask for."""


class MemoryEngine:
    """Workloads in memory.

    The spec of a workload may ask for faults: `start_seconds` and `stop_seconds` delay,
    `fail` (a text) fails the start with that reason.
    """

    name: Final = "memory"

    def __init__(self) -> None:
        self._running: set[RequestId] = set()

    async def discover(self) -> Collection[RequestId]:
        """Return the leases whose workload runs."""
        return frozenset(self._running)

    async def start(self, lease: Lease) -> str:
        """Start a workload; see `Engine.start`."""
        spec = lease.provision.spec if lease.provision else {}
        await asyncio.sleep(_delay(spec.get("start_seconds", 0)))
        if reason := spec.get("fail"):
            raise EngineError(str(reason))
        self._running.add(lease.id)
        return f"memory://{lease.id}"

    async def stop(self, lease: Lease) -> None:
        """Stop a workload; see `Engine.stop`."""
        spec = lease.provision.spec if lease.provision else {}
        await asyncio.sleep(_delay(spec.get("stop_seconds", 0)))
        self._running.discard(lease.id)

    async def close(self) -> None:
        """Forget nothing: there is nothing to let go of."""


def _delay(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise EngineError(f"a delay must be a number of seconds, not {value!r}")
    return min(max(float(value), 0.0), DELAY_SECONDS_MAX)
