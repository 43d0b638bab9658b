"""Policies that another server executes: `POLICY_EXECUTION_MODE` other than `local`.

With this setting, the daemon consults policies here, not in the sandbox. The answer is a proposal
like any other: the core verifies it, so a wrong or late executor cannot cause a wrong grant.
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import Final
from urllib.parse import quote

import msgspec
import numpy as np
from msgspec.structs import replace

from moorage.catalog.mirrored.http import (
    ONE_BYTES_MAX,
    Service,
    ServiceReply,
    ServiceRequest,
    WrongAnswer,
    quote_body,
)
from moorage.catalog.ports import Catalog
from moorage.catalog.values import PolicyRecord
from moorage.config.settings import Config
from moorage.core.turns.effects import Consult
from moorage.core.turns.events import ConsultFailed, Proposed
from moorage.daemon.answers import refusal_of
from moorage.daemon.publishing.version_statistics import FAULTS
from moorage.daemon.tasks import Tasks
from moorage.model import Ask, ClusterId, Code, NodeId, RequestId
from moorage.policy import Fleet
from moorage.protocol.faults import ServiceError
from moorage.records.json_values import JsonObject, JsonValue
from moorage.sandbox.cell.cluster_data import capacity_of
from moorage.sandbox.wire.limits import ANSWER_BYTES_MAX

EXECUTIONS_MAX: Final = 256
"""Maximum executions under way; one more is refused as `busy`."""
BODY_BYTES_MAX: Final = 16 << 20
"""Maximum bytes of a call with the documents of its candidates; beyond this, `too_large`."""
REPLY_BYTES_MAX: Final = ANSWER_BYTES_MAX + (64 << 10)
"""Maximum bytes of an answer: a policy's largest value, and the envelope."""
_REASON_CHARS_MAX: Final = 900
_KNOWN: Final = FAULTS | {Code.BAD_MESSAGE, Code.UNKNOWN_POLICY, Code.TOO_LARGE, Code.BUSY}


