"""Turns a what-if message and the present state into a job of `lab.whatif`.

The state is copied as a checkpoint copies it; the rest happens in a separate program, so no what-if
changes or delays anything here.
"""

import asyncio
import time
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec
from msgspec import structs
from msgspec.structs import replace

from moorage.catalog.allowances import Allowance
from moorage.catalog.ports import Catalog
from moorage.catalog.values import PolicyRecord
from moorage.core.state import refusals
from moorage.core.state.checkpoint import condense
from moorage.core.state.facts import Carried, Fact, Queued, Refusal
from moorage.core.state.state import State
from moorage.core.turns.effects import Information, Response
from moorage.daemon.offline import offline
from moorage.daemon.publishing.aliases import Publishing
from moorage.daemon.requests.asks import Asks
from moorage.daemon.requests.reading import is_described, overridden_fields, unknown_policy
from moorage.ledger.codec import seal
from moorage.model import Ask, ClusterId, Code, PolicyRef, Tenant
from moorage.protocol import messages as wire
from moorage.protocol.changes import Change, read_change
from moorage.protocol.errors import BadMessage
from moorage.protocol.faults import ServiceError
from moorage.protocol.messages import AllocationRequest
from moorage.records.json_values import JsonObject, JsonValue
from moorage.records.rights import Caller, Right

SECONDS_MAX: Final = 30.0
"""Maximum seconds of a what-if; after them, it is refused as `policy_timeout`."""
AT_ONCE_MAX: Final = 2
"""Maximum what-ifs at a time, one per tenant; a further what-if is refused as `busy`."""
JOB_BYTES_MAX: Final = 128 << 20
"""Maximum bytes of the state and of the clusters that policies read; beyond this, `too_large`."""


