"""Options that several commands take."""

import re
from pathlib import Path
from typing import Annotated, Final

import typer

JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON document, nothing else.")]
SandboxOption = Annotated[
    str | None,
    typer.Option(help="`jail`; or `unsafe`, if you trust all policies like the daemon itself."),
]
DataOption = Annotated[
    Path | None, typer.Option(help="Data folder, with ledger and catalog.", readable=False)
]
FileOption = Annotated[Path | None, typer.Option(help="TOML file with settings.")]

_DURATION: Final = re.compile(r"([0-9]{1,6})([smhdw])")
_UNIT_SECONDS: Final = {"s": 1, "m": 60, "h": 3_600, "d": 86_400, "w": 604_800}


def read_duration(text: str) -> int | None:
    """Return the seconds in a text such as `12h` or `30d`; None: the text is not a duration."""
    found = _DURATION.fullmatch(text)
    return None if found is None else int(found[1]) * _UNIT_SECONDS[found[2]]
