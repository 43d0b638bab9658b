"""Policies that are tried before a server gets them: what `test` and `push` share."""

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import typer

from moorage_client import server_extra
from moorage_client.cli.exits import Exit
from moorage_client.cli.output import note
from moorage_client.cli.server_program import run

ENTRY: Final = "function.py"
FINDINGS_SHOWN: Final = 10
_PLACE: Final = re.compile(r"(?<![\w./-])([\w./-]+\.py)(?=,? line \d)")
"""A file of a policy where a finding names one."""


def tested(path: Path, job: Mapping[str, Any]) -> dict[str, Any]:
    """Try a policy, and return the report with the author's own file names.

    Args:
        path: Where the author has it.
        job: As `moorage.lab.policy_test.PolicyTestJob` has it.

    """
    report = run("test", {**job, "progress": sys.stderr.isatty()})
    for name in ("findings", "notes"):
        report[name] = [
            _PLACE.sub(lambda found: _own(path, found[1]), each) for each in report[name]
        ]
    return report


def _own(path: Path, file: str) -> str:
    """Return where the author has a file of the policy; in an archive, its name there."""
    if path.is_file():
        return str(path) if file == ENTRY and path.suffix == ".py" else file
    for each in (path / "code" / file, path / file):
        if each.is_file():
            return str(each)
    return file


def test_first(path: Path, document: Mapping[str, Any]) -> None:
    """Try a policy before it is registered, where the server is installed here.

    Raises:
        typer.Exit: It is not sound.

    """
    if server_extra.missing():
        note(f"not tested: that needs the server here: {server_extra.INSTALL}")
        return
    try:
        report = tested(path, {"policy": document, "examples_suffice": True})
    except typer.BadParameter as error:  # No jail here, or code that only the server has.
        note(f"not tested: {error}")
        return
    if report["passed"] or not report["requests"]:
        return  # What cannot be loaded the server refuses, with every line that is wrong.
    for finding in report["findings"][:FINDINGS_SHOWN]:
        note(finding)
    if report["untried"]:  # It was not asked what it is for; the server tries its own examples.
        return
    note(
        f"{report['uri']} is NOT SOUND and was not registered. Mend it, give it examples of what it"
        f" is for, or push it with --no-test. More: moorage policy test {path}"
    )
    raise typer.Exit(Exit.RULE_FAILED)
