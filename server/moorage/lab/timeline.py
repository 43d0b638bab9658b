"""The input of a backtest: clusters and requests in order of time, from a trace or a ledger.

A trace of the openb kind is replayed either in the published packing protocol (random order, no
departures, demand beyond the capacity), or by its own times, or as requests that come and go
(`lab.churn`).

A ledger has facts, not all requests. A request that waited is in the ledger as it was sent. Of a
request that was granted at once, the ledger has only the granted amounts, the number of nodes and
the duration; the models, memory per GPU, topology, inputs and candidates are lost. Requests that
were refused at once, and requests for advice, are not in the ledger.
"""

import asyncio
import hashlib
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from msgspec import structs

from moorage.catalog.documents.clusters import read_cluster_document
from moorage.core.state.facts import ClockMoved, ClusterRemoved, ClusterSet, Ended, Granted, Queued
from moorage.core.turns.events import ClusterGone, ClusterSeen, Event
from moorage.lab import trace
from moorage.lab.churn import Churn, arrivals
from moorage.lab.errors import CommandError
from moorage.ledger.base import LedgerEntry, LedgerError
from moorage.ledger.stored import StoredLedger
from moorage.model import Ask, Demand, Lease, LeaseTerms, PolicyRef, RequestId, Tenant
from moorage.records.json_values import JsonObject
from moorage.storage.base import StorageError
from moorage.storage.sqlite import LEDGER_FILE
from moorage.storage.sqlite.facts import SqliteFacts, copy_ledger

FOR_EVER_SECONDS: Final = 1e9
"""Seconds that a lease lasts if its release is unknown."""
LIMITS_OF_A_LEDGER: Final = (
    "for requests that were granted at once, the ledger only has the granted resources: not "
    "models, memory per GPU, topology, inputs or candidates. It does not have requests that were "
    "refused at once"
)
PRUNED: Final = (
    "the ledger's older history was pruned: the replay starts with the clusters of its last "
    "checkpoint, and without leases that were granted before"
)
_NO_POLICY: Final = PolicyRef("", "")


@dataclass(frozen=True, slots=True)
class Timeline:
    """The input events of a backtest, oldest first.

    Args:
        source: The origin, in words and with digests of the files.
        inventory: Changes of the fleet, each with its time.
        asks: Requests with their times. The replay fills in the policy; a lease ends by itself
            after the time for which the trace or the ledger says it was held.
        pods: The requests as a trace; the measure of fragmentation and some policies need them.
        documents: Cluster documents, where they are known.
        notes: Sentences about data that the source lacks.
        measured_from: Start of the measurement, in seconds; before it, the fleet warms up.
    """

    source: JsonObject
    inventory: list[tuple[float, Event]]
    asks: list[tuple[float, Ask]]
    pods: Sequence[trace.TracePod]
    documents: tuple[JsonObject, ...] = ()
    notes: tuple[str, ...] = ()
    measured_from: float = 0.0


