"""Executes policies for other servers: the documented executor service, in this server's jail.

The caller sends all data that the policy may read. If the data contain free amounts (`capacity`),
this server builds `input_data["fleet"]` from them, for this execution only.
"""

import asyncio
from typing import Final

from moorage.catalog.documents.clusters import cluster_model
from moorage.catalog.ports import Catalog
from moorage.catalog.values import Document
from moorage.daemon.answers import error_of
from moorage.daemon.policies.finder import code_of, fetch_policy
from moorage.model import Cluster, Code, Tenant
from moorage.policy import Fleet
from moorage.protocol.faults import ServiceError
from moorage.records.json_values import JsonMapping, JsonObject, JsonValue
from moorage.sandbox.host.sandbox import PolicyFault, Sandbox

EXECUTIONS_MAX: Final = 256
"""Maximum executions at a time; one more is refused as `busy`."""


class PolicyExecutor:
    """Serves the executor service: evaluates policies for other servers.

    Args:
        catalog: Has the executors and the policies.
        sandbox: Executes the policies.
    """

    def __init__(self, catalog: Catalog, sandbox: Sandbox) -> None:
        self._catalog = catalog
        self._sandbox = sandbox
        self._under_way = 0

    async def execute(self, executor: str, body: Document, tenant: str) -> JsonValue:
        """Evaluate a policy on the input of the request; return its value.

        Args:
            executor: Id of a registered executor.
            body: `policy_rule_uri`, `input_data`, and optionally `parameters` and `settings`.
            tenant: The caller's tenant.

        Raises:
            ServiceError: `not_found`, `unknown_policy`, `bad_message`, `busy`; faults of the
                policy have status 400, since a retry is useless.
        """
        await self._catalog.executors.get(executor)
        uri = body.get("policy_rule_uri")
        if not isinstance(uri, str) or not uri:
            raise ServiceError.wrong_field("policy_rule_uri", "the URI of a registered policy")
        if "input_data" not in body:
            raise ServiceError.wrong_field("input_data", "the input of `eval`")
        parameters, settings = _object(body, "parameters"), _object(body, "settings")
        record = await fetch_policy(self._catalog, uri)
        if self._under_way >= EXECUTIONS_MAX:
            raise ServiceError(Code.BUSY, f"{EXECUTIONS_MAX} executions are running already")
        self._under_way += 1
        try:
            input_data = body["input_data"]
            fleet = await asyncio.to_thread(_fleet_of, input_data)
            return await self._sandbox.evaluate(
                code_of(record),
                Tenant(tenant),
                input_data,
                parameters=parameters,
                settings=settings,
                fleet=fleet,
                proxied=True,
            )
        except PolicyFault as fault:
            status = 400 if fault.refusal.code.startswith("policy_") else 0
            raise error_of(fault.refusal, status=status) from fault
        finally:
            self._under_way -= 1


def _object(body: Document, field: str) -> JsonObject:
    value = body.get(field) or {}
    if not isinstance(value, dict):
        raise ServiceError.wrong_field(field, "an object")
    return value


def _fleet_of(input_data: JsonValue) -> Fleet | None:
    """Return the fleet that `cluster_data` describes; None if it does not give any capacity."""
    clusters = input_data.get("cluster_data") if isinstance(input_data, dict) else None
    if not isinstance(clusters, dict):
        return None
    known: dict[str, JsonMapping] = {}
    models: list[Cluster] = []
    for name, entry in clusters.items():
        if not isinstance(entry, dict) or not isinstance(entry.get("capacity"), dict):
            return None
        try:
            models.append(cluster_model(entry.get("data")))
        except ServiceError as error:
            place = f"input_data.cluster_data.{name}.data"
            raise ServiceError(
                Code.BAD_MESSAGE, f"{place}: {error.reason}", field=place, expected=error.expected
            ) from error
        known[models[-1].id] = entry["capacity"]
    fleet = Fleet()
    fleet.install(models)
    for row, (cluster_id, node_id) in enumerate(fleet.node_ids):
        _set_free(fleet, row, known[cluster_id].get(node_id))
    return fleet


def _set_free(fleet: Fleet, row: int, free: JsonValue) -> None:
    """Set a node's free amounts to the caller's; an amount that it omits counts as wholly free."""
    if not isinstance(free, dict):
        return
    cpu, memory, gpus = fleet.capacity(row)
    by_id = free.get("gpus")
    by_gpu: JsonMapping = by_id if isinstance(by_id, dict) else {}
    for column, gpu in enumerate(fleet.gpu_ids[row]):
        gpus[column] = _whole(by_gpu.get(gpu), gpus[column])
    fleet.set_capacity(
        row, _whole(free.get("cpu_milli"), cpu), _whole(free.get("memory_mib"), memory), gpus
    )


def _whole(value: JsonValue, most: int) -> int:
    """Return a free amount as a whole number up to `most`; for any other value, `most`."""
    return min(value, most) if isinstance(value, int) and not isinstance(value, bool) else most
