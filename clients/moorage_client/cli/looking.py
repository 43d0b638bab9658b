"""The commands that only read: leases, status, why, history, queue, fleet, watch."""

import re
import sys
from collections.abc import Mapping
from contextlib import aclosing
from decimal import Decimal
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Final

import typer
from msgspec import to_builtins

from moorage.model import GPU_MILLI
from moorage.records.json_values import JsonObject
from moorage.records.replies import (
    ClusterCapacity,
    DecisionRow,
    NodeCapacity,
    NodeVerdict,
    QueuedWaiter,
)
from moorage.records.requests import Resources
from moorage_client.answers import Lease, Workload, read_as, read_lease, read_object
from moorage_client.cli import completing
from moorage_client.cli.live import WatchFlag, show_listing
from moorage_client.cli.output import (
    count_things,
    ends_in,
    fields,
    in_words,
    local_time,
    say,
    short_name,
    to_line,
    where,
)
from moorage_client.cli.session import CommandSession
from moorage_client.listing import pages

if TYPE_CHECKING:
    from moorage_client.client import Client

HISTORY_MAX: Final = 10_000
SubjectArgument = Annotated[
    str, typer.Argument(help="Id of a lease or request", autocompletion=completing.subjects)
]


def leases(
    session: CommandSession,
    state: Annotated[
        str, typer.Option(help="Only leases in this state, e.g. active or ended")
    ] = "",
    cluster: Annotated[
        str, typer.Option(help="Only leases on this cluster", autocompletion=completing.clusters)
    ] = "",
    watch: WatchFlag = False,
) -> None:
    """List your leases."""
    filters = {name: v for name, v in (("state", state), ("cluster", cluster)) if v}

    async def work(client: "Client") -> list[JsonObject]:
        found = [lease.document() for lease in await client.leases(**filters).all()]
        if cluster and not found:  # If the name is wrong, this call fails with the nearest name.
            await anext(aiter(client.fleet(cluster)), None)
        return found

    def cells(lease: Lease) -> list[object]:
        shown: list[object] = [
            lease.id,
            lease.tenant,
            _state(lease),
            where(lease.placement),
            ends_in(lease.expires_at),
        ]
        shown += [lease.fencing, lease.policy_rule_uri]
        return [*shown, local_time(lease.granted_at), _phase(lease)] if session.wide else shown

    show_listing(
        session,
        work,
        [
            *("lease", "tenant?", "state", "where", "ends in>", "fencing>", "policy"),
            *(("granted", "workload") if session.wide else ()),
        ],
        lambda rows: [cells(read_lease(row)) for row in rows],
        empty="No leases. Ask for one: moorage ask POLICY --gpus 1 --lease",
        watch=watch,
    )


def _state(lease: Lease) -> str:
    is_lost = lease.workload is not None and lease.workload.phase == "lost"
    return f"{lease.state}, lost" if is_lost else lease.state


def _phase(lease: Lease) -> str:
    workload = lease.workload
    return "" if workload is None else f"{workload.backend} {workload.phase}"


def status(session: CommandSession, subject: SubjectArgument) -> None:
    """Show a lease or a waiting request."""
    session.show(session.run(lambda client: client.status(subject)), _about)


def why(
    session: CommandSession,
    subject: SubjectArgument,
    nodes: Annotated[
        bool, typer.Option("--nodes", help="Also show what each node lacks, the best nodes first")
    ] = False,
) -> None:
    """Show the reasons for the answer to a request, or for the end of a lease."""
    answer = session.run(lambda client: client.why(subject, nodes=nodes))
    if session.json or not nodes:
        session.show(answer, _about)
        return
    rows = read_as(list[NodeVerdict], answer.pop("node_verdicts", None) or [])
    more = answer.pop("next", None)
    session.show(answer, _about)
    for row in rows:
        say(f"  {row.cluster_id}: {row.text}")
    if more:
        say(f"  only the first {len(rows)} are listed")


class Became(StrEnum):
    """The outcome of a request or lease, as `history` shows it."""

    GRANTED = "granted"
    QUEUED = "queued"
    REQUEUED = "requeued"
    REFUSED = "refused"
    ENDED = "ended"


