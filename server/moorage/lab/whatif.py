"""What-if: applies changes to a copy of a server's state, and returns the effects.

The daemon starts it as a separate program (`lab.offline`), and sends it the state as the facts of
a checkpoint. The core, the jail and the policies are those of the daemon. No workloads run here,
and a workload that has to stop counts as stopped at once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
from msgspec.structs import replace

from moorage.catalog.documents.clusters import read_cluster_document
from moorage.catalog.documents.policies import record_from
from moorage.core.allocator import Allocator
from moorage.core.reports.explain import refusal_object
from moorage.core.state.facts import Carried, Fact, Granted, Preempted, Queued, Refusal
from moorage.core.turns.effects import Address, Advice, Information, LeaseNews, Respond, Stop
from moorage.core.turns.events import (
    ClusterSeen,
    CordonAsked,
    Event,
    Inquired,
    QuotaAsked,
    WorkloadStopped,
)
from moorage.core.turns.turn import Turn
from moorage.daemon.policies.finder import code_of
from moorage.lab.rehearsal import SESSION, Rehearsal
from moorage.ledger.codec import unseal
from moorage.model import Ask, Cluster, ClusterId, Lease, Node, NodeId, PolicyRef, RequestId, Tenant
from moorage.protocol.changes import AddedNodes, Change, CordonMode
from moorage.protocol.faults import ServiceError
from moorage.records.json_values import JsonObject, JsonValue
from moorage.sandbox.host import contract
from moorage.sandbox.host.contract import Mode
from moorage.sandbox.host.sandbox import Limits
from moorage.storage.base import FactRow

SHOWN_MAX: Final = 1_000
"""Maximum entries of each list in the answer; further entries are only counted."""
_NOBODY: Final = Tenant("what-if")
_NOWHERE: Final = Address(SESSION, 0)


@dataclass(frozen=True, slots=True)
class WhatIfJob:
    """The change to make, and the request to decide.

    Args:
        at: Time of the state, in seconds since the epoch.
        facts: The state; if `asks`, the last fact is a `Queued` with the request.
        documents: Cluster documents for policies: id, version and content.
        policies: The policies that may be consulted: reference, files and document.
        change: The change; `swaps` has its policies, by the URI of the policy that each replaces.
        asks: Whether there is a request to decide.
        sees_all: Whether the answer names leases and requests of other tenants.
        mode: The isolation of policies, as in `moored serve --sandbox`.
        limits: Limits of one evaluation and its cell.
        overtaken_max: Number of later requests that may overtake a waiting request.
    """

    at: float
    facts: list[FactRow]
    documents: list[tuple[str, int, bytes]]
    policies: list[tuple[PolicyRef, dict[str, bytes], JsonObject]]
    change: Change
    swaps: dict[str, PolicyRef]
    asks: bool
    tenant: Tenant
    sees_all: bool
    mode: Mode
    limits: Limits
    overtaken_max: int


async def whatif(job: WhatIfJob) -> JsonObject:
    """Return the effects of a change.

    Raises:
        ServiceError: A node that would be added cannot be read.
        JailError: This machine has no jail.
    """
    facts = [_swap(unseal(row, "the job").fact, job.swaps) for row in job.facts]
    ask = None
    if job.asks:
        queued = facts.pop()
        assert isinstance(queued, Queued)
        ask = queued.ask
    documents = CopiedDocuments(job.documents)
    world = _World(job, documents)
    world.allocator.replay(facts)
    async with world:
        for ref, files, document in job.policies:
            world.use(code_of(record_from(ref, files, document)))
        for number, added in enumerate(job.change.add_nodes):
            field = f"change.add_nodes[{number}].node"
            await world.step(ClusterSeen(_grow(world.allocator, documents, added, field)))
        for quota in job.change.quotas:
            about = (Tenant(quota.tenant), quota.project)
            wanted = None if quota.remove else quota.quota()
            await world.step(QuotaAsked(None, _NOBODY, *about, wanted))
        leaving: dict[RequestId, Lease] = {}
        for mode, _, place in job.change.places():
            left = await world.cordon(ClusterId(place.cluster), NodeId(place.node), mode)
            leaving |= left if mode == "drain" else {}
        outcome = _Outcome(job, world)
        answer = None if ask is None else await outcome.answer(ask)
    return {"at": job.at, "answer": answer, **outcome.rows(ask, leaving)}


class _World(Rehearsal):
    """Decides on a copy of the state, in which workloads stop as soon as they have to."""

    def __init__(self, job: WhatIfJob, documents: "CopiedDocuments") -> None:
        super().__init__(job.mode, job.limits, services=documents)
        self.now = job.at
        self.allocator = Allocator(0.0, job.overtaken_max)
        self.facts: list[Fact] = []
        self._stopping: list[Lease] = []
        self._said: JsonObject = {}

    async def step(self, event: Event) -> None:
        """Step the core, and carry out all effects."""
        await super().step(event)
        while self._stopping:
            lease = self._stopping.pop(0)
            await super().step(WorkloadStopped(lease.id, lease.fencing))

    async def cordon(
        self, cluster: ClusterId, node: NodeId, mode: CordonMode
    ) -> dict[RequestId, Lease]:
        """Cordon, drain or uncordon a node or cluster; return its leases that are not warm."""
        held = [
            lease
            for lease in self.allocator.state.leases.values()
            if any(
                share.cluster_id == cluster and node in {"", share.node_id}
                for share in lease.placement
            )
        ]
        await self.step(CordonAsked(_NOWHERE, _NOBODY, cluster, node, mode))
        return {lease.id: lease for lease in held if lease.state != "warm"}

    async def why(self, ask: Ask) -> JsonObject:
        """Return the reason why a request waits."""
        await self.step(Inquired(_NOWHERE, "why", ask.tenant, ask.id))
        return {name: each for name, each in self._said.items() if name in {"code", "reason"}}

    def _carry_out(self, event: Event, turn: Turn) -> None:
        self.facts += turn.facts
        self._stopping += [each.lease for each in turn.effects if isinstance(each, Stop)]
        for effect in turn.effects:
            if isinstance(effect, Respond) and isinstance(effect.answer, Information):
                self._said = dict(effect.answer.data)
        super()._carry_out(event, turn)


class CopiedDocuments:
    """Serves the cluster documents, copied together with the state, to policies.

    Args:
        packed: Id, version and content of each document.
    """

    def __init__(self, packed: Sequence[tuple[str, int, bytes]]) -> None:
        self._packed = {name: contract.Document(name, each, blob) for name, each, blob in packed}

    async def call(
        self, client: str, method: contract.Method, arguments: tuple[JsonValue, ...]
    ) -> JsonValue:
        """Answer a call of a policy's client about one cluster."""
        del client
        found = self._packed.get(str(arguments[0]))
        if method not in {"read_cluster", "get_cluster"}:
            reason = f"a what-if does not support {method}"
            raise contract.CallRefusedError(reason, 503)
        part = "data" if method == "read_cluster" else "cluster_metrics"
        content = None if found is None else msgspec.msgpack.decode(found.blob)[part]
        if content is None:
            raise contract.CallRefusedError(f"the what-if has no data about {arguments[0]}", 404)
        return content

    def at_hand(
        self, client: str, method: contract.Method, ids: Sequence[str]
    ) -> Mapping[str, bytes]:
        """Return nothing: all documents are read by `call`."""
        del client, method, ids
        return {}

    def documents(self, cluster_ids: Sequence[str]) -> Sequence[contract.Document]:
        """Return the packed documents of clusters."""
        return [self._packed[name] for name in cluster_ids if name in self._packed]

    def node(self, cluster: str, name: str) -> JsonObject | None:
        """Return the description of a node in a cluster's document, if there is one."""
        for each in self._nodes(cluster)[1]:
            if str(each.get("id")) == name:
                return each
        return None

    def add(self, cluster: str, nodes: Sequence[JsonObject]) -> None:
        """Describe more nodes in a cluster's document."""
        content, listed = self._nodes(cluster)
        if content is not None:
            listed += nodes
            old = self._packed[cluster]
            blob = msgspec.msgpack.encode(content)
            self._packed[cluster] = contract.Document(cluster, old.version + 1, blob)

    def _nodes(self, cluster: str) -> tuple[JsonObject | None, list[JsonObject]]:
        known = self._packed.get(cluster)
        content: JsonObject | None = None if known is None else msgspec.msgpack.decode(known.blob)
        listed = ((content or {}).get("data", {}).get("nodes") or {}).get("nodeData")
        return content, listed if isinstance(listed, list) else []


