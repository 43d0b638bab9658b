"""The console's playground: runs a policy on a fleet with existing leases.

The daemon starts it as a separate program (`lab.offline`), with the job on stdin. So a tried policy
uses neither the daemon's event loop nor its cells. The jail, the core and the verification are
those of the daemon. Each granted request keeps its lease, so later requests find less room.
"""

import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

from moorage.catalog.documents.clusters import read_cluster_document
from moorage.catalog.values import PolicyRecord
from moorage.core.state.facts import Granted, Refusal
from moorage.core.state.state import apply
from moorage.core.turns.effects import LeaseNews
from moorage.core.turns.events import ClusterSeen
from moorage.lab import policy_test
from moorage.lab.backtest import BacktestJob, backtest
from moorage.lab.errors import CommandError
from moorage.lab.rehearsal import Decision, Rehearsal
from moorage.model import Cluster, Lease, LeaseTerms, PolicyRef, RequestId, Share, Tenant
from moorage.protocol.faults import ServiceError
from moorage.records.json_values import JsonObject
from moorage.sandbox.host.contract import Mode
from moorage.sandbox.wire.frames import ENTRY

REQUESTS_MAX: Final = 100
"""Maximum requests in one run."""
TRACE_REQUESTS_MAX: Final = 5_000
"""Maximum requests that a backtest replays; it leaves out further ones."""
VALUE_BYTES_MAX: Final = 16 << 10
"""Maximum bytes of JSON of a policy's answer; a larger answer is shown as `too large`."""
PRINTED_LINES_MAX: Final = 1_000


@dataclass(frozen=True, slots=True)
class PlaygroundJob:
    """A run of the playground: a policy, a fleet and requests.

    Args:
        requests: Messages as clients send them, without the URI.
        documents: Cluster documents for policies to read; if `clusters` is None, these documents
            also define the fleet.
        held: The parts of the fleet that existing leases hold.
        trace: A table (CSV) of requests to backtest instead of `requests`; or "".
        mode: The isolation of policies, as in `moored serve --sandbox`.
    """

    policy: JsonObject
    requests: list[JsonObject] = field(default_factory=list[JsonObject])
    documents: list[JsonObject] = field(default_factory=list[JsonObject])
    clusters: list[Cluster] | None = None
    held: list[Share] = field(default_factory=list[Share])
    trace: str = ""
    mode: Mode = "jail"


async def play(job: PlaygroundJob) -> JsonObject:
    """Run a policy on the requests of the playground, and return the results.

    Raises:
        CommandError: A request cannot be read.
        ServiceError: The policy or a document is refused.
        JailError: This machine has no jail.
    """
    began = time.monotonic()
    if len(job.requests) > REQUESTS_MAX:
        raise CommandError(f"requests: expected at most {REQUESTS_MAX}, got {len(job.requests)}")
    async with Rehearsal(job.mode) as rehearsal:
        await _fill(rehearsal, job)
        record = await rehearsal.upload(job.policy)
        fleet = rehearsal.allocator.state.fleet
        size = {"nodes": len(fleet), "gpus": int((fleet.gpu_total > 0).sum())}
        warming = policy_test.ask_of(record, {"inputs": {}, "dry_run": True}, -1, 1)
        await rehearsal.ask(warming)  # Loads the policy before the first request's time.
        results: list[JsonObject] = []
        for number, request in enumerate(job.requests):
            held = {"lease": {}, **request}
            try:
                ask = policy_test.ask_of(record, held, number, 1)
            except ServiceError as error:
                results.append({"ok": False, "code": error.code, "reason": error.reason})
                continue
            results.append(_result(await rehearsal.ask(ask)))
        printed = rehearsal.output(record.ref.uri, policy_test.TENANT)
    return {
        "results": results,
        "prints": printed.splitlines()[:PRINTED_LINES_MAX],
        "seconds": time.monotonic() - began,
        "fleet": size,
        "lines": await _lines(job, record),
    }


async def _fill(rehearsal: Rehearsal, job: PlaygroundJob) -> None:
    for document in job.documents:
        if job.clusters is None:
            await rehearsal.add_cluster(document)
        else:
            await rehearsal.note_document(document)
    for cluster in job.clusters or ():
        await rehearsal.step(ClusterSeen(cluster))
    if job.held:
        terms, policy = LeaseTerms(ttl_seconds=1e9), PolicyRef("held", "")
        who = (RequestId("held"), Tenant("others"), "")
        lease = Lease(*who, policy, tuple(job.held), 1, 0.0, 1e9, terms)
        apply(rehearsal.allocator.state, Granted(lease))


def _result(decision: Decision) -> JsonObject:
    answer: JsonObject = {"ok": False, "seconds": decision.seconds}
    if decision.values:
        value = decision.values[-1]
        answer["data"] = (
            value if len(msgspec.json.encode(value)) <= VALUE_BYTES_MAX else "too large"
        )
    match decision.answer:
        case LeaseNews(lease):
            return answer | {"ok": True, "placement": msgspec.to_builtins(lease.placement)}
        case Refusal(code=code, reason=reason, details=details):
            where = {name: details[name] for name in ("file", "line") if name in details}
            return answer | {"code": code, "reason": reason, **where}
        case None:
            return answer | {"code": "waiting", "reason": "it waits in the queue"}
        case _:  # Advice, which has no placement.
            return answer | {"ok": True, "placement": []}


async def _lines(job: PlaygroundJob, record: PolicyRecord) -> list[JsonObject]:
    """Return the time of each line of the policy for the first requests, on an empty fleet."""
    tried = policy_test.PolicyTestJob(job.policy, mode=job.mode, clusters=job.documents)
    profile = await policy_test.profile(tried, record, job.requests)
    if profile is None:
        return []
    return [each for each in profile["lines"] if each["file"] == ENTRY]


async def play_trace(job: PlaygroundJob) -> JsonObject:
    """Backtest a policy on a table of requests, starting with the given fleet empty.

    Raises:
        CommandError, TraceError: The table, or the policy, cannot be read.
        ServiceError: A document cannot be read.
        JailError: This machine has no jail.
    """
    clusters = job.clusters
    if clusters is None:
        clusters = [read_cluster_document(each).cluster for each in job.documents]
    with tempfile.TemporaryDirectory(prefix="moorage-") as folder:
        nodes, pods = Path(folder) / "nodes.csv", Path(folder) / "pods.csv"
        nodes.write_text(_table(clusters))
        pods.write_text(job.trace)
        given = BacktestJob(
            [job.policy], nodes=str(nodes), pods=str(pods), limit=TRACE_REQUESTS_MAX, mode=job.mode
        )
        report = await backtest(given)
    (run,) = report["rules"]
    curve = [[demanded / 100, used / 100] for _, demanded, used, _ in run["samples"]]
    return {
        "curve": curve,
        "allocation": run["allocation_percent"] / 100,
        "fragmentation": run["fragmentation_percent"] / 100,
        "asked": run["asked"],
        "granted": run["granted"],
        "refused": run["refusals"],
        "notes": report["notes"],
    }


def _table(clusters: list[Cluster]) -> str:
    """Return the nodes as a trace's table, which has one GPU model per node."""
    rows = ["sn,cpu_milli,memory_mib,gpu,model"]
    for cluster in clusters:
        for node in cluster.nodes:
            model = node.gpus[0].model.replace(",", " ") if node.gpus else ""
            name = f"{cluster.id}/{node.id}".replace(",", " ")
            rows.append(f"{name},{node.cpu_milli},{node.memory_mib},{len(node.gpus)},{model}")
    return "\n".join(rows) + "\n"