def history(
    session: CommandSession,
    state: Annotated[
        Became | None, typer.Option(help="Only decisions of this kind (else ended and refused)")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=HISTORY_MAX, help="Most rows to show")] = 20,
) -> None:
    """Show recently ended leases and refused requests with their reasons, newest first."""
    wanted = {Became.ENDED, Became.REFUSED} if state is None else {state}
    filters = {} if state is None else {"filters": {"state": state.value}}

    async def work(client: "Client") -> list[JsonObject]:
        listed = pages(client.url, client.call, ("decisions", "decisions"), read_object, filters)
        found: list[JsonObject] = []
        async for row in listed:
            if row.get("state") in wanted:
                found.append(row)
                if len(found) == limit:
                    break
        return found

    show_listing(
        session,
        work,
        ("when", "lease or request", "tenant?", "what", "policy", "resources", "why"),
        lambda rows: [
            [
                local_time(row.at),
                row.request,
                row.tenant,
                row.state,
                row.policy_rule_uri,
                _wants(row.resources),
                row.reason,
            ]
            for row in read_as(list[DecisionRow], rows)
        ],
        empty="Nothing yet. Held leases: moorage leases; waiting requests: moorage queue",
        watch=False,
    )


def queue(session: CommandSession, watch: WatchFlag = False) -> None:
    """List your waiting requests, in the order in which they are served."""

    async def work(client: "Client") -> list[JsonObject]:
        waiting = await client.queue().all()
        pairs = zip(read_as(list[QueuedWaiter], waiting), waiting, strict=True)
        return [document for _, document in sorted(pairs, key=lambda pair: pair[0].position)]

    def cells(waiter: QueuedWaiter) -> list[object]:
        shown: list[object] = [
            waiter.position,
            waiter.request,
            waiter.tenant,
            waiter.policy_rule_uri,
            waiter.priority,
        ]
        turn = "unknown" if waiter.expected_at is None else ends_in(waiter.expected_at)
        shown += [turn, ends_in(waiter.deadline), _wants(waiter.resources)]
        return [*shown, local_time(waiter.since)] if session.wide else shown

    show_listing(
        session,
        work,
        [
            *(
                "position>",
                "request",
                "tenant?",
                "policy",
                "priority>",
                "turn in>",
                "gives up in>",
                "resources",
            ),
            *(("since",) if session.wide else ()),
        ],
        lambda rows: [cells(each) for each in read_as(list[QueuedWaiter], rows)],
        empty="No request of yours is waiting.",
        watch=watch,
    )


def fleet(
    session: CommandSession,
    cluster: Annotated[
        str,
        typer.Argument(
            help="Id of a cluster, to list its nodes", autocompletion=completing.clusters
        ),
    ] = "",
    watch: WatchFlag = False,
) -> None:
    """List the clusters with their free capacity, or the nodes of one cluster."""
    if cluster:
        show_listing(
            session,
            lambda client: client.fleet(cluster).all(),
            ("node", "state", "models", "ids of free GPUs", "CPUs free>", "memory MiB free>"),
            _node_cells,
            empty=f"Cluster {cluster} has no nodes.",
            watch=watch,
            notes=_node_notes,
        )
    else:
        show_listing(
            session,
            lambda client: client.fleet().all(),
            ("cluster", "nodes>", "GPUs>", "GPUs free>", "CPUs free>", "memory MiB free>", "owner"),
            _cluster_cells,
            empty="No clusters. Import some: moorage fleet import SOURCE (`local` is this machine)",
            watch=watch,
            notes=_cluster_notes,
        )


def _node_cells(rows: list[JsonObject]) -> list[list[object]]:
    return [
        [
            short_name(node.node_id),
            node_state(node),
            ", ".join(node.models),
            _free(node.gpus),
            f"{node.cpu_milli_free / 1000:g}",
            node.memory_mib_free,
        ]
        for node in read_as(list[NodeCapacity], rows)
    ]


def node_state(node: NodeCapacity) -> str:
    """Return `ready`, or a short reason why the node gets no new leases."""
    if node.duplicate_of:
        return "duplicate"
    return re.split(r":| by | since |;", node.unavailable or "")[0] or "ready"


