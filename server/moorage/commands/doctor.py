"""`moored doctor`."""

import os
from pathlib import Path
from typing import Final

import typer

from moorage.commands.errors import load_config, refuse_stranger
from moorage.commands.options import DataOption, FileOption, JsonFlag
from moorage.config.sources import ConfigError, default_data_dir, settings_file

_ADVICE: Final = "; for a server with another folder: moored doctor --data DIR"


def doctor(
    as_json: JsonFlag = False,
    data: DataOption = None,
    config: FileOption = None,
) -> None:
    """Show which sandbox layers, services and backends work; exit 1 if something is broken."""
    from moorage.commands import display  # noqa: PLC0415  # As in serve.
    from moorage.commands.examination import examine  # noqa: PLC0415  # As in serve.

    settings = load_config({"data_dir": data}, config)
    refuse_stranger(settings.data_dir)
    advice = _ADVICE if _is_default(settings.data_dir) else ""
    findings = examine(settings, advice, settings_file(os.environ, config))
    display.doctor(findings, as_json=as_json)
    raise typer.Exit(any(finding.state == "broken" for finding in findings))


def _is_default(folder: Path) -> bool:
    try:
        return folder == default_data_dir(os.environ)
    except ConfigError:  # There is no home.
        return False
