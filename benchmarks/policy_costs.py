"""`rules`: the cost of a shipped policy's decision in its jail, and how well the policy packs.

Each policy gets the same requests of a trace, one after the other. The production allocator calls
the policy in a jailed process (a cell). No lease ends. Socket and ledger are left out, since they
cost the same for all policies.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import uvloop

from benchmarks.packing import LEASE_SECONDS, Site, openb
from moorage.backends.local.supervisor import descendants
from moorage.core.state.facts import Refusal
from moorage.core.turns.effects import Address, Consult, LeaseNews, Respond
from moorage.core.turns.events import Asked, ConsultFailed, Proposed
from moorage.core.turns.turn import Turn
from moorage.lab import trace
from moorage.lab.errors import CommandError
from moorage.lab.trace import typical_of
from moorage.model import Ask, Demand, LeaseTerms, PolicyRef, RequestId, SessionId, Tenant
from moorage.sandbox.host.processes import cpu_seconds
from moorage.sandbox.host.sandbox import Document, PolicyCode, Sandbox
from moorage_policies import catalog

POLICIES: Final[dict[str, tuple[str, bool, dict[str, Any]]]] = {
    "first_fit": ("first_fit", False, {}),
    "fgd": ("fgd", True, {}),
    "expected_fill": ("expected_fill", True, {}),
    "expected_fill_unpriced": ("expected_fill", True, {"prices": False}),
    "fgd_learning": ("fgd", False, {}),
    "expected_fill_learning": ("expected_fill", False, {}),
}
"""By name of the figures: the policy, whether it gets typical requests, and its parameters."""
BASELINE: Final = "fgd"
SEED: Final = 42
ANSWER_SECONDS_MAX: Final = 20.0
"""Maximum seconds of one decision; the sandbox ends a decision much earlier."""
_NOW: Final = 0.0


@dataclass
class Cost:
    """The result of one policy.

    Attributes:
        seconds: Seconds from each consultation to its proposal.
        cpu_seconds: CPU time of the sandbox's processes, from the first request to the last.
        allocated_percent: GPUs held at the end, in percent of the fleet's.
    """

    seconds: list[float] = field(default_factory=list[float])
    cpu_seconds: float = 0.0
    allocated_percent: float = 0.0

    def microseconds(self, share: float) -> float:
        """Return a quantile of the decisions' durations, in microseconds."""
        ranked = sorted(self.seconds)
        return 1e6 * ranked[min(int(share * len(ranked)), len(ranked) - 1)]


def policies(nodes: Sequence[trace.TraceNode], pods: Sequence[trace.TracePod]) -> dict[str, Any]:
    """Measure the cost of decisions in the jail while a fleet fills, relative to `fgd`.

    The CPU time counts only the cell: the evaluation, its copy of the fleet, and its messages.
    The latencies also depend on other programs on the machine.

    Args:
        nodes: The fleet.
        pods: Requests; they are drawn until they request 1.3 times the fleet.

    Raises:
        CommandError: A policy failed.
    """
    order = trace.arrivals(pods, trace.capacity_milli(nodes), 1.3, SEED)
    costs: dict[str, Cost] = {}
    for figure, (name, described, more) in POLICIES.items():
        parameters = {**(typical_of(name, pods) if described else {}), **more}
        costs[figure] = uvloop.run(_cost(name, parameters, openb(nodes, SEED), order))
    figures: dict[str, Any] = {"nodes": len(nodes), "requests": len(order)}
    each = {name: cost.cpu_seconds / len(cost.seconds) for name, cost in costs.items()}
    for name, cost in costs.items():
        figures |= {
            f"{name}_cpu_microseconds": 1e6 * each[name],
            f"{name}_cpu_to_{BASELINE}": each[name] / each[BASELINE],
            f"{name}_p50_microseconds": cost.microseconds(0.5),
            f"{name}_p99_microseconds": cost.microseconds(0.99),
            f"{name}_allocated_percent": cost.allocated_percent,
        }
    return figures