def _node_notes(rows: list[JsonObject]) -> list[str]:
    said: list[str] = []
    for node in read_as(list[NodeCapacity], rows):
        if node.duplicate_of:
            same = f"{short_name(node.node_id)} is the same machine as {node.duplicate_of}"
            said.append(f"{same}, and counts there.")
        if node.unavailable:
            said.append(f"{short_name(node.node_id)} gets no new leases: {node.unavailable}")
    return said


def _cluster_cells(rows: list[JsonObject]) -> list[list[object]]:
    return [
        [
            row.cluster_id,
            row.nodes,
            row.gpus,
            _thousandths(row.gpu_milli_free, row.gpu_milli_total),
            _thousandths(row.cpu_milli_free, row.cpu_milli_total),
            f"{row.memory_mib_free}/{row.memory_mib_total}",
            row.owner or "",
        ]
        for row in read_as(list[ClusterCapacity], rows)
    ]


def _cluster_notes(rows: list[JsonObject]) -> list[str]:
    return [
        f"{row.cluster_id}: {_of(row.nodes_unavailable, row.nodes)} nothing new;"
        f" why: moorage fleet {row.cluster_id}"
        for row in read_as(list[ClusterCapacity], rows)
        if row.nodes_unavailable
    ]


def watch(
    session: CommandSession,
    topics: Annotated[
        list[str] | None, typer.Argument(help="policies, leases, fleet; all of them if left out")
    ] = None,
    count: Annotated[
        int, typer.Option(min=0, help="End after this number of events; 0: never")
    ] = 0,
) -> None:
    """Print events as they happen, one JSON object per line, until interrupted."""

    async def work(client: "Client") -> None:
        seen = 0
        async with aclosing(client.watch(*(topics or ("policies", "leases", "fleet")))) as news:
            async for event in news:
                line = {"event": event.event, "topic": event.topic, "data": event.data}
                say(to_line(line))
                sys.stdout.flush()  # The reader of a pipe gets each event at once.
                seen += 1
                if seen == count:
                    return

    session.run(work)


def _about(document: JsonObject) -> None:
    lease = document.get("lease")
    whole = {**document, **lease} if isinstance(lease, dict) else document
    workload = whole.get("workload")
    if isinstance(workload, dict):
        _about_workload(whole, workload)
    else:
        fields(whole)


def _about_workload(lease: JsonObject, document: JsonObject) -> None:
    """Print the state of a lease and its workload, and the output of the last failed start."""
    workload = read_as(Workload, document)
    shown = {name: getattr(workload, name) for name in ("backend", "phase", "detail", "endpoint")}
    shown["attempt"] = f"{workload.attempt} of {workload.attempts_max}"
    fields({name: value for name, value in lease.items() if name != "workload"} | shown)
    outcome = workload.outcome
    if outcome is not None and outcome.phase == "failed":
        nodes = ", ".join(f"{node.cluster_id}/{node.node_id}" for node in outcome.nodes)
        say(f"attempt {outcome.attempt} failed on {nodes}: {outcome.detail}")
        for line in outcome.log_tail:
            say(f"  {line}")


def _thousandths(free: int | None, total: int | None) -> str:
    if free is None or total is None:
        return "?"
    return f"{free / Decimal(1000):g}/{total / Decimal(1000):g}"


def _free(gpus: Mapping[str, int]) -> str:
    """Return the free GPUs as text; a partly free GPU is followed by its free thousandths."""
    some = {gpu: free for gpu, free in gpus.items() if free}
    return " ".join(gpu if free == 1000 else f"{gpu}:{free}" for gpu, free in some.items())  # noqa: PLR2004  # A whole GPU.


def _of(some: int, nodes: int | str) -> str:
    return f"{some} of {count_things(nodes, 'node')} take{'s' * (some == 1)}"


def _wants(resources: Resources | None) -> str:
    wanted = to_builtins(resources) if resources else {}
    if wanted.get("gpu_milli") == GPU_MILLI:  # Whole ones, or none: that needs no word.
        del wanted["gpu_milli"]
    return in_words(wanted)
