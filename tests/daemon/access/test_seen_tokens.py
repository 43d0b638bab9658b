"""The audit log has changes of the settings' tokens that were made while no server ran."""

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from moorage.daemon.access.audit_files import read_lines
from moorage.daemon.access.audit_log import AuditLog
from moorage.daemon.access.seen_tokens import FILE, SeenTokens

TOKENS = {"t-ann": "ann", "t-bob": "bob"}


async def start(folder: Path, tokens: Mapping[str, str], *then: Mapping[str, str]) -> None:
    """Play a server's run: its start with some tokens, and changes while it runs."""
    with contextlib.closing(AuditLog(folder, 1, 16)) as audit:
        seen = SeenTokens(folder, audit)
        await seen.compare(tokens)
        for each in then:
            await seen.remember(each)


def entries(folder: Path) -> list[object]:
    return [entry.get("about") for entry in read_lines(folder)]


async def test_a_start_notes_the_tenants_whose_tokens_changed_since_the_last_run(
    tmp_path: Path,
) -> None:
    await start(tmp_path, TOKENS)
    await start(tmp_path, TOKENS)
    assert entries(tmp_path) == [], "a folder's first start has nothing to compare with"
    await start(tmp_path, {"t-ann": "ann", "new": "bob", "other": "ann"})
    await start(tmp_path, {})
    assert entries(tmp_path) == [
        {"added_for": ["ann", "bob"], "removed_for": ["bob"]},
        {"added_for": [], "removed_for": ["ann", "ann", "bob"]},
    ]


async def test_a_token_that_passes_to_another_tenant_is_a_change(tmp_path: Path) -> None:
    await start(tmp_path, TOKENS)
    await start(tmp_path, {"t-ann": "bob", "t-bob": "bob"})
    assert entries(tmp_path) == [{"added_for": ["bob"], "removed_for": ["ann"]}]


async def test_changes_while_the_server_runs_are_not_noted_again(tmp_path: Path) -> None:
    await start(tmp_path, TOKENS, {"t-ann": "ann"})
    await start(tmp_path, {"t-ann": "ann"})
    assert entries(tmp_path) == []


async def test_the_file_has_no_digest_by_which_a_token_can_be_guessed(tmp_path: Path) -> None:
    await start(tmp_path, TOKENS)
    file = tmp_path / FILE
    assert file.stat().st_mode & 0o777 == 0o600
    stored = json.loads(file.read_text())
    assert [(tenant, len(tag)) for tenant, tag in stored["tags"]] == [("ann", 4), ("bob", 4)]
    await start(tmp_path, {"t-ann": "ann"})
    assert json.loads(file.read_text())["key"] == stored["key"]


@pytest.mark.parametrize("text", ['{"tags":', f'{{"key":"{"A" * 200}","tags":[]}}'])
async def test_a_damaged_file_is_replaced(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_text(text)
    with capture_logs() as lines:
        await start(tmp_path, TOKENS)
    assert [each["event"] for each in lines] == ["tokens_not_remembered"]
    (lost,) = read_lines(tmp_path)
    assert lost["what"] == "tokens.seen_lost", "the changes since the last run are unknown"
    await start(tmp_path, {"t-ann": "ann"})
    assert entries(tmp_path)[1:] == [{"added_for": [], "removed_for": ["bob"]}]
