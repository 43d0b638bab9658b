"""`moored replay`: a trace through a real daemon, over a real socket, sandbox and ledger.

Each seed has its own daemon, with the nodes under random names (which break ties), the requests in
random order, and no departures: the protocol of the paper "Beware of Fragmentation" (USENIX
ATC'23).
"""

import json
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import httpx
import msgspec

from moorage.bench.load import LoadResult, drive
from moorage.lab import trace
from moorage.lab.errors import CommandError
from moorage.lab.event_loop import run_until_sigterm
from moorage.lab.trace import typical_of
from moorage.records.json_values import JsonObject
from moorage.testing.daemon_process import Running, daemon
from moorage_policies import catalog

LEASE_SECONDS: Final = 86_400
"""TTL of leases in seconds, longer than any replay, so that no lease ends."""
WINDOW: Final = 32
"""Maximum requests under way per connection."""


@dataclass(frozen=True, slots=True)
class Options:
    """The options of a replay; see `moored replay --help`."""

    nodes: Path
    pods: Path
    policy: str = "expected_fill"
    arrive: float = 1.3
    seed: int = 42
    seeds: int = 1
    limit: int | None = None
    connections: int = 1
    daemon_options: tuple[str, ...] = ()


@dataclass(slots=True)
class Run:
    """The outcome of a replay with one seed; percentages are of the fleet's total GPU milli."""

    seed: int
    requests: int
    answered: int
    granted: int
    allocation_percent: float
    allocation_percent_at_100: float
    grants_per_second: float
    requests_per_second: float
    p50_seconds: float
    p99_seconds: float
    refusals: dict[str, int] = field(default_factory=dict[str, int])


class _Error(msgspec.Struct):
    code: str = ""


class _Reply(msgspec.Struct):
    success: bool
    lease: JsonObject | None = None
    error: _Error | None = None


_read: Final = msgspec.json.Decoder(_Reply).decode


def replay(options: Options, progress: Callable[[int], None] | None = None) -> list[Run]:
    """Replay a trace, once per seed.

    Args:
        options: The trace, the policy and the seeds.
        progress: Called with the number of requests answered since the last call.

    Raises:
        TraceError: A file cannot be read as a trace.
        CommandError: The daemon did not serve.
    """
    nodes, pods = _traces(options)
    return [
        _one_seed(options, nodes, pods, seed, progress)
        for seed in range(options.seed, options.seed + options.seeds)
    ]


def length(options: Options) -> int:
    """Return the number of requests that `replay` will send."""
    nodes, pods = _traces(options)
    return sum(
        len(_arrivals(options, nodes, pods, seed))
        for seed in range(options.seed, options.seed + options.seeds)
    )


def _traces(options: Options) -> tuple[list[trace.TraceNode], list[trace.TracePod]]:
    nodes, pods = trace.read_nodes(options.nodes), trace.read_pods(options.pods)
    if not trace.capacity_milli(nodes):
        raise trace.TraceError(options.nodes, 0, "gpu", "at least one GPU to allocate")
    if not pods:
        raise trace.TraceError(options.pods, 0, "", "at least one request")
    return nodes, pods


def _arrivals(
    options: Options, nodes: Sequence[trace.TraceNode], pods: Sequence[trace.TracePod], seed: int
) -> list[trace.TracePod]:
    order = trace.arrivals(pods, trace.capacity_milli(nodes), options.arrive, seed)
    return order[: options.limit]


def _one_seed(
    options: Options,
    nodes: Sequence[trace.TraceNode],
    pods: Sequence[trace.TracePod],
    seed: int,
    progress: Callable[[int], None] | None,
) -> Run:
    order = _arrivals(options, nodes, pods, seed)
    names = trace.permute_names(nodes, seed)
    document = trace.cluster_document(nodes, names=names)
    with daemon(options=options.daemon_options) as running:
        uri = prepare(running, document, options.policy, pods)
        messages = [ask(uri, pod, f"{seed}/{number}") for number, pod in enumerate(order)]
        load = run_until_sigterm(
            drive(
                running.ws,
                messages,
                connections=options.connections,
                window=WINDOW,
                progress=progress,
            )
        )
        free = _free_milli(running)
    return _summary(seed, order, load, trace.capacity_milli(nodes), free)


