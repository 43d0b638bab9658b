"""Takes one block through its policies: select, score, choose.

`daemon.blocks.placement` makes one `BlockRun` per request. Named policies run in the sandbox;
`answers` checks the values that they return. Documents stay packed from the catalog to the policy.
"""

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from moorage.catalog.values import PolicyRecord
from moorage.daemon.answers import error_of
from moorage.daemon.blocks import answers, defaults
from moorage.daemon.blocks.specification import BlockSpec, PolicySpec
from moorage.daemon.policies.finder import code_of, place_of
from moorage.model import Code, Tenant
from moorage.policy import Fleet
from moorage.protocol.faults import ServiceError
from moorage.records.json_values import JsonMapping, JsonObject, JsonValue
from moorage.sandbox.host.sandbox import PolicyFault, Sandbox
from moorage.sandbox.wire.limits import ANSWER_BYTES_MAX, INPUT_BYTES_MAX

CONCURRENT_MAX: Final = 4
"""Maximum clusters of one block that are scored at a time: as many as a policy has cells."""
DRY_RUNS_SECONDS_MAX: Final = 40.0
"""Maximum seconds to score the clusters of one block; clusters not scored by then are left out."""
NAMED_MAX: Final = 20
"""Maximum left-out clusters that an answer names; further clusters are only counted."""
_ANSWERED_WHOLE_BYTES: Final = ANSWER_BYTES_MAX // 2
"""Maximum bytes of packed documents that a policy returns whole. Of larger ones, it returns only
ids, and this module inserts the documents again."""


class _Parts(msgspec.Struct):
    """The packed parts of a cluster."""

    data: msgspec.Raw
    cluster_metrics: msgspec.Raw


_parts: Final = msgspec.msgpack.Decoder(_Parts).decode


@dataclass(slots=True)
class Candidate:
    """One candidate cluster during a block request.

    Args:
        packed: Its document and metrics, as the catalog packs them for policies.
        nodes: Its healthy nodes; empty before its dry run.
        score_data: The answer of the dry run: `{"score", "node_info"}`.
    """

    name: str
    packed: bytes
    nodes: answers.Nodes = field(default_factory=dict[str, Sequence[str]])
    score_data: JsonObject = field(default_factory=JsonObject)

    @property
    def parts(self) -> _Parts:
        """The document and the metrics, still packed."""
        return _parts(self.packed)

    @property
    def document(self) -> JsonValue:
        """The cluster document."""
        return msgspec.msgpack.decode(self.parts.data)