def of_trace(
    nodes: Path,
    pods: Path,
    *,
    arrive: float,
    seed: int,
    limit: int | None,
    timed: bool,
    wait_seconds: float,
    churn: Churn | None = None,
) -> Timeline:
    """Return the timeline of a trace.

    Args:
        nodes: Node file.
        pods: Request file; with `timed` it also has `creation_time` and `deletion_time`.
        arrive: GPU demand as a multiple of the capacity, in the packing protocol.
        seed: Seed of the order of nodes and requests, and of the policies' random choices.
        limit: The largest number of requests; None: all.
        timed: Whether each request is replayed once, at its time in the trace.
        wait_seconds: How long each request may wait.
        churn: Load and durations of random requests; None: the packing protocol, or `timed`.

    Raises:
        TraceError: A file cannot be read as a trace.
        OSError: A file cannot be opened.
    """
    machines, wanted = trace.read_nodes(nodes), trace.read_pods(pods)
    capacity = trace.capacity_milli(machines)
    if not wanted or not capacity:
        raise CommandError("a backtest needs at least one request and one GPU")
    asks: list[tuple[float, Ask]] = []
    if timed:
        spans = _spans(pods)
        order = sorted(wanted, key=lambda pod: (spans[pod.name][0], pod.name))[:limit]
        for number, pod in enumerate(order):
            at, seconds = spans[pod.name]
            asks.append((at, _ask(number, pod, seed, seconds, wait_seconds)))
    elif churn is not None:
        coming = arrivals(wanted, capacity, churn, seed)[:limit]
        for number, (at, pod, seconds) in enumerate(coming):
            asks.append((at, _ask(number, pod, seed, seconds, wait_seconds)))
    else:
        for number, pod in enumerate(trace.arrivals(wanted, capacity, arrive, seed)[:limit]):
            asks.append((0.0, _ask(number, pod, seed, FOR_EVER_SECONDS, wait_seconds)))
    document = trace.cluster_document(machines, names=trace.permute_names(machines, seed))
    seen = ClusterSeen(read_cluster_document(document).cluster)
    source: JsonObject = {
        "trace": {"nodes": _digest(nodes), "pods": _digest(pods)},
        "arrive": None if timed or churn else arrive,
        "seed": seed,
        "limit": limit,
        "timed": timed,
        "wait_seconds": wait_seconds,
    }
    if churn is not None:
        source["churn"] = {"load": churn.load, "stays": churn.stays}
    since = churn.measured_from if churn else 0.0
    return Timeline(source, [(0.0, seen)], asks, wanted, (document,), measured_from=since)


def _ask(number: int, pod: trace.TracePod, seed: int, seconds: float, wait_seconds: float) -> Ask:
    return Ask(
        id=RequestId(f"{number:06d}-{pod.name}"),
        tenant=Tenant("trace"),
        policy=_NO_POLICY,
        demand=Demand(**{**pod.resources(), "models": pod.models}),
        terms=LeaseTerms(ttl_seconds=seconds, wait_seconds=wait_seconds),
        inputs={},
        seed=(seed << 32) + number,
    )


def _spans(pods: Path) -> dict[str, tuple[float, float]]:
    """Return the arrival of each request, and the duration of its lease in seconds."""
    found: dict[str, tuple[float, float]] = {}
    with pods.open(encoding="utf-8-sig", newline="") as file:
        for line in trace.lines(pods, file, ("name", "creation_time", "deletion_time")):
            created = line.whole("creation_time")
            ended = line.values.get("deletion_time") or ""
            began = line.values.get("scheduled_time") or ""
            last = float(line.whole("deletion_time")) if ended else created + FOR_EVER_SECONDS
            first = float(line.whole("scheduled_time")) if began else created
            found[line.text("name")] = float(created), max(last - first, 1.0)
    return found


# Ledgers ---------------------------------------------------------------------------------------


async def of_ledger(folder: Path, *, seed: int, limit: int | None) -> Timeline:
    """Return the timeline of a daemon's ledger; the daemon may be running.

    Args:
        folder: The daemon's data directory.
        seed: Seed of policies' random choices for requests whose own seed is unknown.
        limit: The largest number of requests; None: all.

    Raises:
        CommandError: The folder has no readable ledger, or the ledger is empty.
    """
    with tempfile.TemporaryDirectory(prefix="moorage-") as place:
        copy = Path(place) / LEDGER_FILE
        await asyncio.to_thread(_copy, folder / LEDGER_FILE, copy)
        ledger = StoredLedger(SqliteFacts(copy))
        try:
            recovery = await ledger.open()
            now = [fact for fact in recovery.facts if isinstance(fact, ClusterSet | ClusterRemoved)]
            history = [entry async for entry in _entries(ledger)]
            pruned = await ledger.history_start() is not None
        except LedgerError as error:
            raise CommandError(str(error)) from error
        finally:
            await ledger.close()
    if pruned:
        # The old inventory is pruned: start with the recovered inventory; later changes follow.
        history[:0] = [LedgerEntry(0, history[0].at, fact) for fact in now]
    timeline = _timeline(history, seed, limit)
    if pruned:
        timeline = replace(timeline, notes=(*timeline.notes, PRUNED))
    if not timeline.asks:
        raise CommandError(f"{folder}: nothing was granted or queued in this ledger")
    return timeline


