"""The command lines of benchmark programs: `python -m benchmarks` and others."""

from collections.abc import Callable

import typer


def run_command(command: Callable[..., None]) -> None:
    """Run a command with its arguments; its help is plain text of at most 80 columns."""
    app = typer.Typer(
        add_completion=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.command()(command)
    app()
