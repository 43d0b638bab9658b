"""`moored bench`."""

from pathlib import Path
from typing import Annotated

import typer

from moorage.commands.errors import command_errors
from moorage.commands.options import JsonFlag


def bench(
    names: Annotated[
        list[str] | None,
        typer.Argument(help="grants or sandbox (default: both), or kubernetes."),
    ] = None,
    nodes: Annotated[
        Path | None, typer.Option(help="Node file of a trace, for `grants` and `kubernetes`.")
    ] = None,
    pods: Annotated[
        Path | None, typer.Option(help="Request file of the trace, for `grants`.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Measure the costs of the server. Figures are ratios to a baseline of the same run."""
    from moorage.commands import display  # noqa: PLC0415  # As in serve.

    with command_errors():
        display.bench(names or [], nodes, pods, as_json=as_json)
