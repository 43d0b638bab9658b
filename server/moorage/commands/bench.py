"""`moored bench`."""

from pathlib import Path
from typing import Annotated

import typer

from moorage.commands.errors import command_errors
from moorage.commands.options import JsonFlag


def bench(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            help="grants, startup, first_lease, candidates, workflow, fleet, slots, rules, "
            "sandbox, engines; all of these by default. placement and kills, where named."
        ),
    ] = None,
    nodes: Annotated[
        Path | None, typer.Option(help="Node file of a trace: `grants`, `rules`, `placement`.")
    ] = None,
    pods: Annotated[
        Path | None, typer.Option(help="Request file; `placement` takes all beside the nodes.")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each kind, for `placement`.")] = 10,
    rule: Annotated[
        list[str] | None,
        typer.Option(help="For `placement`, repeatable; else the six published ones."),
    ] = None,
    stream_seeds: Annotated[
        int, typer.Option(min=1, help="For `placement`: seeds of `expected_fill`'s streams.")
    ] = 1,
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
        table = {"seeds": seeds, "rules": rule or [], "stream_seeds": stream_seeds}
        killing = {"times": kills, "category": category, "image": image}
        display.bench(names or [], nodes, pods, table, killing, as_json=as_json)
