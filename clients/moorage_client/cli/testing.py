"""Tests a policy before a server gets it, for `policy test` and `policy push`."""

import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import typer

from moorage.extras import install_command
from moorage.model import Code
from moorage.records.json_values import JsonMapping, JsonObject
from moorage_client import server_extra
from moorage_client.answers import read_as
from moorage_client.cli.exits import Exit
from moorage_client.cli.output import failure, note, print_json
from moorage_client.cli.server_program import run
from moorage_client.errors import RequestRefused
from moorage_client.text_files import plain_name

ENTRY: Final = "function.py"
FINDINGS_SHOWN: Final = 10
_PLACE: Final = re.compile(r"(?<![\w./-])([\w./-]+\.py)(?=,? line \d|: )")
"""Matches the name of a policy's file in a finding of a test."""


def test_file_of(path: Path, job: JsonMapping) -> JsonObject:
    """Test a policy; return the report with the author's own file names.

    Args:
        path: The author's path of the policy.
        job: Fields of `moorage.lab.policy_test.PolicyTestJob`.
    """
    report = run("test", {**job, "progress": sys.stderr.isatty()})
    for name in ("findings", "notes"):
        report[name] = [with_own_names(path, each) for each in report[name]]
    for line in (report["profile"] or {"lines": []})["lines"]:
        if path.is_file():
            line["file"] = Path(_own(path, line["file"])).name  # Columns are narrow.
    return report


def policy_name(path: Path) -> str:
    """Return the default name of a policy: the name of its file or folder."""
    return plain_name(path) or "policy"


def _own(path: Path, file: str) -> str:
    """Return the author's path of a policy's file; in an archive, the name inside it."""
    if path.is_file():
        return str(path) if file in {ENTRY, path.name} and path.suffix == ".py" else file
    for each in (path / "code" / file, path / file):
        if each.is_file():
            return str(each)
    return file


def test_first(path: Path, document: JsonMapping, done: str, *, quiet: bool, force: bool) -> None:
    """Test a policy before a server gets it, if the server package is installed here.

    Args:
        path: The author's file or folder, or the URI of a policy on a server.
        document: The policy's PolicyRule document.
        done: The action after a success, as a word such as `registered`.
        quiet: Whether to print only faults that stop the action, as one JSON document.
        force: Whether to continue even if the policy is not sound.

    Raises:
        typer.Exit: The policy is not sound.
    """
    tell = (lambda _: None) if quiet else note
    if server_extra.missing():
        tell(f"not tested: that needs the server here: {install_command('server')}")
        return
    try:
        report = test_file_of(path, {"policy": document, "examples_suffice": True})
    except typer.BadParameter as error:  # No jail here, or code that only the server has.
        tell(f"not tested: {error}")
        return
    # If the policy cannot be loaded, the server refuses it, and names every wrong line.
    if report["passed"] or not report["requests"]:
        return
    findings = report["findings"]
    for finding in findings[:FINDINGS_SHOWN]:
        tell(finding)
    more = f"More: moorage policy test {shlex.quote(str(path))}" if path.exists() else ""
    if force:
        tell(f"The policy is {done} all the same. {more}".rstrip())
        return
    reason = (
        f"{report['uri']} is NOT SOUND and was not {done}. Correct it, add examples of requests "
        f"that it places, or use --force. {more}"
    ).rstrip()
    if quiet:
        refused = failure(Code.BAD_POLICY, reason)
        refused["error"]["findings"] = [{"message": each} for each in findings]
        print_json(refused)
    else:
        note(reason)
    raise typer.Exit(Exit.RULE_FAILED)


@contextmanager
def own_names(path: Path) -> Iterator[None]:
    """Rename the policy's files in a server's refusal to the author's names.

    Args:
        path: The author's path of the policy.

    Raises:
        RequestRefused: The refusal that the block raised, with the author's file names.
    """
    try:
        yield
    except RequestRefused as refused:
        refused.reason = with_own_names(path, refused.reason)
        if "findings" in refused.details:
            findings = [
                each | {"file": _own(path, each["file"])} if each.get("file") else each
                for each in read_as(list[JsonObject], refused.details["findings"])
            ]
            refused.details = {**refused.details, "findings": findings}
        raise


def with_own_names(path: Path, text: str) -> str:
    """Return a sentence with the policy's files renamed to the author's names."""
    return _PLACE.sub(lambda found: _own(path, found[1]), text)
