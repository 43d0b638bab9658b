"""The published packing protocol in one process: a rule, a fleet and a trace, nothing between.

Called by the tests of the shipped rules and by tests/benchmarks/bench_policies.py, where the rule
alone is the subject. `moored replay` asks the same questions of a real daemon over a socket.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moorage.model import Cluster, ClusterId, Demand, Gpu, Node, NodeId
from moorage.policy import Fleet, FleetView, Rule, parse_proposal
from moorage.trials.trace import TraceNode, TracePod, permuted_names


@dataclass
class Packing:
    """What one run came to.

    Attributes:
        allocated_percent: GPU milli held at the end, in percent of the fleet's.
        granted: Requests that were placed.
        declined: Requests that were not, and were gone.
        seconds: Time inside `eval`, over all requests.

    """

    allocated_percent: float = 0.0
    granted: int = 0
    declined: int = 0
    seconds: float = 0.0

    @property
    def microseconds_per_decision(self) -> float:
        """The mean time of one `eval`."""
        return 1e6 * self.seconds / max(1, self.granted + self.declined)


def fleet_of(nodes: Sequence[TraceNode], seed: int) -> Fleet:
    """Return the empty fleet, its nodes in the random order of `permuted_names`."""
    names = permuted_names(nodes, seed)
    members = tuple(
        Node(
            id=NodeId(names[node.name]),
            cpu_milli=node.cpu_milli,
            memory_mib=node.memory_mib,
            gpus=tuple(Gpu(id=str(index), model=node.model) for index in range(node.gpus)),
        )
        for node in nodes
    )
    fleet = Fleet()
    fleet.install([Cluster(id=ClusterId("openb"), nodes=members)])
    return fleet


def pack(
    rule: Rule,
    fleet: Fleet,
    pods: Sequence[TracePod],
    parameters: Mapping[str, Any] | None = None,
    seed: int = 42,
) -> Packing:
    """Place the requests one by one; none ends.

    Args:
        rule: The rule, fresh or warm.
        fleet: Where to; it is filled.
        pods: The requests in the order of their arrival.
        parameters: The rule's merged parameters.
        seed: From which the seed of every single request comes.

    Raises:
        ValueError: The rule proposed what does not fit, or left a choice open.

    """
    packing = Packing()
    given, context = dict(parameters or {}), dict[str, Any]()
    for number, pod in enumerate(pods):
        demand = Demand(**{**pod.resources(), "models": pod.models})
        input_data = {
            "fleet": FleetView(fleet, demand),
            "inputs": {},
            "seed": (seed << 32) + number,
        }
        start = time.perf_counter()
        value = rule.eval(given, input_data, context)
        packing.seconds += time.perf_counter() - start
        wishes = parse_proposal(value, demand)
        for wish in wishes:
            share = wish.share()
            row = fleet.row(wish.cluster_id, wish.node_id or "")
            if share is None or row is None or len(share.gpus) != demand.gpus:
                raise ValueError(f"{pod.name}: {value} is no complete placement")
            fleet.take(share)
            cpu, memory, gpus = fleet.capacity(row)
            if min(cpu, memory, *gpus) < 0:
                raise ValueError(f"{pod.name}: {value} does not fit")
        packing.granted += bool(wishes)
        packing.declined += not wishes
    total, free = int(fleet.gpu_total.sum()), int(fleet.gpu_free.sum())
    packing.allocated_percent = 100 * (total - free) / total if total else 0.0
    return packing
