"""The command line of `moored`, with all its commands."""

import sys
from importlib.metadata import version
from typing import Annotated

import typer

from moorage.commands.agent import agent
from moorage.commands.audit import audit
from moorage.commands.backup import backup, restore
from moorage.commands.bench import bench
from moorage.commands.demo import demo
from moorage.commands.doctor import doctor
from moorage.commands.errors import EXIT_USAGE
from moorage.commands.health import health
from moorage.commands.lead import lead
from moorage.commands.ledger import ledger
from moorage.commands.prices import prices
from moorage.commands.replay import replay
from moorage.commands.serve import serve
from moorage.commands.storage import storage
from moorage.commands.token import token
from moorage.config.described import settings_help
from moorage.daemon.observability.standard_streams import StandardStream
from moorage.extras import install_command
from moorage.launch import EXIT_INTERRUPTED, find_hidden_modules
from moorage_client import server_extra
from moorage_client.home import HomeMissing, check_completion

STDERR = 2
"""File descriptor of stderr."""

app = typer.Typer(
    name="moored",
    help="Decides which cluster, node and GPUs run a workload, and holds the answer as a lease.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},  # As `moorage` has it.
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"moored {version('moorage')}")
        raise typer.Exit


@app.callback()
def _read_options(
    context: typer.Context,
    version: Annotated[  # noqa: ARG001  # Its callback ends the program.
        bool,
        typer.Option(
            "--version", "-V", callback=_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Process the options before a command."""
    if context.invoked_subcommand == "serve":
        # Protect stderr before the flags are read: the exit code must not depend on its reader.
        context.obj = StandardStream(STDERR)


app.command(epilog=settings_help(), short_help="Run the daemon.")(serve)
app.command(short_help="Show a request and its lease on this machine, without preparation.")(demo)
app.command(short_help="Replay a trace of requests with a real daemon.")(replay)
app.command(short_help="Check whether a running server answers.")(health)
app.command(short_help="Show what works on this machine, and why other things do not.")(doctor)
app.command(short_help="Measure the server's costs, as ratios to a baseline.")(bench)
app.command(short_help="Fetch instance types and prices from AWS.")(prices)
app.command(short_help="Copy a data folder, while its server may be running.")(backup)
app.command(short_help="Make a data folder from a backup.")(restore)
app.command(short_help="Show which of several servers leads, or make another one lead.")(lead)
app.add_typer(ledger, name="ledger")
app.add_typer(storage, name="storage")
app.add_typer(token, name="token")
app.add_typer(agent, name="agent")
app.add_typer(audit, name="audit")


def run() -> int:
    """Run this process's command line and return its exit code."""
    for file, name in find_hidden_modules():
        typer.echo(
            f"moored: {file} has the name of Python's own module {name} and is ignored; rename it, "
            "or remove its folder from PYTHONPATH",
            err=True,
        )
    if server_extra.missing():
        typer.echo(
            f"moored: the server is not installed here: {install_command('server')}", err=True
        )
        return EXIT_USAGE
    try:
        check_completion(sys.argv[1:])
    except HomeMissing as missing:
        typer.echo(f"moored: {missing}", err=True)
        return EXIT_USAGE
    try:
        app(prog_name="moored")
    except SystemExit as ended:
        if ended.code == EXIT_INTERRUPTED:
            raise KeyboardInterrupt from None  # The parser turned the interrupt into an exit.
        raise
    raise AssertionError("expected the parser to end the process")