class BlockRun:
    """The steps of one block request, in the order of its methods.

    Args:
        records: The named policies, by role.

    Attributes:
        left_out: Clusters that could not be scored, and why.
    """

    def __init__(
        self,
        sandbox: Sandbox,
        tenant: Tenant,
        block: JsonMapping,
        spec: BlockSpec,
        records: Mapping[str, PolicyRecord],
    ) -> None:
        self._sandbox = sandbox
        self._tenant = tenant
        self._given = block
        packed = msgspec.msgpack.encode(block)
        self._block, self._block_bytes = msgspec.Raw(packed), len(packed)
        self._allocator, self._scorer = spec.cluster_allocator, spec.resource_allocator
        self._demand = spec.demand
        self._records = records
        self.left_out: dict[str, ServiceError] = {}

    async def select(self, found: Sequence[Candidate]) -> tuple[JsonValue, list[Candidate]]:
        """Let the clusterAllocator narrow the clusters.

        Returns:
            The policy's result (None for the built-in one, which keeps all), and the remaining
            clusters.
        """
        if not self._allocator.uri:
            return None, list(found)
        size = sum(len(each.packed) for each in found)
        given = {
            "action": "selection",
            "filter_result": [each.parts.data for each in found],
            "block_data": self._block,
        }
        value = await self._evaluate(self._allocator, given, size, returned_max=size)
        by_name = {each.name: each for each in found}
        names = answers.read_selection(value, by_name, self._allocator.at)
        return value, [by_name[name] for name in names]

    def selection(self, value: JsonValue, candidates: Sequence[Candidate]) -> JsonValue:
        """Return the result of the selection, `{"clusters": [documents], …}`."""
        if sum(len(each.packed) for each in candidates) > INPUT_BYTES_MAX:
            raise _too_large(self._allocator.at)
        given = candidates if value is None else value["clusters"]
        whole = [
            one.document | each if isinstance(each, dict) else one.document
            for each, one in zip(given, candidates, strict=True)
        ]
        return {**(value or {}), "clusters": whole}

    async def score(
        self, candidates: Sequence[Candidate], fleet: Callable[[], Fleet]
    ) -> list[Candidate]:
        """Dry-run the block on every cluster, some at a time; return those that were scored."""
        waiting = iter(candidates)

        async def work() -> None:
            for each in waiting:
                each.nodes = defaults.nodes_of(fleet(), each.name)
                try:
                    each.score_data = await self._score(each, fleet)
                except ServiceError as error:
                    self.left_out[each.name] = error

        try:
            async with asyncio.timeout(DRY_RUNS_SECONDS_MAX), asyncio.TaskGroup() as group:
                for _ in range(CONCURRENT_MAX):
                    group.create_task(work())
        except TimeoutError:
            reason = f"not scored within {DRY_RUNS_SECONDS_MAX:g} seconds"
            late = ServiceError(Code.POLICY_TIMEOUT, reason, field=self._scorer.at)
            for each in candidates:
                if not each.score_data:
                    self.left_out.setdefault(each.name, late)
        return [each for each in candidates if each.score_data]

    async def _score(self, cluster: Candidate, fleet: Callable[[], Fleet]) -> JsonObject:
        if not self._scorer.uri:
            await asyncio.sleep(0)  # Others have their turn between two clusters.
            return defaults.dry_run(fleet(), cluster.name, self._demand)
        parts = cluster.parts
        seen = {
            "block": self._block,
            "cluster": parts.data,
            "cluster_metrics": parts.cluster_metrics,
        }
        payload = {**seen, "healthy_nodes": list(cluster.nodes)}
        given = {"action": "dry_run", "payload": payload, **seen}
        size = 2 * (len(cluster.packed) + self._block_bytes)
        value = await self._evaluate(self._scorer, given, size)
        return answers.score_data(value, cluster.nodes, self._scorer.at)

    async def choose(self, scored: Sequence[Candidate]) -> JsonValue:
        """Let the clusterAllocator choose a cluster; return its entry."""
        by_name = {each.name: each for each in scored}
        if not self._allocator.uri:
            name = defaults.best((each.name, each.score_data) for each in scored)
            if name is None:
                for each in scored:
                    error = each.score_data.get("error")
                    reason = f"its score is 0{f': {error}' if error else ''}"
                    self.left_out[each.name] = ServiceError(Code.NO_CAPACITY, reason)
                raise self.nowhere()
            return self._entry(by_name[name])
        sizes = [len(each.packed) + self._block_bytes for each in scored]
        if sum(sizes) > INPUT_BYTES_MAX:
            raise _too_large(self._allocator.at)
        entries = [
            {
                "id": each.name,
                "cluster": each.parts.data,
                "score_data": each.score_data,
                "block_data": self._block,
            }
            for each in scored
        ]
        given = {"action": "post_dry_run", "clusters": entries}
        value = await self._evaluate(self._allocator, given, sum(sizes), returned_max=max(sizes))
        offered = {each.name: each.nodes for each in scored}
        name = answers.read_choice(value, offered, self._allocator.at)
        if max(sizes) > _ANSWERED_WHOLE_BYTES:  # The policy returned the id, and added fields.
            added = value if isinstance(value, dict) else {}
            return self._entry(by_name[name]) | added
        return value if isinstance(value, dict) else self._entry(by_name[name])

    def _entry(self, cluster: Candidate) -> JsonObject:
        return {
            "id": cluster.name,
            "cluster": cluster.document,
            "score_data": cluster.score_data,
            "block_data": self._given,
        }

    def sentences(self) -> list[str]:
        """Return one sentence, with the reason, for each cluster that was left out."""
        named = list(self.left_out.items())[:NAMED_MAX]
        lines = [f"Cluster {name} was left out: {error.reason}" for name, error in named]
        more = len(self.left_out) - len(named)
        return [*lines, f"{more} more clusters were left out."] if more else lines

    def nowhere(self) -> ServiceError:
        """Return the refusal of a block that no cluster can take."""
        if not self.left_out:
            reason = "The clusterAllocator selected no cluster."
            return ServiceError(Code.POLICY_DECLINED, reason, field=self._allocator.at)
        codes = {error.code for error in self.left_out.values()}
        rows = [
            {"cluster_id": name, "code": error.code, "reason": error.reason}
            for name, error in list(self.left_out.items())[:NAMED_MAX]
        ]
        return ServiceError(
            codes.pop() if len(codes) == 1 else Code.NO_CAPACITY,
            f"No cluster can take the block. {rows[0]['cluster_id']}: {rows[0]['reason']}",
            field=self._scorer.at,
            details={"left_out": rows, "left_out_count": len(self.left_out)},
        )

    async def _evaluate(
        self, spec: PolicySpec, given: JsonMapping, size: int, *, returned_max: int = 0
    ) -> JsonValue:
        if size > INPUT_BYTES_MAX:  # Before `evaluate` copies them.
            raise _too_large(spec.at)
        record = self._records[spec.role]
        if record.schemas is not None and record.schemas.inputs is not None:
            given = await _open(given, record.schemas.inputs.names)
        try:
            return await self._sandbox.evaluate(
                code_of(record),
                self._tenant,
                given,
                parameters=spec.parameters,
                settings=spec.settings,
                ids_only=returned_max > _ANSWERED_WHOLE_BYTES,
            )
        except PolicyFault as fault:
            reason = f"{spec.role} {spec.uri}: {fault.refusal.reason}"
            place = place_of(fault.refusal, spec.at) or spec.at
            raise error_of(fault.refusal, reason=reason, field=place) from fault


async def _open(given: JsonMapping, names: Collection[str]) -> JsonObject:
    """Decode the packed documents in some fields, for a schema that checks their contents."""
    return {name: await _plain(each) if name in names else each for name, each in given.items()}


async def _plain(value: JsonValue) -> JsonValue:
    """Unpack the packed parts of a value; the event loop runs other tasks between two parts."""
    match value:
        case msgspec.Raw():
            await asyncio.sleep(0)
            return msgspec.msgpack.decode(value)
        case dict():
            return {name: await _plain(each) for name, each in value.items()}
        case list():
            return [await _plain(each) for each in value]
        case _:  # Foreign JSON: whatever else it is, nothing is packed in it.
            return value


def _too_large(at: str) -> ServiceError:
    reason = f"{at}: the found clusters have more than {INPUT_BYTES_MAX} bytes: narrow the filter"
    return ServiceError(Code.TOO_LARGE, reason, field=at)
