"""`moored bench sandbox`: what the jail costs, against the same calls in this process.

Everything is taken in one run, jailed and in-process by turns. The latencies are taken on one
core: between two of them a wake-up costs tens of microseconds on a virtual machine, which says
much about its host and nothing about the jail. `bare_*` is an echo over the same kind of socket,
with and without that; what is left is ours.

What two calls of an injected client add depends on what the cell has been sent (`sandbox.told`), so
each case is measured by itself, on a cell of its own, in a fleet of `CLUSTERS`:

* `known`: the same two clusters, which the cell has read before and which have not changed;
* `changed`: two clusters that have both changed since the cell was last asked;
* `in_order`: first reads: no cluster is read twice, and they are read in the fleet's order;
* `in_random_order`: first reads too, of clusters drawn at random; what is kept by then was sent
  behind earlier answers, and the cell starts with nothing;
* `lone`: first reads of clusters outside the fleet, which nothing is sent ahead for: each call is a
  round trip, and two of them have to take twice what a bare one takes.

`asked` is the share of the calls that had to ask the host, and `asking_p50` the median of the
evaluations with such a call.
"""

import asyncio
import os
import random
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final, Self

import msgspec
import uvloop

from moorage.core.events import ConsultFailed, Proposed
from moorage.core.words import Consult
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
from moorage.sandbox.host import Document, Limits, PolicyCode, Sandbox
from moorage.trials.process import TrialError

Figures = dict[str, Any]
Delivered = tuple[Proposed | ConsultFailed, float]
"""An event, and the seconds from the consultation to it."""

FLEETS: Final = (10, 1_000, 10_000)
"""Nodes of the fleets, ten to a cluster."""
NODES_PER_CLUSTER: Final = 10
PASSES: Final = 3
"""Times that the fleets are gone through: what slows the machine down comes and goes in seconds."""
BLOCKS: Final = 8
"""Each figure is that of the quietest block, since noise only ever adds."""
EVALUATIONS: Final = 500
"""Of one block, and as many calls in-process between them."""
STUCK: Final = 15
"""Rules that never return, one after the other."""
STUCK_SECONDS: Final = 0.1
"""How long they may run."""
HOGS: Final = 4
HOGS_TURNS: Final = 3
HOGS_SECONDS: Final = 2.0
"""How long the bystander is watched in each turn, with hogs and without."""
HOGS_KNOWN_SECONDS: Final = 6.0
"""Until each of the hogs has been stopped at its deadline five times, and rests for a while."""
PACE_SECONDS: Final = 0.001
"""Between two evaluations of the bystander."""
CLUSTERS: Final = 4_000
"""Of the fleet whose clusters are read: as many as a cell is sent before it asks, and no more."""
CALLS: Final = ("known", "changed", "in_order", "in_random_order", "lone")
ASKING_MIN: Final = 20
"""Evaluations with such a call that a block needs for a median of its own."""
FIRST_READS: Final = {"in_order", "in_random_order"}
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
_ECHO: Final = """
import os, sys
while data := os.read(int(sys.argv[1]), 65536):
    os.write(int(sys.argv[1]), data)
"""
_FRAME_BYTES: Final = 128
"""About what an evaluation and its answer take on the channel."""


def sandbox() -> Figures:
    """Measure evaluations in the jail against the same ones in this process."""
    with one_core():
        figures = uvloop.run(_latencies())
        figures |= uvloop.run(_hogs())
    figures |= uvloop.run(_two_cores())
    return figures | uvloop.run(_stuck())