def _grow(
    allocator: Allocator, documents: CopiedDocuments, added: AddedNodes, place: str
) -> Cluster:
    """Return a cluster with additional nodes, which are new, free machines.

    Raises:
        ServiceError: The added node cannot be read; the error names its field below `place`.
    """
    cluster = allocator.state.clusters[ClusterId(added.cluster)]
    known = {node.id: node for node in cluster.nodes}
    if added.like:
        model = known[NodeId(added.like)]
        described = documents.node(cluster.id, added.like)
    else:
        described = {"id": "node", **added.node}
        described["id"] = str(described["id"])
        nodes = {"nodeData": [described], "count": 1}
        try:
            model = read_cluster_document({"id": cluster.id, "nodes": nodes}).cluster.nodes[0]
        except ServiceError as error:
            reason, field = (
                text.replace("nodes.nodeData[0]", place) for text in (error.reason, error.field)
            )
            raise ServiceError(error.code, reason, field=field, expected=error.expected) from None
    bare: JsonObject = {"identity": (), "duplicate_of": "", "unavailable": ""}
    more: list[Node] = []
    number = 0
    while len(more) < added.count:
        number += 1
        name = NodeId(f"{model.id}+{number}")
        if name not in known:
            more.append(replace(model, id=name, **bare))
    if described is not None:
        documents.add(cluster.id, [{**described, "id": node.id} for node in more])
    return replace(cluster, nodes=(*cluster.nodes, *more))


