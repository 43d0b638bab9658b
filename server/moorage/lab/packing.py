"""The published packing protocol in one process: a policy, the allocator's core and a trace.

Every request goes through the production `Allocator`, which consults the policy, verifies what it
proposes and grants or refuses, exactly as in the daemon. What is left out is what does not decide:
socket, sandbox and ledger. `moored replay` asks the same questions of a real daemon.

Called by `placement`, by the tests of the shipped policies and by
tests/benchmarks/bench_policies.py.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from moorage.catalog.documents.clusters import read_cluster_document
from moorage.core.allocator import Allocator
from moorage.core.effects import Address, Consult, LeaseNews, Respond
from moorage.core.events import Asked, ClusterSeen, Proposed
from moorage.core.facts import Refusal
from moorage.lab.trace import TraceNode, TracePod, cluster_document, permuted_names
from moorage.model import Ask, Code, Demand, LeaseTerms, PolicyRef, RequestId, SessionId, Tenant
from moorage.policy import FleetView, Rule
from moorage.sandbox.cell.cluster_data import ClusterData

LEASE_SECONDS: Final = 1e9
"""Nothing departs: the clock of a packing stands still."""
_FULL: Final = frozenset({Code.NO_CAPACITY, Code.NEVER_FITS})
_NOW: Final = 0.0


@dataclass
class Packing:
    """What one run came to.

    Attributes:
        allocated_percent: GPU milli held at the end, in percent of the fleet's.
        allocated_percent_at_100: The same when the GPU demand that had arrived first exceeded
            the capacity.
        granted: Requests that were placed.
        declined: Requests that were not, and were gone.
        decisions: Consultations of the policy; a request that fits nowhere needs none.
        seconds: Time inside `eval`, over all decisions.

    """

    allocated_percent: float = 0.0
    allocated_percent_at_100: float = 0.0
    granted: int = 0
    declined: int = 0
    decisions: int = 0
    seconds: float = 0.0

    @property
    def microseconds_per_decision(self) -> float:
        """The mean time of one `eval`."""
        return 1e6 * self.seconds / max(1, self.decisions)


class Site:
    """A cluster, the allocator that gives it away, and what policies may read of it.

    Args:
        document: The cluster document.
        metrics: Its metrics document, for policies that look at live metrics.

    """

    def __init__(
        self, document: Mapping[str, Any], metrics: Mapping[str, Any] | None = None
    ) -> None:
        registered = read_cluster_document(document)
        entry = {"data": registered.document, "cluster_metrics": metrics}
        self._entries = {str(registered.id): msgspec.msgpack.encode(entry)}
        self.allocator = Allocator()
        self.allocator.step(ClusterSeen(registered.cluster), _NOW)

    def cluster_data(self) -> ClusterData:
        """Return what a policy finds in `input_data["cluster_data"]`."""
        keys = ClusterData.keys_of(tuple(self._entries))
        return ClusterData(keys, lambda _: self._entries, self.allocator.state.fleet)


def openb(nodes: Sequence[TraceNode], seed: int, **metrics: Any) -> Site:
    """Return a site with the nodes of a trace, in the random order of `permuted_names`."""
    return Site(cluster_document(nodes, names=permuted_names(nodes, seed)), **metrics)


def pack(
    policy: Rule,
    site: Site,
    pods: Sequence[TracePod],
    parameters: Mapping[str, Any] | None = None,
    seed: int = 42,
) -> Packing:
    """Place the requests one by one; none ends.

    Args:
        policy: The policy, fresh or warm.
        site: Where to; it is filled.
        pods: The requests in the order of their arrival.
        parameters: The policy's merged parameters.
        seed: From which the seed of every single request comes.

    Raises:
        ValueError: A request was refused for another reason than that there is no room: the
            policy proposed what does not fit, or declined what does.

    """
    packing, state = Packing(), site.allocator.state
    capacity = int(state.fleet.gpu_total.sum())
    given, context = dict(parameters or {}), dict[str, Any]()
    held = held_at_100 = arrived = 0
    for number, pod in enumerate(pods):
        before = arrived
        arrived += pod.demand_milli
        answer = _ask(policy, site, _request(number, pod, seed), given, context, packing)
        if isinstance(answer, LeaseNews):
            packing.granted += 1
            held += pod.demand_milli
        elif answer.code in _FULL:
            packing.declined += 1
        else:
            raise ValueError(f"{pod.name}: {answer.code}: {answer.reason} {dict(answer.details)}")
        if before <= capacity:
            held_at_100 = held
    if capacity:
        packing.allocated_percent = 100 * (capacity - int(state.fleet.gpu_free.sum())) / capacity
        packing.allocated_percent_at_100 = 100 * held_at_100 / capacity
    return packing


def _request(number: int, pod: TracePod, seed: int) -> Ask:
    return Ask(
        id=RequestId(str(number)),
        tenant=Tenant("trace"),
        policy=PolicyRef("packing:1.0-trial", "0" * 64),
        demand=Demand(**{**pod.resources(), "models": pod.models}),
        terms=LeaseTerms(ttl_seconds=LEASE_SECONDS),
        inputs={},
        seed=(seed << 32) + number,
    )


def _ask(
    policy: Rule,
    site: Site,
    ask: Ask,
    parameters: dict[str, Any],
    context: dict[str, Any],
    packing: Packing,
) -> LeaseNews | Refusal:
    """Take one request through the allocator, answering its consultations."""
    allocator = site.allocator
    turn = allocator.step(Asked(Address(SessionId("trace"), 0), ask), _NOW)
    while True:
        for effect in turn.effects:
            if isinstance(effect, Respond):
                assert isinstance(effect.answer, LeaseNews | Refusal)
                return effect.answer
        (consult,) = (effect for effect in turn.effects if isinstance(effect, Consult))
        input_data = {
            "cluster_data": site.cluster_data(),
            "inputs": ask.inputs,
            "resources": {name: getattr(ask.demand, name) for name in Demand.__slots__},
            "fleet": FleetView(allocator.state.fleet, ask.demand, None, consult.reserved),
            "seed": ask.seed,
        }
        start = time.perf_counter()
        value = policy.eval(parameters, input_data, context)
        packing.seconds += time.perf_counter() - start
        packing.decisions += 1
        turn = allocator.step(Proposed(ask.id, consult.consultation, value), _NOW)
