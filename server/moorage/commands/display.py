"""Prints the commands' output: progress and tables for people, one JSON document for programs."""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from moorage.bench import replay as replaying
from moorage.commands.demonstration import DemoOutcome
from moorage.lab.errors import CommandError
from moorage.records.findings import DoctorFinding
from moorage.records.json_values import JsonMapping, JsonObject

_UNBOUNDED = 10_000
"""Terminal width that no table exceeds."""
_MARKS = {
    "ok": "[green]ok[/]",
    "missing": "[yellow]missing[/]",
    "warning": "[bold yellow]warning[/]",
    "broken": "[red]broken[/]",
}


def _console() -> Console:
    return Console(soft_wrap=False, highlight=False)


def show(*tables: Table) -> None:
    """Print tables; if a table is too wide, print each row as several lines."""
    console = _console()
    for table in tables:
        wide = console.options.update(width=_UNBOUNDED)
        if console.measure(table, options=wide).maximum <= console.width:
            console.print(table)
        else:
            _show_rows(console, table)


def _show_rows(console: Console, table: Table) -> None:
    """Print one line for each cell, and an empty line between rows."""
    headings = [str(column.header) for column in table.columns]
    made = Table(show_header=False)  # A title would wrap at the width of the cells.
    made.add_column(no_wrap=True)
    made.add_column(overflow="fold")
    for cells in zip(*(column.cells for column in table.columns), strict=True):
        for heading, cell in zip(headings, cells, strict=True):
            made.add_row(heading, cell)
        made.add_section()
    console.print(*filter(None, (table.title, made, table.caption)), sep="\n")


def print_json(value: object) -> None:
    """Print a JSON document."""
    sys.stdout.write(json.dumps(msgspec.to_builtins(value), indent=2) + "\n")


def demo(outcome: DemoOutcome, *, as_json: bool) -> None:
    """Print the result of the demo."""
    if as_json:
        print_json(outcome)
        return
    console = _console()
    for exchange in outcome.exchanges:
        console.print(f"\n[bold]{exchange.title}[/]")
        console.print("  → " + json.dumps(exchange.request), soft_wrap=True, markup=False)
        reply = exchange.reply
        if reply["success"]:
            console.print("  ← " + json.dumps(reply["data"]), soft_wrap=True, markup=False)
        else:
            console.print("  ← no: " + reply["message"], soft_wrap=True, markup=False)
        if (lease := reply.get("lease")) is not None:
            where = ", ".join(
                f"{share['cluster_id']}/{share['node_id']} GPUs {','.join(share['gpus'])}"
                for share in lease["placement"]
            )
            text = f"  lease {lease['id']}: {lease['state']}, {where}, fencing {lease['fencing']}"
            console.print(text, soft_wrap=True, markup=False)
        if (reasons := reply.get("reasons")) is not None:
            console.print("  because " + json.dumps(reasons), soft_wrap=True, markup=False)
    console.print(f"\nFirst lease {outcome.first_lease_seconds:.2f} s after the start.")


def replay(options: replaying.Options, *, as_json: bool) -> None:
    """Replay a trace with a progress bar on stderr, and show the outcome."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    total = replaying.length(options)
    with Progress(*columns, console=Console(stderr=True), disable=as_json) as progress:
        task = progress.add_task(f"{options.policy}, {options.seeds} seed(s)", total=total)
        runs = replaying.replay(options, lambda count: progress.advance(task, count))
    report = replaying.report(options, runs)
    if as_json:
        print_json(report)
        return
    table = Table(title=f"{options.policy} on {options.pods.name}, {options.arrive:g} × capacity")
    for heading in (
        "seed",
        "asked",
        "answers",
        "grants",
        "alloc. %",
        "at 100 %",
        "grants/s",
        "p50 ms",
        "p99 ms",
    ):
        table.add_column(heading, justify="right")
    for run in runs:
        table.add_row(
            str(run.seed),
            str(run.requests),
            str(run.answered),
            str(run.granted),
            f"{run.allocation_percent:.2f}",
            f"{run.allocation_percent_at_100:.2f}",
            f"{run.grants_per_second:.0f}",
            f"{1e3 * run.p50_seconds:.2f}",
            f"{1e3 * run.p99_seconds:.2f}",
        )
    table.add_section()
    table.add_row(
        "mean",
        f"{report['requests'] / len(runs):.0f}",
        f"{report['answered'] / len(runs):.0f}",
        f"{report['granted'] / len(runs):.0f}",
        f"{report['allocation_percent']:.2f}",
        f"{report['allocation_percent_at_100']:.2f}",
        f"{report['grants_per_second']:.0f}",
        f"{report['p50_ms']:.2f}",
        f"{report['p99_ms']:.2f}",
    )
    show(table)
    console = _console()
    for run in runs:
        refusals = ", ".join(f"{code}: {count}" for code, count in run.refusals.items())
        console.print(f"seed {run.seed} refused: {refusals or 'nothing'}")


def doctor(findings: Sequence[DoctorFinding], *, as_json: bool) -> None:
    """Print the findings."""
    if as_json:
        ok = all(finding.state != "broken" for finding in findings)
        print_json({"ok": ok, "findings": list(findings)})
        return
    table = Table(title="moored doctor")
    for heading in ("what", "state", "detail"):
        table.add_column(heading, overflow="fold")
    for finding in findings:
        # `moorage[aws]` and paths with brackets are text, not markup.
        table.add_row(Text(finding.name), _MARKS[finding.state], Text(finding.detail))
    show(table)


def bench(names: Sequence[str], nodes: Path | None, pods: Path | None, *, as_json: bool) -> None:
    """Run benchmarks and show their figures.

    Args:
        names: The benchmarks; empty: all but those that must be named.
        nodes: Node file of a trace.
        pods: Request file of the trace.
        as_json: Whether to print one JSON document.
    """
    from moorage.bench.grants import BENCHMARKS, ON_REQUEST  # noqa: PLC0415  # The others start in half the time.

    if unknown := [name for name in names if name not in BENCHMARKS]:
        raise CommandError(
            f"there is no benchmark {', '.join(unknown)}; there are {', '.join(BENCHMARKS)}; "
            "a checkout of the source has more: python -m benchmarks"
        )
    given = {"grants": {"nodes": nodes, "pods": pods}, "kubernetes": {"nodes": nodes}}
    report: JsonObject = {}
    for name in names or [name for name in BENCHMARKS if name not in ON_REQUEST]:
        Console(stderr=True, quiet=as_json).print(f"{name} …")
        report[name] = BENCHMARKS[name](**given.get(name, {}))
    if as_json:
        print_json(report)
    else:
        show(figures(report))


def figures(report: Mapping[str, JsonMapping]) -> Table:
    """Return a table of the figures of benchmarks, by their names."""
    table = Table(title="ratios are to a baseline of the same run")
    for heading in ("benchmark", "figure", "value"):
        table.add_column(heading, justify="right" if heading == "value" else "left")
    for name, found in report.items():
        for figure, value in found.items():
            shown = f"{value:.4g}" if isinstance(value, float) else str(value)
            table.add_row(name, figure, shown)
        table.add_section()
    return table
