"""`python -m benchmarks NAME…`: benchmarks for developers, whose figures are ratios to baselines.

Users measure their own machines with `moored bench`.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.backend_costs import engines
from benchmarks.churn import ChurnJob, churn
from benchmarks.churn_report import table as churn_table
from benchmarks.command_line import run_command
from benchmarks.consoles import consoles
from benchmarks.credentials import REQUESTS, credentials
from benchmarks.fleet import fleet
from benchmarks.floods import floods
from benchmarks.floods import table as floods_table
from benchmarks.kills import kills as kill
from benchmarks.observation import observation
from benchmarks.packing import packing_costs
from benchmarks.placement import placement
from benchmarks.policy_costs import policies
from benchmarks.query import query
from benchmarks.queue_costs import queue
from benchmarks.slot_costs import slots
from benchmarks.startup import first_lease, startup
from benchmarks.waiting import tables as waiting_tables
from benchmarks.waiting import waiting
from benchmarks.workflow import workflow
from moorage.bench.grants import read_trace
from moorage.commands import display
from moorage.commands.errors import command_errors
from moorage.commands.options import JsonFlag
from moorage.lab.errors import CommandError
from moorage_client.cli.offline import Stays as StayLength

BENCHMARKS: Final[dict[str, Callable[..., dict[str, Any]]]] = {
    "startup": startup,
    "first_lease": first_lease,
    "workflow": workflow,
    "fleet": fleet,
    "slots": slots,
    "queue": queue,
    "query": query,
    "engines": engines,
    "rules": lambda nodes, pods: policies(*read_trace(nodes, pods)),
    "packing": packing_costs,
    "placement": placement,
    "churn": churn,
    "waiting": waiting,
    "kills": kill,
    "floods": floods,
    "credentials": credentials,
    "observation": observation,
    "consoles": consoles,
}
ON_REQUEST: Final = frozenset(
    {
        *("packing", "placement", "churn", "waiting", "kills", "floods", "credentials"),
        *("observation", "consoles"),
    }
)
"""Benchmarks that run only if they are named, since they need a trace or many minutes."""


Names = Annotated[
    list[str] | None,
    typer.Argument(
        help="startup, first_lease, workflow, fleet, slots, queue, query, engines, "
        "rules; only where they are named: packing, placement, churn, waiting, kills, floods, "
        "credentials, observation, consoles."
    ),
]
Nodes = Annotated[
    Path | None, typer.Option(help="Node file of a trace, for benchmarks that place requests.")
]
Pods = Annotated[
    Path | None,
    typer.Option(help="Request file; default of `placement` and `churn`: all beside the nodes."),
]
Seeds = Annotated[
    int | None,
    typer.Option(min=1, help="Runs of each kind: 10 for `placement`, 5 for `packing` and `churn`."),
]
Rules = Annotated[
    list[str] | None,
    typer.Option(
        help="Policy, repeatable: for `placement` in the place of the six published ones, for "
        "`churn` of fgd, best_fit, expected_fill_unpriced and expected_fill."
    ),
]
Loads = Annotated[
    list[float] | None,
    typer.Option(help="GPU demand / capacity, repeatable for `churn`: 0.85, 0.95, 1.05, 1.2."),
]
Stays = Annotated[
    list[StayLength] | None,
    typer.Option(help="For `churn`, repeatable: kind of stays; default: memoryless."),
]
Queued = Annotated[bool, typer.Option("--queued", help="For `churn`: requests without room wait.")]
Length = Annotated[float, typer.Option(min=0.01, help="For `churn`: measured time, in mean stays.")]
Later = Annotated[
    Path | None,
    typer.Option(help="For `churn`: request file of the second half of the measured time."),
]
Plots = Annotated[
    list[Path] | None,
    typer.Option(help="For `churn`, `waiting`: draw to this .png or .svg file; repeatable."),
]
Kills = Annotated[int, typer.Option(min=1, help="For `kills`: kills of the daemon.")]
Category = Annotated[str, typer.Option(help="For `kills`: `process` or `container` workloads.")]
Attacks = Annotated[
    list[str] | None, typer.Option("--attack", help="For `floods`, repeatable; default: all.")
]
Seconds = Annotated[float, typer.Option(min=1, help="For `floods`: how long each attack lasts.")]
Requests = Annotated[int, typer.Option(min=1, help="For `credentials`.")]
Image = Annotated[str | None, typer.Option(help="For `kills`: image of its containers.")]


def measure(
    names: Names = None,
    nodes: Nodes = None,
    pods: Pods = None,
    seeds: Seeds = None,
    rule: Rules = None,
    load: Loads = None,
    stays: Stays = None,
    queued: Queued = False,
    length: Length = 2.0,
    later: Later = None,
    plot: Plots = None,
    kills: Kills = 20,
    category: Category = "process",
    image: Image = None,
    attack: Attacks = None,
    seconds: Seconds = 60.0,
    requests: Requests = REQUESTS,
    as_json: JsonFlag = False,
) -> None:
    """Measure Moorage. Every figure is a ratio to a baseline taken in the same run."""
    with command_errors():
        if unknown := [name for name in names or () if name not in BENCHMARKS]:
            listed = ", ".join(BENCHMARKS)
            raise CommandError(f"there is no benchmark {', '.join(unknown)}; there are {listed}")
        tell = Console(stderr=True, quiet=as_json).print
        lengths = [each.value for each in stays or []]
        given = {"rules": rule, "loads": load, "stays": lengths, "seeds": seeds, "plots": plot}
        churning: dict[str, Any] = {name: value for name, value in given.items() if value}
        churning |= {"queued": queued, "length": length, "later": later}
        traces = {"nodes": nodes, "pods": pods}
        table = {"seeds": seeds or 10, "rules": rule or []}
        arguments: dict[str, Callable[[], dict[str, Any]]] = {
            "rules": lambda: traces,
            "packing": lambda: {**traces, "seeds": seeds or 5},
            "placement": lambda: {**traces, **table, "progress": tell},
            "churn": lambda: {**traces, "job": ChurnJob(**churning), "progress": tell},
            "waiting": lambda: {"pods": pods, "progress": tell, **_waiting(churning)},
            "kills": lambda: {
                "times": kills,
                "category": category,
                "image": image,
                "progress": tell,
            },
            "floods": lambda: {"attacks": attack or (), "seconds": seconds, "progress": tell},
            "observation": lambda: {"progress": tell},
            "consoles": lambda: {"progress": tell},
            "credentials": lambda: {"requests": requests, "progress": tell},
        }
        report: dict[str, Any] = {}
        for name in names or [name for name in BENCHMARKS if name not in ON_REQUEST]:
            tell(f"{name} …")
            report[name] = BENCHMARKS[name](**arguments.get(name, dict)())
    if as_json:
        display.print_json(report)
    else:
        _show(report)


def _waiting(churning: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of the benchmark `waiting`, from those of `churn` with the same names."""
    given = {"load": churning.get("loads", ()), "rule": churning.get("rules", ())}
    for name, values in given.items():
        if len(values) > 1:
            raise CommandError(f"waiting: expected one --{name}, got {len(values)}")
    one = {name: values[0] for name, values in given.items() if values}
    return {**one, "draw": churning.get("plots", ())}


def _show(report: dict[str, Any]) -> None:
    if "waiting" in report:
        display.show(*waiting_tables(report.pop("waiting")))
    tables = {"placement": _placement, "churn": churn_table, "floods": floods_table}
    for name in tables.keys() & report.keys():
        display.show(tables[name](report.pop(name)))
    if report:
        display.show(display.figures(report))


def _placement(figures: Mapping[str, Any]) -> Table:
    """Return a row per trace and policy, with published figures if they exist."""
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
        table.add_row(row["trace"], row["rule"], *cells)
    return table


if __name__ == "__main__":
    run_command(measure)
