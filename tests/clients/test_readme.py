"""The README names every command, exit code and setting; its examples run end to end."""

from pathlib import Path

import typer

import moorage_client
from moorage_client.cli.exits import MEANINGS
from moorage_client.cli.program import app

TEXT = Path(moorage_client.__file__).with_name("README.md").read_text()


def test_every_exit_code_is_explained_in_the_words_of_the_help():
    for code, meaning in MEANINGS.items():
        assert f"| {int(code)} | {meaning} |" in TEXT


def test_the_readme_names_every_command():
    top = typer.main.get_command(app).commands
    groups = {"": top, "policy ": top["policy"].commands, "pool ": top["pool"].commands}
    for group, commands in groups.items():
        names = [name for name, command in commands.items() if not command.hidden]
        assert len(names) >= 3
        for name in names:
            assert f"`{group}{name}" in TEXT


def test_the_readme_names_every_setting():
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
