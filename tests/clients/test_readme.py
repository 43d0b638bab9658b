"""The README names every command, option, exit code and setting; its examples run end to end."""

from pathlib import Path

import pytest

import moorage_client
from moorage_client.cli.exits import MEANINGS

TEXT = Path(moorage_client.__file__).with_name("README.md").read_text()


def test_every_exit_code_is_explained_in_the_words_of_the_help():
    for code, meaning in MEANINGS.items():
        assert f"| {int(code)} | {meaning} |" in TEXT


@pytest.mark.parametrize("group", [[], ["policy"], ["pool"]])
def test_every_command_is_named(shell, group):
    helped = shell.process(*group, "--help").stdout.partition("Commands")[2]
    rows = [line.split() for line in helped.splitlines() if line.startswith("│ ")]
    names = [row[1] for row in rows if row[1].isalpha() and row[1].islower()]
    assert len(names) >= 3
    for name in names:
        assert " ".join(["`" + " ".join([*group, name])]) in TEXT


def test_every_setting_is_named():
    sources = Path(moorage_client.__file__).parent.rglob("*.py")
    used = {
        word
        for source in sources
        for word in source.read_text().replace('"', " ").split()
        if word.startswith(("MOORAGE_", "CLUSTER_SERVICE", "GLOBAL_CLUSTER", "XDG_"))
    }
    for name in used:
        assert name.strip(").,`;:'/") in TEXT


def test_every_public_name_is_importable():
    for name in moorage_client.__all__:
        assert getattr(moorage_client, name).__name__ == name