class WhatIfs:
    """Predicts the consequences of changes in a separate program.

    Args:
        publishing: Chooses the version that an alias means.
        asks: Makes the ask of a request.
        state: The live state; read only.
        bounds: Limits and isolation of the decisions: `mode`, `limits` and `overtaken_max`.
    """

    def __init__(
        self,
        catalog: Catalog,
        publishing: Publishing,
        asks: Asks,
        state: State,
        bounds: JsonObject,
    ) -> None:
        self._catalog = catalog
        self._publishing = publishing
        self._asks = asks
        self._state = state
        self._bounds = bounds
        self._under_way: set[Tenant] = set()

    async def answer(self, message: wire.WhatIf, caller: Caller) -> Response:
        """Return the consequences of a change.

        Raises:
            ServiceError: The change cannot be read, or the prediction takes too long.
        """
        if message.request is msgspec.UNSET and not message.change:
            reason = "Missing required fields: request or change"
            expected = "a `request`, a `change`, or both"
            return Refusal(Code.MISSING_FIELDS, reason, "request", expected)
        tenant = caller.tenant
        if tenant in self._under_way or len(self._under_way) >= AT_ONCE_MAX:
            reason = f"A what-if of your tenant, or {AT_ONCE_MAX} of other tenants, are under way."
            return Refusal(
                Code.BUSY, reason, expected="the same what-if, once the others are answered"
            )
        self._under_way.add(tenant)
        try:
            return await self._answer(message, caller)
        finally:
            self._under_way.discard(tenant)

    async def _answer(self, message: wire.WhatIf, caller: Caller) -> Response:
        try:
            change, warnings = read_change(message.change), list[str]()
        except BadMessage as error:
            return Refusal(error.code, error.reason, error.field, error.expected, error.details)
        refusal = self._refusal(change)
        if refusal is not None:
            return refusal
        swaps = await self._swaps(change.policies)
        if isinstance(swaps, Refusal):
            return swaps
        ask = None
        if message.request is not msgspec.UNSET:
            ask = await self._ask(caller.tenant, message.request, swaps, warnings)
        if isinstance(ask, Refusal):
            return ask
        packed = await self._pack(change, swaps, ask, caller)
        found = await offline("whatif", packed, SECONDS_MAX)
        return Information({**found, "warnings": warnings})

    def _refusal(self, change: Change) -> Refusal | None:
        """Return why a change is refused, such as an unknown place; None if it is accepted."""
        for number, added in enumerate(change.add_nodes):
            at = f"change.add_nodes[{number}]"
            if bool(added.like) == bool(added.node):
                expected = "a node to be `like`, or a `node` as cluster documents have it"
                reason = f"{at}: expected either {expected}."
                return Refusal(Code.BAD_MESSAGE, reason, at, expected)
            refusal = self._no_place(at, added.cluster, "like", added.like)
            if refusal is not None:
                return refusal
        for mode, number, place in change.places():
            at = f"change.{mode}[{number}]"
            refusal = self._no_place(at, place.cluster, "node", place.node)
            if refusal is not None:
                return refusal
        return None

    def _no_place(self, at: str, cluster: str, part: str, node: str) -> Refusal | None:
        known, places = self._state.clusters.get(ClusterId(cluster)), self._state.fleet.node_ids
        if known is None:
            missing = refusals.no_such_cluster(cluster, self._state.clusters, places)
            return replace(missing, field=f"{at}.cluster")
        if node and all(each.id != node for each in known.nodes):
            names = (each.id for each in known.nodes)
            missing = refusals.no_such_node(cluster, node, names, places)
            return replace(missing, field=f"{at}.{part}")
        return None

    async def _swaps(self, given: dict[str, str]) -> dict[str, PolicyRef] | Refusal:
        swaps: dict[str, PolicyRef] = {}
        for before, after in given.items():
            records = [await self._record(self._version(name)) for name in (before, after)]
            for name, record in zip((before, after), records, strict=True):
                if record is None:
                    known = self._catalog.memory.policy_uris()
                    return replace(unknown_policy(name, known), field="change.policies")
            one, other = records
            assert one is not None
            assert other is not None
            swaps[one.ref.uri] = other.ref
        return swaps

    def _version(self, name: str) -> str:
        alias = self._catalog.aliases.find(name) if name in self._catalog.aliases else None
        return name if alias is None else alias.version

    async def _record(self, uri: str) -> PolicyRecord | None:
        await self._catalog.freshness.fetch(uri, (), Allowance())
        return self._catalog.memory.policy(uri)

    async def _ask(
        self,
        tenant: Tenant,
        message: AllocationRequest,
        swaps: dict[str, PolicyRef],
        warnings: list[str],
    ) -> Ask | Refusal:
        """Return the ask of a request, as admission makes it."""
        if message.policy_rule_uri in self._catalog.aliases:
            version = self._publishing.choose(tenant, message)
            message = structs.replace(message, policy_rule_uri=version)
        uri = message.policy_rule_uri
        if uri in swaps:
            message = structs.replace(message, policy_rule_uri=swaps[uri].uri)
        allowance, fetch = Allowance(), self._catalog.freshness.fetch
        warnings += overridden_fields(message)
        if is_described(message):
            message, found = await self._asks.search_candidates(tenant, message, allowance)
            warnings += found
        wanted = self._asks.wanted(message)
        warnings += await fetch(message.policy_rule_uri, wanted, allowance)
        made = self._asks.ask(tenant, message, warnings)
        return made if isinstance(made, Refusal) else replace(made[0], dry_run=False)

    async def _pack(
        self, change: Change, swaps: dict[str, PolicyRef], ask: Ask | None, caller: Caller
    ) -> bytes:
        """Return the packed job; the state is copied before any other task runs."""
        at = time.time()
        condensed, documents = (
            condense(self._state),
            self._catalog.memory.blobs(self._state.clusters),
        )
        facts, uris = await asyncio.to_thread(_read, condensed)
        if ask is not None:
            facts.append(Queued(ask, at, at))
            uris.add(ask.policy.uri)
        job = {
            "at": at,
            "documents": documents,
            "policies": [
                (each.ref, each.files, {**each.document, "code": ""})
                for uri in sorted(uris | {each.uri for each in swaps.values()})
                if (each := self._catalog.memory.policy(uri)) is not None
            ],
            "change": change,
            "swaps": swaps,
            "asks": ask is not None,
            "tenant": caller.tenant,
            "sees_all": caller.may(Right.READ_ALL),
            **self._bounds,
        }
        return await asyncio.to_thread(_encode, job, facts)


def _read(condensed: Iterable[Fact]) -> tuple[list[Fact], set[str]]:
    """Return the facts without those of ended leases, and the policies that they may consult."""
    facts, uris = list[Fact](), set[str]()
    for fact in condensed:
        match fact:
            case Carried(lease) if lease.over:
                continue
            case Queued(ask):
                uris.add(ask.policy.uri)
            case Carried(lease) if lease.may_start_again:
                uris.add(lease.policy.uri)
            case _:  # Such a fact consults no policy.
                pass
        facts.append(fact)
    return facts, uris


def _encode(job: JsonObject, facts: Sequence[Fact]) -> bytes:
    size, rows = sum(len(each[2]) for each in job["documents"]), list[JsonValue]()
    for number, fact in enumerate(facts, 1):
        row = seal(number, 0.0, fact, 0)
        rows.append(row)
        size += len(row.body)
        if size > JOB_BYTES_MAX:
            reason = (
                f"the requests, leases and clusters here take more than {JOB_BYTES_MAX} bytes, the "
                "most that a what-if copies"
            )
            raise ServiceError(Code.TOO_LARGE, reason)
    return msgspec.msgpack.encode(job | {"facts": rows})
