"""In the help of the benchmarks, each line fits 80 columns, and no option is cut."""

import subprocess
import sys
from typing import Annotated

import pytest
import typer

from benchmarks.command_line import run_command


def wide(
    kinds: Annotated[
        list[typer.FileText] | None,
        typer.Option("--an-option-whose-name-needs-most-of-the-width", help="word " * 40),
    ] = None,
) -> None:
    """Take an option whose name and help are long."""


def test_the_help_of_the_benchmarks_is_plain_text_of_80_columns(monkeypatch, capsys) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "argv", ["program", "-h"])
    with pytest.raises(SystemExit, match="0"):
        run_command(wide)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert any("--an-option-whose-name-needs-most-of-the-width <" in line for line in lines)
    assert not any("│" in line for line in lines)


@pytest.mark.heavy
@pytest.mark.parametrize("module", ["benchmarks", "benchmarks.peers"])
def test_the_help_of_moored_and_moorage_fits_80_columns(module: str, monkeypatch) -> None:
    pytest.importorskip("jwt", reason="the extra `oidc` is not installed")
    monkeypatch.setenv("COLUMNS", "80")
    command = [sys.executable, "-m", module, "--help"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert max(map(len, said.splitlines())) <= 80
    assert "--json  " in said
