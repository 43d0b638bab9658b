"""What starts a lease's workload: one Protocol for every backend.

The daemon is the only caller. Calls are idempotent by lease id: after a crash the same order is
given again, and nothing is started twice.

    EngineError    the backend cannot do what was asked; the message says why
"""

from collections.abc import Collection
from typing import Protocol

from moorage.model import Lease, RequestId


class EngineError(Exception):
    """The backend cannot do what was asked; nothing of the lease's workload is left."""


class Engine(Protocol):
    """One backend, under the name that `provision.backend` uses."""

    @property
    def name(self) -> str:
        """The name that requests use."""

    async def discover(self) -> Collection[RequestId]:
        """Return the leases whose workload runs now, whoever started it."""

    async def start(self, lease: Lease) -> str:
        """Start the workload of a lease, unless it runs already.

        Returns:
            Where it is reached, or an empty string.

        Raises:
            EngineError: It did not start, and nothing of it is left.

        """

    async def stop(self, lease: Lease) -> None:
        """Stop the workload of a lease; return when nothing of it is left.

        Raises:
            EngineError: It cannot be stopped; the lease keeps what it holds.

        """

    async def close(self) -> None:
        """Let go of the backend. Workloads go on running."""
