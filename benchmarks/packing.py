"""Packs the requests of a trace as in published experiments: a policy and an allocator, no daemon.

Every request goes through the production `Allocator`, which consults the policy, verifies what it
proposes and grants or refuses, exactly as in the daemon. Socket, sandbox and ledger are left out,
since they do not affect decisions. `moored replay` sends the same requests to a real daemon.

`placement`, `packing_costs` and the tests of the shipped policies call this module; `churn` uses
its class `Consulting`.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import msgspec

from moorage.bench.grants import read_trace
from moorage.catalog.documents.clusters import read_cluster_document
from moorage.core.allocator import Allocator
from moorage.core.state.facts import Fact, Refusal
from moorage.core.turns.effects import Address, Consult, LeaseNews, Respond
from moorage.core.turns.events import Asked, ClusterSeen, Event, Proposed
from moorage.lab.trace import (
    TraceNode,
    TracePod,
    arrivals,
    capacity_milli,
    cluster_document,
    permute_names,
    typical_of,
)
from moorage.model import Ask, Code, Demand, LeaseTerms, PolicyRef, RequestId, SessionId, Tenant
from moorage.policy import FleetView, Rule
from moorage.sandbox.cell.cluster_data import ClusterData
from moorage_policies import catalog

LEASE_SECONDS: Final = 1e9
"""Seconds of each lease. No lease ends, since the clock stands still."""
FOR_EVER: Final = LeaseTerms(ttl_seconds=LEASE_SECONDS)
FULL: Final = frozenset({Code.NO_CAPACITY, Code.NEVER_FITS})
"""Codes of refusals for a lack of room; all other refusals are errors."""
_NOW: Final = 0.0


FIRST_SEED: Final = 42


@dataclass
class Packing:
    """The result of one run.

    Attributes:
        allocated_percent: GPUs held at the end, in percent of the fleet's.
        allocated_percent_at_100: GPUs held, in percent of the fleet's, when the requests first
            wanted more GPUs in total than the fleet has.
        granted: Requests that were placed.
        declined: Requests that were refused.
        decisions: Calls of the policy; the core refuses a request that fits nowhere without a call.
        seconds: Seconds in the policy's `eval`, over all calls.
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
    """A cluster, the allocator of its capacity, and the data for policies.

    Args:
        metrics: The cluster's metrics document, for policies that read live metrics.
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
        """Return the data for a policy's `input_data["cluster_data"]`."""
        keys = ClusterData.keys_of(tuple(self._entries))
        return ClusterData(keys, self._entries.get, self.allocator.state.fleet)


class Consulting:
    """An allocator that calls a policy in this process.

    Args:
        site: The nodes that are allocated.

    Attributes:
        answers: The core's answers by the number of the message; the caller removes them.
        decisions: Calls of the policy; the core refuses a request that fits nowhere without a call.
        seconds: Seconds in the policy's `eval`, over all calls.
    """

    def __init__(
        self, policy: Rule, site: Site, parameters: Mapping[str, Any] | None = None
    ) -> None:
        self._policy, self._site = policy, site
        self._parameters, self._context = dict(parameters or {}), dict[str, Any]()
        self.answers: dict[int, LeaseNews | Refusal] = {}
        self.decisions = 0
        self.seconds = 0.0

    def step(self, event: Event, now: float) -> list[Fact]:
        """Handle one event, and call the policy where the core needs it; return the facts."""
        allocator, facts = self._site.allocator, list[Fact]()
        turns = [allocator.step(event, now)]
        for turn in turns:
            facts += turn.facts
            for effect in turn.effects:
                if isinstance(effect, Respond):
                    assert isinstance(effect.answer, LeaseNews | Refusal)
                    self.answers[effect.to.number] = effect.answer
                elif isinstance(effect, Consult):
                    turns.append(allocator.step(self._proposal(effect), now))
        return facts

    def _proposal(self, consult: Consult) -> Proposed:
        ask, fleet = consult.ask, self._site.allocator.state.fleet
        input_data = {
            "cluster_data": self._site.cluster_data(),
            "inputs": ask.inputs,
            "resources": {name: getattr(ask.demand, name) for name in Demand.__struct_fields__},
            "fleet": FleetView(fleet, ask.demand, None, consult.reserved),
            "seed": ask.seed,
        }
        start = time.perf_counter()
        value = self._policy.eval(self._parameters, input_data, self._context)
        self.seconds += time.perf_counter() - start
        self.decisions += 1
        return Proposed(ask.id, consult.consultation, value)