def prepare(
    running: Running, document: JsonObject, policy: str, pods: Sequence[trace.TracePod]
) -> str:
    """Register the cluster and publish the policy; return the policy's URI."""
    parameters = typical_of(policy, pods)
    if policy not in catalog.shipped():
        raise CommandError(
            f"no shipped policy {policy!r}; there are {', '.join(catalog.shipped())}"
        )
    with httpx.Client(base_url=running.http, timeout=60, trust_env=False) as client:
        for path, body in (
            ("/clusters", document),
            ("/policy", catalog.document(policy, parameters)),
        ):
            answer = client.post(path, json=body)
            if answer.is_error:
                raise CommandError(f"POST {path} was refused: {answer.text}")
    uri: str = answer.json()["data"]["policy_rule_uri"]
    return uri


def ask(uri: str, pod: trace.TracePod, seed: str = "") -> str:
    """Return the message that requests a lease for one request of a trace.

    Args:
        uri: URI of the policy.
        pod: The request.
        seed: Seed of the policy's random choices for this request, so that a replay can be
            repeated.
    """
    return json.dumps(
        {
            "adhoc": True,
            "policy_rule_uri": uri,
            "inputs": {"seed": seed} if seed else {},
            "resources": pod.resources(),
            "lease": {"ttl_seconds": LEASE_SECONDS},
        }
    )


def _free_milli(running: Running) -> int:
    message = json.dumps({"op": "fleet"})
    load = run_until_sigterm(drive(running.ws, [message]))
    clusters = json.loads(load.replies[0])["data"]["clusters"]
    return sum(cluster["gpu_milli_free"] for cluster in clusters)


def _summary(
    seed: int, order: Sequence[trace.TracePod], load: LoadResult, capacity: int, free: int
) -> Run:
    refusals: Counter[str] = Counter()
    held = held_at_100 = arrived = granted = answered = 0
    for pod, text in zip(order, load.replies, strict=True):
        reply = _read(text)
        answered += 1
        before = arrived
        arrived += pod.demand_milli
        if reply.lease is not None:
            granted += 1
            held += pod.demand_milli
        else:
            refusals[reply.error.code if reply.error else "no_lease"] += 1
        if before <= capacity:
            held_at_100 = held
    if held != capacity - free:
        raise CommandError(
            f"the replies grant {held} GPU milli, but the server's fleet shows {capacity - free}"
        )
    return Run(
        seed=seed,
        requests=len(order),
        answered=answered,
        granted=granted,
        allocation_percent=100 * held / capacity,
        allocation_percent_at_100=100 * held_at_100 / capacity,
        grants_per_second=granted / load.seconds,
        requests_per_second=load.per_second,
        p50_seconds=load.quantile(0.5),
        p99_seconds=load.quantile(0.99),
        refusals=dict(refusals.most_common()),
    )


def report(options: Options, runs: Sequence[Run]) -> JsonObject:
    """Return the outcome as JSON values: means and sums over all seeds, then every seed."""
    percents = [run.allocation_percent for run in runs]
    refusals: Counter[str] = Counter()
    for run in runs:
        refusals.update(run.refusals)
    return {
        "nodes": str(options.nodes),
        "pods": str(options.pods),
        "policy": options.policy,
        "arrive": options.arrive,
        "connections": options.connections,
        "seeds": [run.seed for run in runs],
        "requests": sum(run.requests for run in runs),
        "answered": sum(run.answered for run in runs),
        "granted": sum(run.granted for run in runs),
        "allocation_percent": statistics.fmean(percents),
        "allocation_percent_stdev": statistics.pstdev(percents),
        "allocation_percent_at_100": statistics.fmean(r.allocation_percent_at_100 for r in runs),
        "grants_per_second": statistics.fmean(run.grants_per_second for run in runs),
        "p50_ms": 1e3 * statistics.fmean(run.p50_seconds for run in runs),
        "p99_ms": 1e3 * statistics.fmean(run.p99_seconds for run in runs),
        "refusals": dict(refusals.most_common()),
        "runs": [msgspec.to_builtins(run) for run in runs],
    }
