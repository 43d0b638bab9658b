"""What the commands print: progress and tables for people, one JSON document for programs."""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from moorage.benchmarks import replay as replaying
from moorage.commands.demonstration import DemoOutcome
from moorage.commands.findings import DoctorFinding
from moorage.lab.errors import CommandError

WITH_TRACE = frozenset({"churn", "grants", "placement", "rules"})
"""Benchmarks that take the files of a trace."""
_MARKS = {"ok": "[green]ok[/]", "missing": "[yellow]missing[/]", "broken": "[red]broken[/]"}


def _console() -> Console:
    return Console(soft_wrap=False, highlight=False)


def _print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(msgspec.to_builtins(value), indent=2) + "\n")


def demo(outcome: DemoOutcome, *, as_json: bool) -> None:
    """Show what the demo did."""
    if as_json:
        _print_json(outcome)
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
    """Replay with a progress bar on stderr, and show the outcome."""
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
        _print_json(report)
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
    console = _console()
    console.print(table)
    for run in runs:
        refusals = ", ".join(f"{code}: {count}" for code, count in run.refusals.items())
        console.print(f"seed {run.seed} refused: {refusals or 'nothing'}")


def doctor(findings: Sequence[DoctorFinding], *, as_json: bool) -> None:
    """Show what was found."""
    if as_json:
        ok = all(finding.state != "broken" for finding in findings)
        _print_json({"ok": ok, "findings": list(findings)})
        return
    table = Table(title="moored doctor")
    for heading in ("what", "state", "detail"):
        table.add_column(heading, overflow="fold")
    for finding in findings:
        # `moorage[aws]` and paths with brackets are text, not markup.
        table.add_row(Text(finding.name), _MARKS[finding.state], Text(finding.detail))
    _console().print(table)


def bench(
    names: Sequence[str],
    nodes: Path | None,
    pods: Path | None,
    table: Mapping[str, Any],
    churning: Mapping[str, Any],
    killing: Mapping[str, Any],
    *,
    as_json: bool,
) -> None:
    """Run benchmarks and show their figures.

    Args:
        names: Which; all that need no naming where empty.
        nodes: Node file of a trace.
        pods: Its request file.
        table: What `placement` shall compare.
        churning: What `churn` shall compare, as the fields of its `ChurnJob`.
        killing: What `kills` shall kill, and how often.
        as_json: Print one JSON document.

    """
    from moorage.benchmarks import bench as benchmarks  # noqa: PLC0415  # The others start in half the time.
    from moorage.benchmarks.churn import ChurnJob  # noqa: PLC0415  # As above.
    from moorage.benchmarks.churn_report import table as churn_table  # noqa: PLC0415  # As above.
    from moorage.benchmarks.waiting import table as waiting_table  # noqa: PLC0415  # As above.

    known = {**benchmarks.BENCHMARKS, **benchmarks.ON_REQUEST}
    unknown = [name for name in names if name not in known]
    if unknown:
        listed = ", ".join(known)
        raise CommandError(f"there is no benchmark {', '.join(unknown)}; there are {listed}")
    report: dict[str, Any] = {}
    for name in names or benchmarks.BENCHMARKS:
        tell = Console(stderr=True, quiet=as_json).print
        tell(f"{name} …")
        traces = {"nodes": nodes, "pods": pods}
        given: dict[str, dict[str, Any]] = {
            **dict.fromkeys(WITH_TRACE, traces),
            "placement": {**traces, **table, "progress": tell},
            "churn": {**traces, "job": ChurnJob(**churning), "progress": tell},
            "waiting": {"pods": pods, "progress": tell},
            "kubernetes": {"nodes": nodes},
            "kills": {**killing, "progress": tell},
        }
        more = _waiting(churning) if name == "waiting" else {}
        report[name] = known[name](**given.get(name, {}), **more)
    if as_json:
        _print_json(report)
        return
    if "placement" in report:
        _console().print(_placement(report.pop("placement")))
    if "churn" in report:
        _console().print(churn_table(report.pop("churn")))
    if "waiting" in report:
        _console().print(waiting_table(report.pop("waiting")))
    if report:
        _console().print(_figures(report))


def _waiting(churning: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `waiting` takes of the options that it shares with `churn`."""
    given = {"load": churning.get("loads", ()), "rule": churning.get("rules", ())}
    for name, values in given.items():
        if len(values) > 1:
            raise CommandError(f"waiting takes one --{name}, not {len(values)}")
    one = {name: values[0] for name, values in given.items() if values}
    return {**one, "draw": churning.get("plots", ())}


def _figures(report: Mapping[str, Mapping[str, Any]]) -> Table:
    table = Table(title="moored bench (ratios are to a baseline of the same run)")
    for heading in ("benchmark", "figure", "value"):
        table.add_column(heading, justify="right" if heading == "value" else "left")
    for name, figures in report.items():
        for figure, value in figures.items():
            shown = f"{value:.4g}" if isinstance(value, float) else str(value)
            table.add_row(name, figure, shown)
        table.add_section()
    return table


def _placement(figures: Mapping[str, Any]) -> Table:
    """Return a row per trace and policy, with published figures where there are any."""
    known = bool(figures["of"])
    table = Table(
        title=f"GPUs in use at 130 % arrived, percent of the cluster; {figures['seeds']} seeds",
        caption=f"{figures['agree']} of {figures['of']} means agree with the published ones"
        if known
        else None,
    )
    for heading in ("trace", "policy"):
        table.add_column(heading, overflow="fold")
    for heading in ("published", "here", "apart", "allowed") if known else ("here",):
        table.add_column(heading, justify="right")
    streams = any(row["by_stream_seed"] for row in figures["table"])
    if streams:
        table.add_column("by stream seed")
    for row in figures["table"]:
        here = f"{row['reached']:.2f} ± {row['deviation']:.2f}"
        if row["published"] is not None:
            cells = [
                f"{row['published']:.2f} ± {row['published_deviation']:.2f}",
                here,
                f"{row['difference']:+.2f}{'' if row['agrees'] else ' !'}",
                f"{row['allowed']:.2f}",
            ]
        else:
            cells = ["", here, "", ""] if known else [here]
        by_stream = " ".join(f"{mean:.2f}" for mean in row["by_stream_seed"].values())
        table.add_row(row["trace"], row["rule"], *cells, *([by_stream] * streams))
    return table