def _swap(fact: Fact, swaps: Mapping[str, PolicyRef]) -> Fact:
    """Return a fact in which one policy replaces another."""
    match fact:
        case Queued(ask) if ask.policy.uri in swaps:
            return replace(fact, ask=replace(ask, policy=swaps[ask.policy.uri]))
        case Carried(lease) if lease.ask is not None and lease.ask.policy.uri in swaps:
            other = swaps[lease.ask.policy.uri]
            ask = replace(lease.ask, policy=other)
            return Carried(replace(lease, ask=ask, policy=other))
        case _:  # The fact names no policy to replace.
            return fact


class _Outcome:
    """Collects the effects of a what-if, as JSON values for the caller."""

    def __init__(self, job: WhatIfJob, world: _World) -> None:
        self._job = job
        self._world = world
        self._state = world.allocator.state
        self._others: dict[str, int] = {}
        self._other_tenants: set[Tenant] = set()

    async def answer(self, ask: Ask) -> JsonObject:
        """Decide the request; return its answer."""
        row: JsonObject = {"request": ask.id}
        answer = (await self._world.ask(ask)).answer
        match answer:
            case LeaseNews(lease):
                return row | {"state": "granted", "placement": self._placement(lease)}
            case Advice(data):
                return row | {"state": "advised", "data": data}
            case Refusal():
                return row | {"state": "refused", **refusal_object(answer)}
            case _:  # None: the request waits in the queue.
                position = self._world.allocator.requests.queue.positions([ask.id])[ask.id]
                row |= {"state": "waiting", "position": position}
                return await self._world.why(ask) | row

    def rows(self, ask: Ask | None, leaving: Mapping[RequestId, Lease]) -> JsonObject:
        """Return the effects on leases and other requests."""
        granted: list[JsonObject] = []
        preempted: list[JsonObject] = []
        for fact in self._world.facts:
            match fact:
                case Granted(lease) if lease.id not in leaving and (not ask or lease.id != ask.id):
                    row: JsonObject = {"request": lease.id, "placement": self._placement(lease)}
                    self._add(granted, "granted", lease.tenant, row)
                case Preempted(lease_id, _, by, until):
                    tenant = self._tenant(lease_id)
                    shown = self._shows(self._tenant(by))
                    row = {"lease": lease_id, "by": by if shown else "", "until": until}
                    self._add(preempted, "preempted", tenant, row)
                case _:  # Neither a grant nor a preemption.
                    pass
        drained: list[JsonObject] = []
        for lease in leaving.values():
            self._add(drained, "drained", lease.tenant, self._outcome_of_drain(lease))
        moved: JsonObject = {"granted": granted, "preempted": preempted, "drained": drained}
        return moved | {"others": self._others, "other_tenants": len(self._other_tenants)}

    def _add(self, rows: list[JsonObject], kind: str, tenant: Tenant, row: JsonObject) -> None:
        if not self._shows(tenant):
            self._other_tenants.add(tenant)
        elif len(rows) < SHOWN_MAX:
            rows.append(row)
            return
        self._others[kind] = self._others.get(kind, 0) + 1

    def _shows(self, tenant: Tenant) -> bool:
        return self._job.sees_all or tenant == self._job.tenant

    def _outcome_of_drain(self, before: Lease) -> JsonObject:
        """Return the effects of a drain on a lease."""
        lease = self._state.leases.get(before.id)
        if lease is None:
            waits = before.id in self._state.waiting
            return {"lease": before.id, "becomes": "waits" if waits else "ends"}
        if lease.fencing == before.fencing:
            return {"lease": before.id, "becomes": "stays"}
        return {"lease": before.id, "becomes": "moves", "placement": self._placement(lease)}

    def _tenant(self, lease: RequestId) -> Tenant:
        found = self._state.lease(lease)
        return Tenant("") if found is None else found.tenant

    def _placement(self, lease: Lease) -> list[JsonObject]:
        placed: list[JsonObject] = msgspec.to_builtins(lease.placement)
        return placed
