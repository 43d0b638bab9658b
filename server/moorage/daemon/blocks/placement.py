"""Block-level requests: which cluster, and which node of it, a block should run on.

Admission passes requests from the socket; `BlockServices` passes those from the documented
endpoints of the cluster-controller gateway. The filter finds clusters, the block's clusterAllocator
narrows them, its resourceAllocator scores each (a dry run), its clusterAllocator chooses one of
those that were scored. Nothing is reserved.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from moorage.catalog.allowances import Allowance
from moorage.catalog.ports import Catalog
from moorage.catalog.values import Document, PolicyRecord
from moorage.core.turns.effects import Information
from moorage.daemon.answers import encode, refusal_of
from moorage.daemon.blocks.run import BlockRun, Candidate
from moorage.daemon.blocks.specification import BlockSpec, PolicySpec, read_block
from moorage.daemon.policies.finder import Finder
from moorage.model import Code, Tenant
from moorage.policy import Fleet
from moorage.protocol import replies
from moorage.protocol.block_documents import bare_block
from moorage.protocol.fair_semaphore import FairSemaphore
from moorage.protocol.faults import ServiceError
from moorage.protocol.messages import BlockRequest
from moorage.records.json_values import JsonMapping, JsonValue
from moorage.sandbox.host.sandbox import Sandbox

Mode = Literal["dry_run", "select_clusters"]

CLUSTERS_MAX: Final = 1000
"""Maximum clusters that one block is tried on; if there are more, the first by id are taken."""
RUNNING_MAX: Final = 32
"""Maximum blocks in progress; further blocks wait. The limit of one tenant is lower by one."""
WAITING_MAX: Final = 1024
"""Maximum blocks that wait for a turn. With one more, the newest waiting block of the tenant with
most blocks is refused with `busy`."""
SECONDS_MAX: Final = 60.0
"""Maximum seconds for one block, with its wait; after them, the answer is `policy_timeout`."""


@dataclass(frozen=True, slots=True)
class BlockOutcome:
    """The result for a block.

    Args:
        result: The policy's own result: the answer of a block-level request, without an envelope.
        warnings: Sentences for a person, where the form of the reply has room for them.
    """

    result: JsonValue
    warnings: list[str]


class BlockPlacement:
    """Finds places for blocks.

    Args:
        finder: Finds the clusters that match a filter.
        fleet: Returns what is free, as the allocator knows it now; read only.
        clusters_max: Clusters that one request may find, as configured.
    """

    def __init__(
        self,
        *,
        catalog: Catalog,
        finder: Finder,
        sandbox: Sandbox,
        fleet: Callable[[], Fleet],
        clusters_max: int,
    ) -> None:
        self._catalog = catalog
        self._finder = finder
        self._sandbox = sandbox
        self._fleet = fleet
        self._clusters_max = min(clusters_max, CLUSTERS_MAX)
        self._turns = FairSemaphore(RUNNING_MAX, WAITING_MAX, busy="blocks wait")

    async def answer(
        self, tenant: Tenant, message: BlockRequest, warnings: Sequence[str] = ()
    ) -> bytes:
        """Write the reply to a block-level message: the bare result, or the failure reply.

        A bare result has no room for an `id`, which documented clients do not send. A message with
        an `id` is answered in the envelope, with the id and the warnings.
        """
        try:
            outcome = await self.place(tenant, message.input, message.mode)
        except ServiceError as error:
            return encode(refusal_of(error), message_id=message.id, warnings=warnings)
        if message.id is None:
            return replies.raw(outcome.result)
        all_warnings = [*warnings, *outcome.warnings]
        return encode(Information(outcome.result), message_id=message.id, warnings=all_warnings)

    async def place(self, tenant: Tenant, block: JsonMapping, mode: Mode) -> BlockOutcome:
        """Find the place of a block.

        Args:
            tenant: The tenant that asks; the policies run with its context.
            block: The block document.
            mode: `select_clusters`: the clusters that the clusterAllocator selects;
                `dry_run`: the cluster that it chooses of these, with the score and the node.

        Raises:
            ServiceError: The document is wrong, no cluster is found or can take the block, or a
                policy failed. The detail `left_out` has the reason for each cluster that was tried.
        """
        try:
            async with asyncio.timeout(SECONDS_MAX), self._turns.turn(tenant):
                return await self._place(tenant, block, mode)
        except TimeoutError as error:
            reason = f"The block took more than {SECONDS_MAX:g} seconds; narrow its filter."
            raise ServiceError(Code.POLICY_TIMEOUT, reason, field="input") from error

    async def _place(self, tenant: Tenant, block: JsonMapping, mode: Mode) -> BlockOutcome:
        block = bare_block(block)
        spec = read_block(block)
        warnings: list[str] = []
        records: dict[str, PolicyRecord] = {}
        for each in (spec.cluster_allocator, spec.resource_allocator):
            if each.uri:
                records[each.role] = await self._policy(each, warnings)
        try:
            run = BlockRun(self._sandbox, tenant, block, spec, records)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            reason = f"input: the block cannot be given to a policy: {error}"
            raise ServiceError(Code.BAD_MESSAGE, reason, field="input") from error
        found = await self._candidates(tenant, spec, warnings)
        value, candidates = await run.select(found)
        if mode == "select_clusters":
            return BlockOutcome(run.selection(value, candidates), warnings)
        scored = await run.score(candidates, self._fleet)
        if not scored:
            raise run.nowhere()
        chosen = await run.choose(scored)
        return BlockOutcome(chosen, list(dict.fromkeys(warnings)) + run.sentences())

    async def _policy(self, spec: PolicySpec, warnings: list[str]) -> PolicyRecord:
        place = f"{spec.at}.policyRuleURI"
        try:
            warnings += await self._catalog.freshness.fetch(spec.uri, (), Allowance(1))
        except ServiceError as error:
            if error.code is not Code.UNKNOWN_POLICY:
                raise
        record = self._catalog.memory.policy(spec.uri)
        if record is None:
            reason = (
                f"{place}: no policy “{spec.uri}” is registered. Register it with POST /policy."
            )
            expected = "the URI of a registered policy"
            raise ServiceError(Code.UNKNOWN_POLICY, reason, field=place, expected=expected)
        return record

    async def _candidates(
        self, tenant: Tenant, spec: BlockSpec, warnings: list[str]
    ) -> list[Candidate]:
        """Return the clusters that the filter finds: live ones, up to the limit, by id."""
        allowance = Allowance()  # The block's policies were one request each, if at all.
        names: Sequence[str] = self._catalog.memory.live_ids()
        missing = "no cluster is registered and live"
        if spec.filter is not None:
            names = await self._find(tenant, *spec.filter, allowance, warnings)
            missing = "no live cluster matches"
        if not names:
            place = f"{spec.cluster_allocator.at}.parameters.filter"
            reason = f"{place}: {missing}, so the block has no cluster."
            raise ServiceError(Code.UNKNOWN_CLUSTERS, reason, field=place)
        most = self._clusters_max
        if len(names) > most:
            warnings.append(f"Only the first {most} of {len(names)} clusters were considered.")
            names = names[:most]
        warnings += await self._catalog.freshness.fetch("", names, allowance)
        blobs = self._catalog.memory.blobs(names)
        return [Candidate(name, packed) for name, _, packed in blobs]

    async def _find(
        self, tenant: Tenant, body: Document, at: str, allowance: Allowance, warnings: list[str]
    ) -> Sequence[str]:
        elsewhere = await self._catalog.search.ask("filter", body, allowance)
        if elsewhere is not None:
            return sorted(frozenset(self._catalog.memory.live_ids()).intersection(elsewhere))
        found = await self._finder.find("filter", body, tenant, allowance, at=at, candidates=True)
        warnings += found.warnings
        return sorted(found.ids)
