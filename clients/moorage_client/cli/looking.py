"""The commands that only look: leases, status, why, queue, fleet."""

import json
import sys
from contextlib import aclosing
from typing import Annotated, Any

import typer

from moorage_client.answers import Lease
from moorage_client.cli.output import ends_in, fields, print_json, say, table, where
from moorage_client.cli.session import Session


def leases(
    session: Session,
    state: Annotated[str, typer.Option(help="Only those in this state, e.g. active or ended")] = "",
    cluster: Annotated[str, typer.Option(help="Only those on this cluster")] = "",
) -> None:
    """List your leases."""
    filters = {name: v for name, v in (("state", state), ("cluster", cluster)) if v}

    async def work(client: Any) -> list[Lease]:
        found: list[Lease] = await client.leases(**filters).all()
        return found

    found = session.run(work)
    if session.json:
        print_json([lease.document() for lease in found])
        return
    table(
        ("lease", "state", "where", "ends in>", "fencing>", "policy"),
        (
            (
                lease.id,
                lease.state,
                where(lease.placement),
                ends_in(lease.expires_at),
                lease.fencing,
                lease.policy_rule_uri,
            )
            for lease in found
        ),
        empty="No leases. Ask for one: moorage ask POLICY --gpus 1 --lease",
    )


def status(
    session: Session, subject: Annotated[str, typer.Argument(help="Id of a lease or request")]
) -> None:
    """Show a lease, or a request that waits."""
    _about(session, session.run(lambda client: client.status(subject)))


def why(
    session: Session, subject: Annotated[str, typer.Argument(help="Id of a lease or request")]
) -> None:
    """Show why a request was answered as it was, or why a lease ended."""
    _about(session, session.run(lambda client: client.why(subject)))


def queue(session: Session) -> None:
    """List your waiting requests, in the order in which they are served."""
    waiting = session.run(lambda client: client.queue().all())
    waiting.sort(key=lambda waiter: waiter.get("position", 0))
    if session.json:
        print_json(waiting)
        return
    table(
        ("position>", "request", "policy", "priority>", "gives up in>", "resources"),
        (
            (
                waiter.get("position", ""),
                waiter.get("request", ""),
                waiter.get("policy_rule_uri", ""),
                waiter.get("priority", ""),
                ends_in(float(waiter.get("deadline") or 0.0)),
                _wants(waiter.get("resources")),
            )
            for waiter in waiting
        ),
        empty="Nothing of yours waits.",
    )


def fleet(
    session: Session,
    cluster: Annotated[str, typer.Argument(help="Id of a cluster, to list its nodes")] = "",
) -> None:
    """List the clusters with what is free in them, or the nodes of one cluster."""
    rows = session.run(lambda client: client.fleet(cluster or None).all())
    if session.json:
        print_json(rows)
    elif cluster:
        table(
            ("node", "models", "GPUs free", "cpu milli free>", "memory MiB free>"),
            (
                (
                    row.get("node_id", ""),
                    _listed(row.get("models") or row.get("model")),
                    _free(row.get("gpus")),
                    row.get("cpu_milli_free", ""),
                    row.get("memory_mib_free", ""),
                )
                for row in rows
            ),
            empty=f"Cluster {cluster} has no nodes.",
        )
    else:
        table(
            ("cluster", "nodes>", "GPUs>", "GPUs free>", "CPUs free>", "memory MiB free>"),
            (
                (
                    row.get("cluster_id", ""),
                    row.get("nodes", ""),
                    row.get("gpus", ""),
                    _thousandths(row, "gpu_milli"),
                    _thousandths(row, "cpu_milli"),
                    f"{row.get('memory_mib_free', '?')}/{row.get('memory_mib_total', '?')}",
                )
                for row in rows
            ),
            empty="No clusters. Import some: moorage fleet import SOURCE",
        )


def watch(
    session: Session,
    topics: Annotated[
        list[str] | None, typer.Argument(help="policies, leases, fleet; all of them if left out")
    ] = None,
    count: Annotated[int, typer.Option(min=0, help="End after so many events; 0: never")] = 0,
) -> None:
    """Print what happens as it happens, one JSON object per line, until interrupted."""

    async def work(client: Any) -> None:
        seen = 0
        async with aclosing(client.watch(*(topics or ("policies", "leases", "fleet")))) as news:
            async for event in news:
                line = {"event": event.event, "topic": event.topic, "data": event.data}
                say(json.dumps(line, ensure_ascii=False))
                sys.stdout.flush()  # Whoever reads us wants it now.
                seen += 1
                if seen == count:
                    return

    session.run(work)


def _about(session: Session, document: dict[str, Any]) -> None:
    if session.json:
        print_json(document)
    else:
        lease = document.get("lease")
        whole = {**document, **lease} if isinstance(lease, dict) else document
        workload = whole.get("workload")
        if not isinstance(workload, dict):
            fields(whole)
            return
        _about_workload(whole, workload)


def _about_workload(lease: dict[str, Any], workload: dict[str, Any]) -> None:
    """Say how a lease and its workload are, and of the last failure what it wrote."""
    shown = {name: workload.get(name, "") for name in ("backend", "phase", "detail", "endpoint")}
    shown["attempt"] = f"{workload.get('attempt', 1)} of {workload.get('attempts_max', 1)}"
    fields({name: value for name, value in lease.items() if name != "workload"} | shown)
    outcome = workload.get("outcome")
    if isinstance(outcome, dict) and outcome.get("phase") == "failed":
        nodes = (f"{node['cluster_id']}/{node['node_id']}" for node in outcome.get("nodes", ()))
        say(f"attempt {outcome.get('attempt')} failed on {', '.join(nodes)}: {outcome['detail']}")
        for line in outcome.get("log_tail", ()):
            say(f"  {line}")


def _thousandths(row: dict[str, Any], name: str) -> str:
    free, total = row.get(f"{name}_free"), row.get(f"{name}_total")
    if not isinstance(free, int) or not isinstance(total, int):
        return "?"
    return f"{free / 1000:g}/{total / 1000:g}"


def _free(gpus: Any) -> str:
    """Return the devices of a node, with the thousandths free of each that is not all free."""
    if not isinstance(gpus, dict):
        return ""
    return " ".join(gpu if free == 1000 else f"{gpu}:{free}" for gpu, free in gpus.items())  # noqa: PLR2004  # A whole GPU.


def _listed(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value or "")


def _wants(resources: Any) -> str:
    if not isinstance(resources, dict):
        return ""
    return " ".join(f"{name}={value}" for name, value in resources.items() if value)