async def _cost(
    name: str, parameters: Mapping[str, Any], site: Site, pods: Sequence[trace.TracePod]
) -> Cost:
    fleet = site.allocator.state.fleet
    capacity, cost = int(fleet.gpu_total.sum()), Cost()
    jailed = JailedSite(name, parameters, site)
    await jailed.sandbox.start()
    try:
        before = sum(map(cpu_seconds, descendants()))
        for number, pod in enumerate(pods):
            await jailed.place(number, pod, cost)
        cost.cpu_seconds = sum(map(cpu_seconds, descendants())) - before
    finally:
        await jailed.sandbox.close()
    cost.allocated_percent = 100 * (capacity - int(fleet.gpu_free.sum())) / max(1, capacity)
    return cost


class _NoServices:
    """Services for a sandbox whose policies call no client and read no documents."""

    async def call(self, client: str, method: str, arguments: tuple[Any, ...]) -> Any:
        raise CommandError(f"a policy called {client}.{method}{arguments}")

    def at_hand(self, client: str, method: str, ids: Sequence[str]) -> Mapping[str, bytes]:
        """Return no prepared answer, so that the sandbox uses `call`."""
        del client, method, ids
        return {}

    def documents(self, cluster_ids: Sequence[str]) -> Sequence[Document]:
        raise CommandError(f"a policy read the documents of {list(cluster_ids)}")


class JailedSite:
    """Nodes, and an allocator that calls a shipped policy in a cell.

    Args:
        parameters: Parameters in place of the policy's defaults.
        site: The nodes on which requests are placed.
    """

    def __init__(self, name: str, parameters: Mapping[str, Any], site: Site) -> None:
        document = catalog.document(name, parameters)
        self._allocator = site.allocator
        self._code = PolicyCode(
            PolicyRef(document["policy_rule_uri"], name),
            {"function.py": document["code"].encode()},
            parameters=document["policy_parameters"],
        )
        self._proposed: asyncio.Future[Proposed | ConsultFailed]
        self.sandbox = Sandbox(
            fleet=site.allocator.state.fleet, services=_NoServices(), deliver=self._deliver
        )

    def _deliver(self, event: Proposed | ConsultFailed) -> None:
        self._proposed.set_result(event)

    async def place(self, number: int, pod: trace.TracePod, cost: Cost) -> bool:
        """Request a lease as the daemon does; return whether it is granted."""
        ask = Ask(
            id=RequestId(str(number)),
            tenant=Tenant("bench"),
            policy=self._code.ref,
            demand=Demand(**{**pod.resources(), "models": pod.models}),
            terms=LeaseTerms(ttl_seconds=LEASE_SECONDS),
            inputs={},
            seed=number,
        )
        turn = self._allocator.step(Asked(Address(SessionId("bench"), 0), ask), _NOW)
        while (answer := _answer(turn)) is None:
            (consult,) = (effect for effect in turn.effects if isinstance(effect, Consult))
            self._proposed = asyncio.get_running_loop().create_future()
            started = time.perf_counter()
            self.sandbox.consult(consult, self._code)
            async with asyncio.timeout(ANSWER_SECONDS_MAX):
                event = await self._proposed
            cost.seconds.append(time.perf_counter() - started)
            if isinstance(event, ConsultFailed):
                raise CommandError(f"{self._code.ref.uri} failed: {event.refusal.reason}")
            turn = self._allocator.step(event, _NOW)
            self.sandbox.settle(event.request, isinstance(_answer(turn), LeaseNews))
        return isinstance(answer, LeaseNews)


def _answer(turn: Turn) -> LeaseNews | Refusal | None:
    for effect in turn.effects:
        if isinstance(effect, Respond):
            assert isinstance(effect.answer, LeaseNews | Refusal)
            return effect.answer
    return None
