"""`moored bench`."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from moorage.commands.errors import command_errors
from moorage.commands.options import JsonFlag


class StayLength(StrEnum):
    """How long requests stay, for `churn`; as `lab.churn` has it."""

    MEMORYLESS = "memoryless"
    LOGNORMAL = "lognormal"
    SIZED = "sized"


def bench(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            help="grants, startup, first_lease, candidates, workflow, fleet, slots, queue, rules, "
            "sandbox, engines; where named: placement, churn, waiting, kills, kubernetes."
        ),
    ] = None,
    nodes: Annotated[
        Path | None,
        typer.Option(help="Node file of a trace, for those that place requests on nodes."),
    ] = None,
    pods: Annotated[
        Path | None,
        typer.Option(help="Request file; `placement` and `churn` take all beside the nodes."),
    ] = None,
    seeds: Annotated[
        int | None,
        typer.Option(min=1, help="Runs of each kind: 10 for `placement`, 5 for `churn`."),
    ] = None,
    rule: Annotated[
        list[str] | None,
        typer.Option(
            help="Policy, repeatable: for `placement` in the place of the six published ones, for "
            "`churn` of fgd, best_fit, expected_fill_unpriced and expected_fill."
        ),
    ] = None,
    stream_seeds: Annotated[
        int, typer.Option(min=1, help="For `placement`: seeds of `expected_fill`'s streams.")
    ] = 1,
    load: Annotated[
        list[float] | None,
        typer.Option(help="GPU demand / capacity, repeatable for `churn`: 0.85, 0.95, 1.05, 1.2."),
    ] = None,
    stays: Annotated[
        list[StayLength] | None,
        typer.Option(help="For `churn`, repeatable: how long requests stay; memoryless."),
    ] = None,
    queued: Annotated[
        bool, typer.Option("--queued", help="For `churn`: what finds no room waits.")
    ] = False,
    length: Annotated[
        float, typer.Option(min=0.01, help="For `churn`: mean stays that are measured.")
    ] = 2.0,
    later: Annotated[
        Path | None,
        typer.Option(help="For `churn`: the requests of the second half of what is measured."),
    ] = None,
    plot: Annotated[
        list[Path] | None,
        typer.Option(help="For `churn`, `waiting`: draw to this .png or .svg file; repeatable."),
    ] = None,
    kills: Annotated[int, typer.Option(min=1, help="For `kills`: of the daemon.")] = 20,
    category: Annotated[
        str, typer.Option(help="For `kills`: `process` or `container` workloads.")
    ] = "process",
    image: Annotated[str | None, typer.Option(help="For `kills`: of its containers.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Measure what it costs. Every figure is a ratio to a baseline taken in the same run."""
    from moorage.commands import display  # noqa: PLC0415  # As in serve.

    with command_errors():
        table = {"seeds": seeds or 10, "rules": rule or [], "stream_seeds": stream_seeds}
        how_long = [each.value for each in stays or []]
        given = {"rules": rule, "loads": load, "stays": how_long, "seeds": seeds, "plots": plot}
        churning: dict[str, Any] = {name: value for name, value in given.items() if value}
        churning |= {"queued": queued, "length": length, "later": later}
        killing = {"times": kills, "category": category, "image": image}
        display.bench(names or [], nodes, pods, table, churning, killing, as_json=as_json)
