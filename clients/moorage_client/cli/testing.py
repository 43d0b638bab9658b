"""Policies that are tried before a server gets them: what `test` and `push` share."""

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import typer

from moorage.model import Code
from moorage_client import server_extra
from moorage_client.cli.exits import Exit
from moorage_client.cli.output import note
from moorage_client.cli.server_program import run

ENTRY: Final = "function.py"
FINDINGS_SHOWN: Final = 10
BROKEN: Final = frozenset(
    {
        Code.POLICY_BAD_OUTPUT,
        Code.POLICY_CRASHED,
        Code.POLICY_ERROR,
        Code.POLICY_MEMORY,
        Code.POLICY_TIMEOUT,
    }
)
"""Outcomes of a policy that fails by itself, whatever it is asked about."""
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
    for line in (report["profile"] or {"lines": []})["lines"]:
        if path.is_file():
            line["file"] = Path(_own(path, line["file"])).name  # Columns are narrow.
    return report


def _own(path: Path, file: str) -> str:
    """Return where the author has a file of the policy; in an archive, its name there."""
    if path.is_file():
        return str(path) if file == ENTRY and path.suffix == ".py" else file
    for each in (path / "code" / file, path / file):
        if each.is_file():
            return str(each)
    return file


def test_first(path: Path, document: Mapping[str, Any], *, quiet: bool) -> None:
    """Try a policy before it is registered, where the server is installed here.

    What it proposes for requests that are not its own may be unsound here and sound there: that is
    told, and the server refuses such proposals one by one. What it raises is a reason to stop.

    Args:
        path: Where the author has it.
        document: Its PolicyRule document.
        quiet: Say only what stops it.

    Raises:
        typer.Exit: It fails.

    """
    tell = (lambda _: None) if quiet else note
    if server_extra.missing():
        tell(f"not tested: that needs the server here: {server_extra.INSTALL}")
        return
    try:
        report = tested(path, {"policy": document, "examples_suffice": True})
    except typer.BadParameter as error:  # No jail here, or code that only the server has.
        tell(f"not tested: {error}")
        return
    # What cannot be loaded the server refuses, with every line that is wrong.
    if report["passed"] or not report["requests"]:
        return
    broken = any(each["outcome"] in BROKEN for each in report["requests"])
    for finding in report["findings"][:FINDINGS_SHOWN]:
        (note if broken else tell)(finding)
    if not broken:
        tell(f"It is registered all the same. More: moorage policy test {path}")
        return
    note(
        f"{report['uri']} FAILS and was not registered. Mend it, give it examples of what it is"
        f" for, or push it with --no-test. More: moorage policy test {path}"
    )
    raise typer.Exit(Exit.RULE_FAILED)