class RemotePolicies:
    """Sends consultations to an external executor.

    Args:
        service: The HTTP service of the executor.
        executor: The id of the executor.
        catalog: Has the documents that are sent to a policy.
        fleet: Returns the fleet with its free amounts, which this class never changes.
        deliver: Called with exactly one event per consultation that was not forgotten.
        tasks: Run the executions.
    """

    def __init__(
        self,
        service: Service,
        executor: str,
        catalog: Catalog,
        fleet: Callable[[], Fleet],
        deliver: Callable[[Proposed | ConsultFailed], None],
        tasks: Tasks,
    ) -> None:
        self._service = service
        self._path = f"/executor/{quote(executor, safe='')}/execute_policy"
        self._catalog = catalog
        self._fleet = fleet
        self._deliver = deliver
        self._tasks = tasks
        self._under_way: dict[tuple[RequestId, int], asyncio.Task[None]] = {}

    async def close(self) -> None:
        """Cancel calls under way and close all connections."""
        tasks = list(self._under_way.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._service.close()

    def consult(self, consult: Consult, record: PolicyRecord) -> None:
        """Consult a policy; exactly one event with the outcome is delivered later."""
        key = (consult.ask.id, consult.consultation)
        self._under_way[key] = self._tasks.spawn(self._run(consult, record))

    def forget(self, request: RequestId, consultation: int) -> None:
        """Cancel a consultation; no event is delivered for it."""
        task = self._under_way.pop((request, consultation), None)
        if task is not None:
            task.cancel()

    async def _run(self, consult: Consult, record: PolicyRecord) -> None:
        request, number = key = consult.ask.id, consult.consultation
        try:
            value = await self._execute(consult, record)
            if record.schemas is not None:
                record.schemas.judge(value)
        except ServiceError as error:
            self._deliver(ConsultFailed(request, number, refusal_of(error)))
        else:
            self._deliver(Proposed(request, number, value))
        finally:
            self._under_way.pop(key, None)

    async def _execute(self, consult: Consult, record: PolicyRecord) -> JsonValue:
        if len(self._under_way) > EXECUTIONS_MAX:
            reason = f"{EXECUTIONS_MAX} executions of policies are awaited; try again shortly"
            raise ServiceError(Code.BUSY, reason)
        ask = consult.ask
        names = self._catalog.memory.live_ids() if ask.candidates is None else ask.candidates
        # Free amounts are read here, on the loop, so that all are of the same moment.
        fleet = self._fleet()
        if consult.excluded_parts:
            fleet = fleet.imagined()
            for share in consult.excluded_parts:
                fleet.take(share)
        free = {name: capacity_of(fleet, name) for name in names}
        if ask.demand is not None and ask.demand.where:
            others = np.flatnonzero(~fleet.matching(ask.demand.where)).tolist()
            closed = [fleet.node_ids[row] for row in others if fleet.node_ids[row][0] in free]
            pairs = tuple((ClusterId(cluster), NodeId(node)) for cluster, node in closed)
            consult = replace(consult, reserved=(*consult.reserved, *pairs))
        blobs = self._catalog.memory.blobs(names)
        body = await asyncio.to_thread(_body, consult, record, blobs, free)
        request = ServiceRequest("POST", self._path, body, bytes_max=ONE_BYTES_MAX)
        return await self._service.ask(request, _read)


def remote_policies(
    config: Config,
    catalog: Catalog,
    fleet: Callable[[], Fleet],
    deliver: Callable[[Proposed | ConsultFailed], None],
    tasks: Tasks,
) -> RemotePolicies | None:
    """Return the client of the external executor; None if the sandbox executes policies."""
    if config.policy_execution_mode == "local":
        return None
    url, seconds = config.policy_executor_host_url, config.external_timeout_seconds
    service = Service("policy executor", url, seconds)
    return RemotePolicies(service, config.policy_executor_id, catalog, fleet, deliver, tasks)


def _body(
    consult: Consult,
    record: PolicyRecord,
    blobs: list[tuple[ClusterId, int, bytes]],
    free: Mapping[ClusterId, JsonValue],
) -> bytes:
    """Write the documented body of a call, with the extra input of this server's policies."""
    ask = consult.ask
    cluster_data: JsonObject = {}
    for name, _, blob in blobs:
        entry = msgspec.msgpack.decode(blob)
        entry["metrics"] = entry["cluster_metrics"]
        cluster_data[name] = {**entry, "capacity": free[name]}
    input_data = {
        "cluster_data": cluster_data,
        "inputs": ask.inputs,
        "resources": _resources(ask),
        "seed": ask.seed,
    }
    if consult.reserved:
        input_data["reserved"] = [list(pair) for pair in consult.reserved]
    question: JsonObject = {
        "policy_rule_uri": ask.policy.uri,
        "input_data": input_data,
        "parameters": {**record.parameters, **ask.parameters},
    }
    if ask.settings:
        question["settings"] = ask.settings
    try:
        body = msgspec.json.encode(question)
    except (TypeError, ValueError, RecursionError) as error:
        reason = f"the request cannot be sent to an executor: {error}"
        raise ServiceError(Code.BAD_MESSAGE, reason, field="inputs") from error
    if len(body) > BODY_BYTES_MAX:
        reason = f"the policy's input has {len(body)} bytes; use fewer clusters"
        expected = f"at most {BODY_BYTES_MAX} bytes"
        raise ServiceError(Code.TOO_LARGE, reason, field="clusters", expected=expected)
    return body


def _resources(ask: Ask) -> JsonObject | None:
    demand = ask.demand
    if demand is None:
        return None
    return {
        name: getattr(demand, name) for name in type(demand).__struct_fields__ if name != "where"
    }


class _RemoteAnswer(msgspec.Struct):
    """The fields that this server reads of an executor's answer."""

    success: bool
    data: JsonValue = None
    message: str = ""
    error: JsonValue = None


def _read(reply: ServiceReply) -> JsonValue:
    """Return the policy's value from an answer; raise `ServiceError` for a fault in it."""
    if len(reply.body) > REPLY_BYTES_MAX:
        reason = f"the executor answered {len(reply.body)} bytes, more than {REPLY_BYTES_MAX}"
        raise ServiceError(Code.POLICY_BAD_OUTPUT, reason)
    try:
        answer = msgspec.json.decode(reply.body, type=_RemoteAnswer)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise WrongAnswer(
            f"answered {reply.status} without a result{quote_body(reply.body)}"
        ) from error
    if answer.success:
        try:
            msgspec.msgpack.encode(answer.data)  # Refuse a value that no cell could return.
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            reason = f"the executor's policy returned a value that cannot be sent: {error}"
            raise ServiceError(Code.POLICY_BAD_OUTPUT, reason) from error
        return answer.data
    details = answer.error if isinstance(answer.error, dict) else {}
    reason = str(details.get("reason") or answer.message or answer.error or "no reason given")
    code = details.get("code")
    known = next((each for each in _KNOWN if each == code), Code.POLICY_ERROR)
    raise ServiceError(known, f"the executor says: {reason[:_REASON_CHARS_MAX]}")
