"""Runs a policy's own examples: each on a small fleet of its own, by the production code path.

`daemon.publishing.vetting` calls this before a policy is registered. An example becomes an ask of
an allocator that knows the example's fleet and nothing else; a cell answers its consultation as any
other, and the allocator verifies what the policy proposed. So what passes here passes on the
server.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, assert_never

import msgspec

from moorage.catalog.documents.examples import NO_OUTPUT, Example, unlike
from moorage.catalog.filters import compile_filter
from moorage.catalog.values import PolicyRecord
from moorage.core.allocator import Allocator
from moorage.core.state.facts import Refusal
from moorage.core.turns.effects import Address, Consult, Respond
from moorage.core.turns.events import Asked, ClusterSeen, Proposed
from moorage.core.turns.turn import Turn
from moorage.model import Ask, Code, RequestId, SessionId, Tenant
from moorage.protocol.faults import ServiceError
from moorage.records.json_values import JsonValue
from moorage.sandbox.host import contract

_NOW: Final = 0.0
_TO: Final = Address(SessionId("example"), 0)


@dataclass(frozen=True, slots=True)
class _Services:
    """Serves an example's documents to a policy's injected clients and `cluster_data`."""

    example: Example

    async def call(
        self, client: str, method: contract.Method, arguments: tuple[JsonValue, ...]
    ) -> JsonValue:
        clusters = {str(each.id): each.document for each in self.example.fleet}
        known = clusters if client == "cluster_client" else self.example.metrics
        match method:
            case "read_cluster" | "get_cluster":
                if arguments[0] not in known:
                    raise contract.CallRefusedError(f"the example has no {arguments[0]!r}", 404)
                return known[arguments[0]]
            case "execute_query" | "query_clusters" | "get_block" | "query_blocks":
                try:
                    matches = compile_filter(arguments[0] if arguments else None)
                except ServiceError as error:
                    raise contract.CallRefusedError(error.reason, error.status) from error
                return [each for each in known.values() if matches(each)]
            case _:
                assert_never(method)

    def at_hand(
        self, client: str, method: contract.Method, ids: Sequence[str]
    ) -> Mapping[str, bytes]:
        """Return no results: none of an example's documents is packed beforehand."""
        del client, method, ids
        return {}

    def documents(self, cluster_ids: Sequence[str]) -> Sequence[contract.Document]:
        metrics = self.example.metrics
        answers = {
            str(each.id): {"data": each.document, "cluster_metrics": metrics.get(str(each.id))}
            for each in self.example.fleet
        }
        return [
            contract.Document(name, 1, msgspec.msgpack.encode(answers[name]))
            for name in cluster_ids
            if name in answers
        ]


class ExampleRehearsal:
    """Runs one example: makes the work for a cell, and judges the answer.

    Args:
        number: The number of the example, which is also its seed.

    Attributes:
        refusal: Why the example cannot be run; None if it can.
        sample: The work for the cell; None if the example cannot be run.
    """

    def __init__(self, record: PolicyRecord, example: Example, number: int) -> None:
        self.example = example
        self.refusal: Refusal | None = None
        self.sample: contract.Sample | None = None
        self._allocator = Allocator()
        for each in example.fleet:
            if each.live:
                self._allocator.step(ClusterSeen(each.cluster), _NOW)
        try:
            self.sample = self._trial(record, number)
        except ServiceError as error:
            self.refusal = Refusal(error.code, error.reason)

    def _trial(self, record: PolicyRecord, number: int) -> contract.Sample | None:
        if not self._allocator.state.clusters:
            reason = (
                f"{self.example.place}.fleet: expected a cluster that is live; the example has none"
            )
            raise ServiceError(Code.BAD_POLICY, reason)
        example, schemas = self.example, record.schemas
        fleet, services = self._allocator.state.fleet, _Services(example)
        tenant = Tenant(f"example {number}")
        request = example.request
        if request is None:
            parameters, settings = example.parameters, example.settings
            given = example.input_data
            if schemas is not None:
                parameters, settings = schemas.overrides(parameters, settings)
                given = schemas.completed_input(given)
            return contract.Sample(tenant, fleet, services, None, given, parameters, settings)
        inputs = request.inputs
        parameters, settings = request.parameters or {}, request.settings or {}
        if schemas is not None:
            inputs = schemas.complete(inputs)
            parameters, settings = schemas.overrides(parameters, settings)
        ask = Ask(
            id=RequestId(f"example-{number}"),
            tenant=tenant,
            policy=record.ref,
            candidates=request.candidates(),
            demand=request.demand(),
            inputs=inputs,
            parameters=parameters,
            settings=settings,
            seed=number,
        )
        consult = self._next(self._allocator.step(Asked(_TO, ask), _NOW))
        if consult is None:
            return None
        return contract.Sample(tenant, fleet, services, consult)

    def _next(self, turn: Turn) -> Consult | None:
        """Return the consultation in a turn's effects, or None; store a refusal among them."""
        for effect in turn.effects:
            if isinstance(effect, Consult):
                return effect
            if isinstance(effect, Respond) and isinstance(effect.answer, Refusal):
                self.refusal = effect.answer
        return None

    def feasibility(self, answer: JsonValue) -> Refusal | None:
        """Return why the policy's value cannot be granted, or None."""
        consult = self.sample.consult if self.sample else None
        while consult is not None:  # The allocator asks again a bounded number of times.
            proposed = Proposed(consult.ask.id, consult.consultation, answer)
            consult = self._next(self._allocator.step(proposed, _NOW))
        if self.refusal is not None or self.example.output is NO_OUTPUT:
            return self.refusal
        different = unlike(self.example.output, answer)
        return Refusal(Code.BAD_POLICY, different) if different else None