def openb(nodes: Sequence[TraceNode], seed: int, **metrics: Any) -> Site:
    """Return a site with the nodes of a trace, in the random order of `permute_names`."""
    return Site(cluster_document(nodes, names=permute_names(nodes, seed)), **metrics)


def pack(
    policy: Rule,
    site: Site,
    pods: Sequence[TracePod],
    parameters: Mapping[str, Any] | None = None,
    seed: int = 42,
) -> Packing:
    """Place the requests one by one; none of them ends.

    Args:
        policy: The policy; it may have placed other requests before.
        site: The nodes on which the requests are placed.
        pods: The requests in the order of their arrival.
        parameters: The policy's merged parameters.
        seed: Seed of the requests' own seeds.

    Raises:
        ValueError: A request was refused for another reason than a lack of room: the policy's
            proposal did not fit, or it declined a request that fits.
    """
    packing, state = Packing(), site.allocator.state
    consulting = Consulting(policy, site, parameters)
    capacity = int(state.fleet.gpu_total.sum())
    held = held_at_100 = arrived = 0
    for number, pod in enumerate(pods):
        before = arrived
        arrived += pod.demand_milli
        event = Asked(Address(SessionId("trace"), number), request(number, pod, seed))
        consulting.step(event, _NOW)
        answer = consulting.answers.pop(number)
        if isinstance(answer, LeaseNews):
            packing.granted += 1
            held += pod.demand_milli
        elif answer.code in FULL:
            packing.declined += 1
        else:
            raise ValueError(f"{pod.name}: {answer.code}: {answer.reason} {dict(answer.details)}")
        if before <= capacity:
            held_at_100 = held
    if capacity:
        packing.allocated_percent = 100 * (capacity - int(state.fleet.gpu_free.sum())) / capacity
        packing.allocated_percent_at_100 = 100 * held_at_100 / capacity
    packing.decisions, packing.seconds = consulting.decisions, consulting.seconds
    return packing


def request(number: int, pod: TracePod, seed: int, terms: LeaseTerms = FOR_EVER) -> Ask:
    """Return a request of the trace as a request of the core.

    Args:
        number: The request's number in the order of arrival, which is also its name.
        pod: The requested resources.
        seed: Seed from which the request's own seed is derived.
        terms: Terms of the request's lease.
    """
    return Ask(
        id=RequestId(str(number)),
        tenant=Tenant("trace"),
        policy=PolicyRef("packing:1.0-trial", "0" * 64),
        demand=Demand(**{**pod.resources(), "models": pod.models}),
        terms=terms,
        inputs={},
        seed=(seed << 32) + number,
    )


def packing_costs(
    nodes: Path | None = None, pods: Path | None = None, seeds: int = 5
) -> dict[str, float]:
    """Run every shipped policy over a trace, once per seed.

    Args:
        nodes: Node file of a trace; None: a generated fleet like openb's.
        pods: Request file of the trace; None: generated requests.
        seeds: Number of seeds, from 42 on.
    """
    machines, wanted = read_trace(nodes, pods)
    runs = [(name, name, typical_of(name, wanted)) for name in catalog.shipped()]
    runs += [(f"{name}_learning", name, {}) for name, _, typical in runs if typical]
    capacity = capacity_milli(machines)
    figures: dict[str, float] = {}
    baseline = 0.0
    for label, name, parameters in runs:
        outcomes = []
        for seed in range(FIRST_SEED, FIRST_SEED + seeds):
            policy = import_module(f"moorage_policies.{name}").AIOSv1PolicyRule("", {}, parameters)
            order = arrivals(wanted, capacity, 1.3, seed)
            outcomes.append(pack(policy, openb(machines, seed), order, parameters, seed))
        each = fmean(outcome.microseconds_per_decision for outcome in outcomes)
        baseline = baseline or each
        figures[f"{label}_to_first_fit"] = each / baseline
        figures[f"{label}_allocated_percent"] = fmean(one.allocated_percent for one in outcomes)
    return figures