def _copy(source: Path, copy: Path) -> None:
    """Copy a ledger as it is at one moment; a daemon may be using the ledger."""
    if not source.is_file():
        raise CommandError(f"{source}: there is no ledger; expected a daemon's data directory")
    try:
        copy_ledger(source, copy)
    except StorageError as error:
        raise CommandError(str(error)) from error


async def _entries(ledger: StoredLedger) -> AsyncIterator[LedgerEntry]:
    last = 0
    while page := await ledger.read(after=last):
        for entry in page:
            yield entry
        last = page[-1].seq


def _timeline(history: Sequence[LedgerEntry], seed: int, limit: int | None) -> Timeline:
    held = dict(_hold_times(history))
    inventory: list[tuple[float, Event]] = []
    asks: list[tuple[float, Ask]] = []
    queued = set[RequestId]()
    for number, entry in enumerate(history):
        match entry.fact:
            case ClusterSet(cluster):
                inventory.append((entry.at, ClusterSeen(cluster)))
            case ClusterRemoved(cluster):
                inventory.append((entry.at, ClusterGone(cluster)))
            case Queued(ask, at, deadline):
                queued.add(ask.id)
                wait = max(deadline - at, 0.0)
                asks.append((at, _again(ask, held.get(ask.id), wait)))
            case Granted(lease) if lease.id not in queued and lease.attempt == 1:
                seconds = held.get(lease.id, FOR_EVER_SECONDS)
                asks.append((lease.granted_at, _ask_behind(lease, seconds, (seed << 32) + number)))
            case _:  # The replay decides all consequences again.
                pass
    digest = hashlib.sha256(repr([(e.seq, e.at, e.fact) for e in history]).encode()).hexdigest()
    return Timeline(
        source={"ledger": {"facts": len(history), "sha256": digest}, "seed": seed, "limit": limit},
        inventory=inventory,
        asks=asks[:limit],
        pods=_pods(asks),
        notes=(LIMITS_OF_A_LEDGER,),
    )


def _hold_times(history: Sequence[LedgerEntry]) -> Iterator[tuple[RequestId, float]]:
    granted: dict[RequestId, float] = {}
    for entry in history:
        # The time between grant and end includes renewals.
        if isinstance(entry.fact, Granted):
            granted[entry.fact.lease.id] = entry.fact.lease.granted_at
        elif isinstance(entry.fact, ClockMoved):
            granted = {name: at + entry.fact.seconds for name, at in granted.items()}
        elif isinstance(entry.fact, Ended) and entry.fact.lease in granted:
            yield entry.fact.lease, max(entry.fact.at - granted[entry.fact.lease], 0.001)


def _again(ask: Ask, seconds: float | None, wait_seconds: float) -> Ask:
    terms = ask.terms or LeaseTerms(ttl_seconds=FOR_EVER_SECONDS)
    ttl = terms.ttl_seconds if seconds is None else seconds
    terms = structs.replace(terms, ttl_seconds=ttl, wait_seconds=wait_seconds, idempotency_key="")
    return structs.replace(
        ask, policy=_NO_POLICY, terms=terms, provision=None, parameters={}, settings={}
    )


def _ask_behind(lease: Lease, seconds: float, seed: int) -> Ask:
    first = lease.placement[0]
    demand = Demand(
        gpus=len(first.gpus),
        gpu_milli=first.gpu_milli,
        cpu_milli=first.cpu_milli,
        memory_mib=first.memory_mib,
        nodes=len(lease.placement),
    )
    terms = structs.replace(lease.terms, ttl_seconds=seconds, idempotency_key="")
    return Ask(lease.id, lease.tenant, _NO_POLICY, None, demand, terms, inputs={}, seed=seed)


def _pods(asks: Sequence[tuple[float, Ask]]) -> list[trace.TracePod]:
    return [
        trace.TracePod(
            str(ask.id), d.cpu_milli, d.memory_mib, d.gpus, d.gpu_milli if d.gpus else 0, d.models
        )
        for _, ask in asks
        if (d := ask.demand) is not None
    ]


def _digest(path: Path) -> dict[str, str]:
    return {"file": path.name, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
