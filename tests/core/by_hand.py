"""Helpers to drive the allocator step by step."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from msgspec import json
from msgspec.structs import replace

from moorage.catalog.documents.clusters import cluster_model
from moorage.core.allocator import Allocator
from moorage.core.state.facts import Fact
from moorage.core.turns.effects import Address, Consult, Information, Respond
from moorage.core.turns.events import (
    Asked,
    ClusterSeen,
    Event,
    Inquired,
    Proposed,
    ReleaseAsked,
    Tick,
)
from moorage.core.turns.turn import Turn
from moorage.model import (
    Ask,
    Cluster,
    ClusterId,
    Demand,
    Gpu,
    LeaseTerms,
    Node,
    NodeId,
    PolicyRef,
    RequestId,
    SessionId,
    Tenant,
)

POLICY = PolicyRef("rule", "digest")


def nodes(count: int, gpus: int, name: str = "c") -> Cluster:
    devices = tuple(Gpu(str(number), "A100", 81_920) for number in range(gpus))
    names = [f"n{number:03}" for number in range(count)]
    return Cluster(ClusterId(name), tuple(Node(NodeId(n), 64_000, 65_536, devices) for n in names))


def lab(*uuids: str, node: str = "n1", cluster: str = "c", **gpu: object) -> Cluster:
    """Return a cluster of one node; `a/b` is MIG instance b of GPU a, "" a GPU without UUID."""
    gpus = []
    for each in uuids:
        parent, _, uuid = each.rpartition("/")
        known = {"uuid": f"GPU-{uuid}"} if uuid else {}
        known |= {"parentUuid": f"GPU-{parent}"} if parent else {}
        gpus.append({"modelName": "L4", "memory": 24_000, **known, **gpu})
    row = {"id": node, "vcpus": {"count": 64}, "memory": 65_536, "gpus": {"gpus": gpus}}
    return cluster_model({"id": cluster, "nodes": {"nodeData": [row]}})


def both(*clusters: Cluster) -> Cluster:
    return replace(clusters[0], nodes=tuple(node for each in clusters for node in each.nodes))


def ask(name: str, demand: Demand | None, wait: float = 0.0, **changes: Any) -> Ask:
    terms = {"ttl_seconds": 60.0, "wait_seconds": wait, **changes.pop("terms", {})}
    given = {
        "tenant": Tenant("ann"),
        "policy": POLICY,
        "token_digest": f"token of {name}",
    } | changes
    return Ask(RequestId(name), demand=demand, terms=LeaseTerms(**terms), **given)


def place(node: str, *gpus: str, **more: Any) -> dict[str, Any]:
    return {"cluster_id": "c", "node_id": node, "gpus": list(gpus), **more}


@dataclass
class Hand:
    """Drives an allocator by a clock that the test sets, and records answers and effects."""

    allocator: Allocator = field(default_factory=Allocator)
    now: float = 0.0
    facts: list[Fact] = field(default_factory=list)
    numbers: Iterator[int] = field(default_factory=lambda: iter(range(1, 10**9)))

    @classmethod
    def seeing(cls, cluster: Cluster) -> "Hand":
        """Return a hand over an allocator that knows one cluster."""
        hand = cls()
        hand.see(cluster)
        return hand

    def step(self, event: Event) -> Turn:
        turn = self.allocator.step(event, self.now)
        self.facts += turn.facts
        return turn

    def tick(self, at: float) -> Turn:
        """Set the clock, and let the allocator notice it."""
        self.now = at
        return self.step(Tick())

    def to(self, session: str = "s") -> Address:
        return Address(SessionId(session), next(self.numbers))

    def see(self, cluster: Cluster) -> Turn:
        return self.step(ClusterSeen(cluster))

    def ask(self, request: Ask, session: str = "s") -> Turn:
        return self.step(Asked(self.to(session), request))

    def propose(self, turn: Turn, value: Any) -> Turn:
        consult = next(effect for effect in turn.effects if isinstance(effect, Consult))
        return self.step(Proposed(consult.ask.id, consult.consultation, value))

    def grant(self, request: Ask, value: Any) -> Turn:
        return self.propose(self.ask(request), value)

    def release(self, name: str) -> Turn:
        return self.step(ReleaseAsked(self.to(), RequestId(name), f"token of {name}"))

    def inquire(self, question: Any, tenant: str = "ann", **more: Any) -> Any:
        turn = self.step(Inquired(self.to(), question, Tenant(tenant), **more))
        (effect,) = turn.effects
        return plain(effect.answer.data) if is_told(effect) else effect  # type: ignore[union-attr]  # Plain values in tests.


def plain(value: Any) -> Any:
    """Return a value as clients decode it."""
    return json.decode(json.encode(value))


def is_told(effect: Any) -> bool:
    return isinstance(effect, Respond) and isinstance(effect.answer, Information)


def answers(turn: Turn) -> list[Any]:
    return [effect.answer for effect in turn.effects if isinstance(effect, Respond)]


def consults(turn: Turn) -> list[str]:
    return [effect.ask.id for effect in turn.effects if isinstance(effect, Consult)]