@contextmanager
def one_core() -> Iterator[None]:
    """Keep this process, and what it starts meanwhile, on one core."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


# What is measured ------------------------------------------------------------------------------


async def _latencies() -> Figures:
    figures: Figures = {"bare_p50_microseconds": _microseconds(await _bare())}
    taken: dict[int, list[tuple[float, float]]] = {nodes: [] for nodes in FLEETS}
    for _ in range(PASSES):
        for nodes in FLEETS:
            async with Played(nodes) as played:
                taken[nodes].append(await _quietest(partial_of(played, dict[str, Any])))
    extras: dict[int, float] = {}
    for nodes in FLEETS:
        jailed, in_process = min(taken[nodes], key=_extra)
        extras[nodes] = jailed - in_process
        figures |= {
            f"jailed_p50_microseconds_{nodes}_nodes": _microseconds(jailed),
            f"in_process_p50_microseconds_{nodes}_nodes": _microseconds(in_process),
            f"extra_p50_microseconds_{nodes}_nodes": _microseconds(extras[nodes]),
        }
    figures[f"extra_{FLEETS[-1]}_to_{FLEETS[0]}_nodes"] = extras[FLEETS[-1]] / extras[FLEETS[0]]
    for case in CALLS:
        passes = [await _two_calls(case) for _ in range(PASSES)]
        figures |= min(passes, key=lambda each: each[f"two_calls_{case}_add_p50_microseconds"])
    return figures


async def _two_calls(case: str) -> Figures:
    """Measure what two calls of an injected client add to an evaluation of the same cell."""
    async with Played(CLUSTERS, nodes_per_cluster=1) as played:
        extra = _extra(await _quietest(partial_of(played, dict[str, Any])))
        pairs = _pairs(case, played.clusters)
        if case in {"known", "changed"}:
            await played.ask({"read": pairs[0]})
        blocks = [
            await _calls_block(
                played, pairs[start : start + EVALUATIONS], changed=case == "changed"
            )
            for start in range(0, len(pairs), EVALUATIONS)
        ]
    quietest = min(blocks, key=lambda block: statistics.median(block.added)).added
    asking = min(
        (statistics.median(b.asking) for b in blocks if len(b.asking) >= ASKING_MIN), default=None
    )
    name = f"two_calls_{case}"
    figures = {
        f"{name}_add_p50_microseconds": _microseconds(statistics.median(quietest) - extra),
        f"{name}_to_extra": statistics.median(quietest) / extra - 1,
        f"{name}_asked": sum(block.calls for block in blocks) / (2 * EVALUATIONS * len(blocks)),
    }
    if asking is not None and case in FIRST_READS:
        figures[f"{name}_asking_p50_to_extra"] = asking / extra - 1
    return figures


@dataclass(frozen=True, slots=True)
class _Block:
    """What evaluations with calls took more than the same ones in this process, in seconds."""

    added: list[float]
    asking: list[float]
    """Of those of which a call reached the host."""
    calls: int
    """That reached it."""


async def _calls_block(
    played: "Played", pairs: Sequence[Sequence[str]], *, changed: bool
) -> _Block:
    added: list[float] = []
    asking: list[float] = []
    before = played.calls
    for pair in pairs:
        inputs = {"read": pair}
        calls = played.calls
        if changed:
            played.change(pair)
        jailed = await played.ask(inputs)
        added.append(jailed - played.in_process(inputs))
        if played.calls > calls:
            asking.append(added[-1])
    return _Block(added, asking, played.calls - before)


def _pairs(case: str, clusters: Sequence[str]) -> list[Sequence[str]]:
    """Return the two clusters that each evaluation reads."""
    count = len(clusters) // 2
    if case in {"known", "changed"}:
        return [(clusters[0], clusters[-1])] * count
    ids = [f"lone-{each}" for each in clusters] if case == "lone" else list(clusters)
    if case != "in_order":
        random.Random(1).shuffle(ids)  # noqa: S311  # The same order in each run.
    return [ids[2 * number : 2 * number + 2] for number in range(count)]


async def _two_cores() -> Figures:
    """Measure the same where the scheduler may put the cell on another core."""
    bare = await _bare()
    async with Played(FLEETS[0]) as played:
        jailed, in_process = await _quietest(partial_of(played, dict[str, Any]))
    return {
        "any_core_bare_p50_microseconds": _microseconds(bare),
        "any_core_extra_p50_microseconds": _microseconds(jailed - in_process),
    }


async def _stuck() -> Figures:
    """Measure from the deadline of a rule that never returns to the next answer of its policy."""
    # The same rule is stuck so often here that it would rest.
    limits = replace(Limits(), evaluation_seconds=STUCK_SECONDS, rest_overruns=0)
    late: list[float] = []
    async with Played(FLEETS[0], limits=limits) as played:
        for _ in range(STUCK):
            await played.ask({})
            started = time.perf_counter()
            stuck = played.begin({"stuck": True})
            behind = played.begin({})
            await stuck
            answered, _ = await behind
            if not isinstance(answered, Proposed):
                raise TrialError(f"the evaluation behind a stuck rule failed: {answered}")
            late.append(time.perf_counter() - started - STUCK_SECONDS)
    return {
        "stuck_to_answer_p50_milliseconds": 1e3 * statistics.median(late),
        "stuck_to_answer_max_milliseconds": 1e3 * max(late),
    }


async def _hogs() -> Figures:
    """Measure a bystander alone, then beside rules that burn all the time they get."""
    async with Played(FLEETS[0]) as played:
        async with _hogs_beside(played):
            await asyncio.sleep(HOGS_KNOWN_SECONDS)
        alone: list[float] = []
        beside: list[float] = []
        for _ in range(HOGS_TURNS):
            alone.append(await _bystander(played))
            async with _hogs_beside(played):
                beside.append(await _bystander(played))
    return {
        "bystander_p99_microseconds": _microseconds(min(alone)),
        "bystander_with_hogs_p99_microseconds": _microseconds(min(beside)),
        "with_hogs_to_alone_p99": min(beside) / min(alone),
    }


@asynccontextmanager
async def _hogs_beside(played: "Played") -> AsyncIterator[None]:
    stop = asyncio.Event()
    hogs = [asyncio.ensure_future(_hog(played, number, stop)) for number in range(HOGS)]
    yield
    stop.set()
    await asyncio.gather(*hogs)


async def _bystander(played: "Played") -> float:
    """Return the p99 of a while, in seconds."""
    taken: list[float] = []
    end = time.perf_counter() + HOGS_SECONDS
    while time.perf_counter() < end:
        taken.append(await played.ask({}))
        await asyncio.sleep(PACE_SECONDS)
    return _quantile(taken, 0.99)


async def _hog(played: "Played", number: int, stop: asyncio.Event) -> None:
    while not stop.is_set():
        await played.begin({"stuck": True}, f"hog-{number}")
        await asyncio.sleep(PACE_SECONDS)


# How it is measured ----------------------------------------------------------------------------


def partial_of(
    played: "Played", inputs: Callable[[], Mapping[str, Any]]
) -> tuple[Callable[[], Awaitable[float]], Callable[[], float]]:
    """Return the jailed call and the same one in this process, each taking its own time."""
    return (lambda: played.ask(inputs())), (lambda: played.in_process(inputs()))


async def _quietest(
    pair: tuple[Callable[[], Awaitable[float]], Callable[[], float]],
) -> tuple[float, float]:
    """Return the medians of both, of the block in which they differ least, in seconds."""
    jailed, in_process = pair
    blocks: list[tuple[float, float]] = []
    for _ in range(BLOCKS):
        taken = [(await jailed(), in_process()) for _ in range(EVALUATIONS)]
        blocks.append(
            (statistics.median(j for j, _ in taken), statistics.median(p for _, p in taken))
        )
    return min(blocks, key=_extra)


def _extra(medians: tuple[float, float]) -> float:
    jailed, in_process = medians
    return jailed - in_process


async def _bare() -> float:
    """Return the median round trip of an echo, of the quietest block, in seconds."""
    ours, theirs = socket.socketpair()
    with theirs:
        command = [sys.executable, "-I", "-S", "-c", _ECHO, str(theirs.fileno())]
        process = subprocess.Popen(command, pass_fds=(theirs.fileno(),))  # noqa: ASYNC220, S603  # Nothing else runs; ours.
    ours.settimeout(0)
    echo = _Echo()
    loop = asyncio.get_running_loop()
    transport, _ = await loop.create_unix_connection(lambda: echo, sock=ours)
    blocks: list[float] = []
    for _ in range(BLOCKS):
        taken: list[float] = []
        for _ in range(EVALUATIONS):
            started = time.perf_counter()
            echo.answered = loop.create_future()
            transport.write(bytes(_FRAME_BYTES))
            taken.append(await echo.answered - started)
        blocks.append(statistics.median(taken))
    transport.close()
    process.kill()
    process.wait()
    return min(blocks)


class _Echo(asyncio.Protocol):
    answered: asyncio.Future[float]

    def data_received(self, data: bytes) -> None:
        if len(data) != _FRAME_BYTES:
            raise TrialError("the echo answered something else")
        self.answered.set_result(time.perf_counter())


class _Registry:
    """The services of the sandbox, and the injected client in this process: small documents."""

    def __init__(self, cluster_ids: Sequence[str], nodes: int) -> None:
        names = [*cluster_ids, *(f"lone-{name}" for name in cluster_ids)]
        self._documents = {name: {"id": name, "nodes": {"count": nodes}} for name in names}
        self._packed = {n: msgspec.msgpack.encode(each) for n, each in self._documents.items()}

    async def call(self, client: str, method: str, arguments: tuple[Any, ...]) -> Any:
        raise TrialError(f"a rule called {client}.{method}{arguments}")

    def at_hand(self, client: str, method: str, ids: Sequence[str]) -> Mapping[str, bytes]:
        del client, method
        return {name: self._packed[name] for name in ids if name in self._packed}

    def documents(self, cluster_ids: Sequence[str]) -> Sequence[Document]:
        raise TrialError(f"a rule read the documents of {list(cluster_ids)}")

    def read_cluster(self, cluster_id: str) -> tuple[bool, Any]:
        return True, self._documents[cluster_id]


class Played:
    """A sandbox with one fleet, and the same rule in this process.

    Args:
        nodes: Of the fleet.
        limits: Of the sandbox.
        nodes_per_cluster: Of the fleet.

    Attributes:
        clusters: Of the fleet, in its order.

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
        self._rule = scope["AIOSv1PolicyRule"]("", {"cluster_client": registry}, {})
        self._codes: dict[str, PolicyCode] = {}
        self._outcomes: dict[str, tuple[float, asyncio.Future[Delivered]]] = {}
        self._number = 0

    async def __aenter__(self) -> Self:
        await self._sandbox.start()
        await self.ask({})
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._sandbox.close()

    def begin(self, inputs: Mapping[str, Any], name: str = "rule") -> "asyncio.Future[Delivered]":
        """Consult the rule under a policy's name; return the future of what is delivered."""
        self._number += 1
        code = self._codes.get(name)
        if code is None:  # As in the daemon, a policy is made ready once.
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

    @property
    def calls(self) -> int:
        """Calls that reached the host."""
        return self._sandbox.report().counters.get("calls", 0)

    def change(self, cluster_ids: Iterable[str]) -> None:
        """Tell the sandbox that these documents have changed."""
        for cluster_id in cluster_ids:
            self._sandbox.documents_changed(cluster_id)

    async def ask(self, inputs: Mapping[str, Any]) -> float:
        """Consult the rule and return the seconds from the consultation to its delivery."""
        async with asyncio.timeout(ANSWER_SECONDS_MAX):
            event, taken = await self.begin(inputs)
        if not isinstance(event, Proposed):
            raise TrialError(f"the rule of the benchmark failed: {event.refusal.reason}")
        return taken

    def in_process(self, inputs: Mapping[str, Any]) -> float:
        """Evaluate the rule in this process on the same input and return the seconds it took."""
        started = time.perf_counter()
        view = FleetView(self._fleet, _DEMAND)
        given = {"cluster_data": {}, "inputs": inputs, "resources": {}, "fleet": view, "seed": 1}
        self._rule.eval({}, given, {})
        return time.perf_counter() - started


def fleet_of(nodes: int, nodes_per_cluster: int = NODES_PER_CLUSTER) -> Fleet:
    """Return an empty fleet of so many nodes with eight GPUs."""
    gpus = tuple(Gpu(str(number), "A100", 81_920) for number in range(8))
    rows = [Node(NodeId(f"node-{row:05d}"), 128_000, 1_048_576, gpus) for row in range(nodes)]
    fleet = Fleet()
    fleet.install(
        Cluster(ClusterId(f"cluster-{start:05d}"), tuple(rows[start : start + nodes_per_cluster]))
        for start in range(0, nodes, nodes_per_cluster)
    )
    return fleet


def _microseconds(seconds: float) -> float:
    return 1e6 * seconds


def _quantile(taken: Sequence[float], share: float) -> float:
    return sorted(taken)[min(int(share * len(taken)), len(taken) - 1)]
