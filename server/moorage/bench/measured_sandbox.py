"""A sandbox for measurements: one fleet and one policy, which this process can run, too.

`sandbox_costs` and `sandbox_hogs` use it.
"""

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Self

import msgspec

from moorage.core.turns.effects import Consult
from moorage.core.turns.events import ConsultFailed, Proposed
from moorage.lab.errors import CommandError
from moorage.model import (
    Ask,
    Cluster,
    ClusterId,
    Demand,
    Gpu,
    Node,
    NodeId,
    PolicyRef,
    RequestId,
    Tenant,
)
from moorage.policy import Fleet, FleetView
from moorage.records.json_values import JsonMapping, JsonObject, JsonValue
from moorage.sandbox.host.sandbox import Document, Limits, PolicyCode, Sandbox, SandboxReport

Figures = JsonObject
Delivered = tuple[Proposed | ConsultFailed, float]
"""An event with a policy's answer, and the seconds from the consultation to its delivery."""

NODES_PER_CLUSTER: Final = 10
ANSWER_SECONDS_MAX: Final = 20.0
_DEMAND: Final = Demand(gpus=1)
_SOURCE: Final = """
class AIOSv1PolicyRule:
    def __init__(self, rule_id, settings, parameters):
        self.client = settings["cluster_client"]

    def eval(self, parameters, input_data, context):
        for cluster in input_data["inputs"].get("read", ()):
            self.client.read_cluster(cluster)
        while input_data["inputs"].get("stuck"):
            pass
        return input_data["fleet"].placement(0, [0])
"""


class _Registry:
    """Serves small documents to the sandbox, and to the policy that runs in this process."""

    def __init__(self, cluster_ids: Sequence[str], nodes: int) -> None:
        names = [*cluster_ids, *(f"lone-{name}" for name in cluster_ids)]
        self._documents = {name: {"id": name, "nodes": {"count": nodes}} for name in names}
        self._packed = {n: msgspec.msgpack.encode(each) for n, each in self._documents.items()}

    async def call(self, client: str, method: str, arguments: tuple[JsonValue, ...]) -> JsonValue:
        raise CommandError(f"the policy may not call {client}.{method}{arguments}")

    def at_hand(self, client: str, method: str, ids: Sequence[str]) -> Mapping[str, bytes]:
        del client, method
        return {name: self._packed[name] for name in ids if name in self._packed}

    def documents(self, cluster_ids: Sequence[str]) -> Sequence[Document]:
        raise CommandError(f"the policy may not read the documents of {list(cluster_ids)}")

    def read_cluster(self, cluster_id: str) -> tuple[bool, JsonValue]:
        return True, self._documents[cluster_id]


class MeasuredSandbox:
    """A sandbox with one fleet and one policy; this process can run the policy, too.

    Attributes:
        clusters: Ids of the fleet's clusters, in the fleet's order.
    """

    def __init__(
        self, nodes: int, limits: Limits | None = None, nodes_per_cluster: int = NODES_PER_CLUSTER
    ) -> None:
        self._fleet = fleet_of(nodes, nodes_per_cluster)
        self.clusters = self._fleet.cluster_ids
        registry = _Registry(self.clusters, nodes_per_cluster)
        self._sandbox = Sandbox(
            fleet=self._fleet, services=registry, deliver=self._deliver, limits=limits
        )
        scope: dict[str, Any] = {}
        exec(_SOURCE, scope)  # noqa: S102  # Our own text, above.
        self._policy = scope["AIOSv1PolicyRule"]("", {"cluster_client": registry}, {})
        self._codes: dict[str, PolicyCode] = {}
        self._outcomes: dict[str, tuple[float, asyncio.Future[Delivered]]] = {}
        self._number = 0

    async def __aenter__(self) -> Self:
        await self._sandbox.start()
        await self.ask({})
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._sandbox.close()

    def begin(self, inputs: JsonMapping, name: str = "rule") -> "asyncio.Future[Delivered]":
        """Begin an evaluation of the policy under the name `name`; return its future result."""
        self._number += 1
        code = self._codes.get(name)
        if code is None:  # As in the daemon, a policy's code is made once.
            ref = PolicyRef(f"{name}:1-bench", name)
            code = self._codes[name] = PolicyCode(ref, {"function.py": _SOURCE.encode()})
        request = RequestId(f"request-{self._number}")
        ask = Ask(request, Tenant("bench"), code.ref, demand=_DEMAND, inputs=inputs, seed=1)
        future = asyncio.get_running_loop().create_future()
        self._outcomes[request] = time.perf_counter(), future
        self._sandbox.consult(Consult(ask, 1), code)
        return future

    def _deliver(self, event: Proposed | ConsultFailed) -> None:
        started, future = self._outcomes.pop(event.request)
        future.set_result((event, time.perf_counter() - started))

    def report(self) -> SandboxReport:
        """Return the report of the sandbox."""
        return self._sandbox.report()

    @property
    def calls(self) -> int:
        """Number of calls of injected clients that reached the host."""
        return self.report().counters.get("calls", 0)

    def change(self, cluster_ids: Iterable[str]) -> None:
        """Inform the sandbox that the documents of these clusters have changed."""
        for cluster_id in cluster_ids:
            self._sandbox.drop_documents(cluster_id)

    async def ask(self, inputs: JsonMapping) -> float:
        """Consult the policy and return the seconds from the consultation to its delivery."""
        async with asyncio.timeout(ANSWER_SECONDS_MAX):
            event, taken = await self.begin(inputs)
        if not isinstance(event, Proposed):
            raise CommandError(f"the policy of the benchmark failed: {event.refusal.reason}")
        return taken

    def in_process(self, inputs: JsonMapping) -> float:
        """Evaluate the policy in this process on an input, and return the seconds that it took."""
        started = time.perf_counter()
        view = FleetView(self._fleet, _DEMAND)
        given = {"cluster_data": {}, "inputs": inputs, "resources": {}, "fleet": view, "seed": 1}
        self._policy.eval({}, given, {})
        return time.perf_counter() - started


def fleet_of(nodes: int, nodes_per_cluster: int = NODES_PER_CLUSTER) -> Fleet:
    """Return an empty fleet of nodes with eight GPUs each."""
    gpus = tuple(Gpu(str(number), "A100", 81_920) for number in range(8))
    rows = [Node(NodeId(f"node-{row:05d}"), 128_000, 1_048_576, gpus) for row in range(nodes)]
    fleet = Fleet()
    fleet.install(
        Cluster(ClusterId(f"cluster-{start:05d}"), tuple(rows[start : start + nodes_per_cluster]))
        for start in range(0, nodes, nodes_per_cluster)
    )
    return fleet


def microseconds(seconds: float) -> float:
    """Return seconds as microseconds."""
    return 1e6 * seconds


def quantile(taken: Sequence[float], share: float) -> float:
    """Return the quantile of the times at a share, 0 to 1."""
    return sorted(taken)[min(int(share * len(taken)), len(taken) - 1)]
