"""How the programs of benchmarks read their command lines: `python -m benchmarks` and others."""

from collections.abc import Callable

import typer


def run_command(command: Callable[..., None]) -> None:
    """Run a command by its arguments; its help is plain text, which 80 columns hold."""
    app = typer.Typer(
        add_completion=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.command()(command)
    app()
