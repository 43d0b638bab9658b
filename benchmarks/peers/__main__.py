"""`python -m benchmarks.peers [NAME…]`: measures Moorage and its peers on one machine."""

from pathlib import Path
from typing import Annotated, Final

import typer
import uvloop
from rich.console import Console

from benchmarks.command_line import run_command
from benchmarks.peers import (
    dask_semaphore,
    etcd_transactions,
    kube_scheduler,
    kueue,
    moorage_itself,
    postgres_best_fit,
    postgres_rows,
    prefect_limit,
    ray_groups,
    redis_locks,
    redis_script,
    slurm,
)
from benchmarks.peers.measure import Figures, measure
from benchmarks.peers.report import JSON_FILE, PeersReport, Row, keep, machine, table, today
from benchmarks.peers.session import Peer
from moorage.bench.grants import make_nodes
from moorage.bench.placements import Nodes, check_size
from moorage.commands import display
from moorage.commands.errors import command_errors
from moorage.commands.options import JsonFlag
from moorage.lab import trace
from moorage.lab.errors import CommandError

PEERS: Final[dict[str, Peer]] = {
    peer.name: peer
    for peer in (
        redis_locks.PEER,
        redis_script.PEER,
        postgres_rows.PEER,
        postgres_best_fit.PEER,
        etcd_transactions.PEER,
        dask_semaphore.PEER,
        kube_scheduler.PEER,
        kueue.PEER,
        slurm.PEER,
        ray_groups.PEER,
        prefect_limit.PEER,
    )
}


def compare(
    names: Annotated[
        list[str] | None,
        typer.Argument(help=f"{', '.join(PEERS)}; or a group: home-made, schedulers."),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; each peer runs in each round.")] = 3,
    nodes: Annotated[
        Path | None, typer.Option(help="Node file of a trace; default: 1,213 made-up nodes.")
    ] = None,
    keep_it: Annotated[
        bool, typer.Option("--keep", help=f"Write {JSON_FILE} and the table of its page.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Measure Moorage beside its peers. Installs nothing, but prints the install commands."""
    console = Console(stderr=True, quiet=as_json, highlight=False)
    with command_errors():
        chosen = _choose(names or list(PEERS))
        report = PeersReport(machine=machine())
        for peer in list(chosen):
            if peer.version() is None:
                chosen.remove(peer)
                report.skipped[peer.name] = peer.install
                console.print(f"{peer.name}: skipped, as it is not here: {peer.install}")
        fleet = trace.read_nodes(nodes) if nodes else make_nodes()
        check_size(fleet)
        for number in range(rounds):
            console.print(f"round {number + 1} of {rounds}")
            _round(report, chosen, fleet, console)
            if keep_it:  # After each round, so that an interrupted run keeps its results.
                keep(report)
    if as_json:
        display.print_json(report)
    elif report.rows:
        display.show(table(report.rows.values()))
    if report.failed:
        raise typer.Exit(1)


def _choose(names: list[str]) -> list[Peer]:
    groups = {peer.group for peer in PEERS.values()}
    if unknown := [name for name in names if name not in PEERS and name not in groups]:
        listed = ", ".join([*PEERS, *sorted(groups)])
        raise CommandError(f"there is no peer {', '.join(unknown)}; there are {listed}")
    return [peer for peer in PEERS.values() if peer.name in names or peer.group in names]


def _round(report: PeersReport, chosen: list[Peer], fleet: Nodes, console: Console) -> None:
    """Run Moorage and then its peers, for each group; go on with the next peer if one fails."""
    for group in dict.fromkeys(peer.group for peer in chosen):
        ours = _run(moorage_itself.PEER, fleet, console)
        for peer in (peer for peer in chosen if peer.group == group):
            try:
                found = _run(peer, fleet, console)
            except CommandError as error:
                report.failed[peer.name] = str(error)
                console.print(f"  {peer.name}: failed: {error}")
                continue
            version = peer.version() or ""
            row = report.rows.setdefault(
                peer.name, Row(today(), group, peer.title, version, peer.decides, peer.stores)
            )
            row.runs.append(found)
            row.moorage.append(ours)


def _run(peer: Peer, fleet: Nodes, console: Console) -> Figures:
    nodes = peer.part(fleet)
    found = uvloop.run(measure(peer, nodes))
    console.print(
        f"  {peer.name}: {found.per_second:,.0f}/s, single {found.single_ms:.2f} ms, "
        f"wake {found.wake_ms:.2f} ms, load {found.load:.1f}"
    )
    return found


if __name__ == "__main__":
    run_command(compare)
