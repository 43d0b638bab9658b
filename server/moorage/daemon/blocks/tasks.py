"""The block endpoints of the gateway: they answer at once, or start a task to be read later.

`daemon.requests.services` hands the methods to the HTTP port. Tasks live in memory only: results
are advice, and a client whose task is lost repeats its request.
"""

import secrets
from collections import Counter, OrderedDict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Final

import msgspec

from moorage.core.state.tenant_loads import fits
from moorage.daemon.blocks.placement import BlockPlacement, Mode
from moorage.model import Code, Tenant
from moorage.protocol.faults import ServiceError
from moorage.records.json_values import JsonObject, JsonValue

TASKS_MAX: Final = 1024
"""Maximum stored tasks; with one more, the oldest finished task of the tenant with most tasks is
forgotten. If no task is finished, the new task is refused as `busy`, except for tenants with few
tasks."""
TASKS_BYTES_MAX: Final = 64 << 20
"""Maximum bytes of stored results; beyond this, the tenant with most bytes loses its oldest."""


@dataclass(slots=True)
class _Task:
    """A task; `state` has `status`, and `result` or `error`."""

    tenant: str
    state: JsonObject
    size: int = 0

    @property
    def pending(self) -> bool:
        return bool(self.state["status"] == "pending")


class BlockServices:
    """Serves the block endpoints of the gateway.

    Args:
        spawn: Runs work in the background.
    """

    def __init__(
        self, blocks: BlockPlacement, spawn: Callable[[Coroutine[object, object, None]], object]
    ) -> None:
        self._blocks = blocks
        self._spawn = spawn
        self._tasks: OrderedDict[str, _Task] = OrderedDict()
        self._bytes = 0

    async def select_clusters(self, body: JsonObject, tenant: str) -> JsonValue:
        """Answer `POST /blockActions/selectClusters` with the bare result."""
        block = _block(body, "select_clusters")
        return (await self._blocks.place(Tenant(tenant), block, "select_clusters")).result

    async def dry_run(self, body: JsonObject, tenant: str) -> tuple[JsonValue, list[str]]:
        """Answer `POST /blockActions/dryRun` with the result and warnings."""
        outcome = await self._blocks.place(Tenant(tenant), _block(body, "dry_run"), "dry_run")
        return outcome.result, outcome.warnings

    async def allocate(self, body: JsonObject, tenant: str) -> str:
        """Answer `POST /blockActions/allocate` with the id of a task that makes the dry run.

        Raises:
            ServiceError: `busy` where too many tasks are pending.
        """
        block = _block(body, "dry_run")
        if self._is_full(tenant):
            raise ServiceError(Code.BUSY, f"{TASKS_MAX} tasks are pending; try again in a moment")
        task_id = secrets.token_hex(16)
        task = self._tasks[task_id] = _Task(tenant, {"task_id": task_id, "status": "pending"})
        self._spawn(self._run(task, block))
        return task_id

    async def task(self, task_id: str, tenant: str) -> JsonObject:
        """Answer `GET /api/tasks/{task_id}`: a task, pending, completed with `result`, or failed.

        Raises:
            ServiceError: `not_found`: no such task of this tenant is stored.
        """
        task = self._tasks.get(task_id)
        if task is None or task.tenant != tenant:
            reason = f"there is no task {task_id}: old tasks are forgotten, and all at a restart"
            raise ServiceError(Code.NOT_FOUND, reason, field="task_id")
        return task.state

    async def _run(self, task: _Task, block: JsonObject) -> None:
        try:
            outcome = await self._blocks.place(Tenant(task.tenant), block, "dry_run")
            result = msgspec.Raw(msgspec.json.encode(outcome.result))
        except ServiceError as error:
            task.state |= {"status": "failed", "error": _error(error)}
        except RecursionError:
            # The document can just be packed; in the result it is one level too deep.
            too_deep = ServiceError.wrong_field("input", "a document that is nested less deeply")
            task.state |= {"status": "failed", "error": _error(too_deep)}
        else:
            task.state |= {"status": "completed", "result": result}
            if outcome.warnings:
                task.state["warnings"] = outcome.warnings
        task.size = len(msgspec.json.encode(task.state))
        self._bytes += task.size
        while self._bytes > TASKS_BYTES_MAX:
            if not self._forget_oldest(lambda task: task.size):
                break

    def _is_full(self, tenant: str) -> bool:
        """Return whether a tenant's new task finds no room; forget a finished task to make room."""
        if len(self._tasks) < TASKS_MAX or self._forget_oldest(lambda _: 1):
            return False
        own = sum(task.tenant == tenant for task in self._tasks.values())
        return not fits(len(self._tasks) + 1, own + 1, TASKS_MAX)

    def _forget_oldest(self, weight: Callable[[_Task], int]) -> bool:
        """Forget the oldest finished task of the tenant with most `weight`; False: none exists."""
        weights = Counter[str]()
        oldest: dict[str, str] = {}
        for task_id, task in self._tasks.items():
            if not task.pending:
                weights[task.tenant] += weight(task)
                oldest.setdefault(task.tenant, task_id)
        if not oldest:
            return False
        task_id = oldest[max(weights, key=lambda each: weights[each])]
        self._bytes -= self._tasks.pop(task_id).size
        return True


def _block(body: JsonObject, mode: Mode) -> JsonObject:
    """Return the block in a body: the whole body, or the `input` of the message around it."""
    block = body.get("input")
    if not isinstance(block, dict):
        return body
    if body.get("mode", mode) != mode:
        raise ServiceError.wrong_field("mode", f'"{mode}" or no mode, at this endpoint')
    return block


def _error(error: ServiceError) -> JsonObject:
    fields = {"code": error.code, "reason": error.reason}
    named = {"field": error.field, "expected": error.expected}
    return {**error.details, **fields, **{name: value for name, value in named.items() if value}}
