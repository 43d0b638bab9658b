"""Health: whether requests can be served, for `/readyz`."""

from typing import Any

from moorage.daemon.commit_loop import CommitLoop
from moorage.daemon.tasks import Tasks
from moorage.gateway.server import Gateway
from moorage.ledger.base import Ledger
from moorage.sandbox.host.contract import Mode
from moorage.sandbox.host.sandbox import Sandbox


class Health:
    """Looks at all that requests need.

    Args:
        gateway: Listens until the daemon stops.
        ledger: Open.
        commit_loop: Steps the core.
        sandbox: Runs policies.
        mode: How it does.
        tasks: Know whether anything broke.

    """

    def __init__(
        self,
        gateway: Gateway,
        ledger: Ledger,
        commit_loop: CommitLoop,
        sandbox: Sandbox,
        mode: Mode,
        tasks: Tasks,
    ) -> None:
        self._gateway = gateway
        self._ledger = ledger
        self._commit_loop = commit_loop
        self._sandbox = sandbox
        self._mode: Mode = mode
        self._tasks = tasks

    def readiness(self) -> tuple[bool, dict[str, Any]]:
        """Return whether requests can be served, and what says so, by component."""
        up = self._sandbox.up
        details = {
            "ledger_seq": self._ledger.last_seq,
            "backlog": self._commit_loop.backlog,
            "sandbox": self._mode if up else "down",
        }
        return self._gateway.listening and up and not self._tasks.broken.done(), details
