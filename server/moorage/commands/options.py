"""Options that several commands take."""

from pathlib import Path
from typing import Annotated

import typer

JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON document, nothing else.")]
SandboxOption = Annotated[
    str | None,
    typer.Option(help="`jail`, or `unsafe` for policies you trust as the daemon itself."),
]
DataOption = Annotated[Path | None, typer.Option(help="Folder of ledger and catalog.")]
FileOption = Annotated[Path | None, typer.Option(help="TOML file with settings.")]
