"""`moored doctor`."""

from pathlib import Path
from typing import Annotated

import typer

from moorage.commands.errors import load_config
from moorage.commands.options import JsonFlag


def doctor(
    as_json: JsonFlag = False,
    config: Annotated[Path | None, typer.Option(help="TOML file with settings.")] = None,
) -> None:
    """Tell which sandbox layers, services and backends work here; exit 1 if serve would fail."""
    from moorage.commands import display  # noqa: PLC0415  # As in serve.
    from moorage.commands.examination import examine  # noqa: PLC0415  # As in serve.

    findings = examine(load_config({}, config))
    display.doctor(findings, as_json=as_json)
    raise typer.Exit(any(finding.state == "broken" for finding in findings))
