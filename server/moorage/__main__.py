"""`moored`: the daemon, and the trials that play a client against it."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from moorage.config import Config, ConfigError, settings_help

EXIT_USAGE = 2

app = typer.Typer(
    name="moored",
    help="Decides which cluster, node and GPUs run a workload, and holds the answer as a lease.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON document, nothing else.")]


@app.command(epilog=settings_help(), short_help="Run the daemon.")
def serve(
    host: Annotated[str | None, typer.Option(help="Address of the WebSocket.")] = None,
    port: Annotated[int | None, typer.Option(help="Port of the WebSocket; 0: a free one.")] = None,
    http_port: Annotated[int | None, typer.Option(help="Port of HTTP; 0: a free one.")] = None,
    data: Annotated[Path | None, typer.Option(help="Folder of ledger and catalog.")] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file with settings.")] = None,
    sandbox: Annotated[
        str | None, typer.Option(help="`jail`, or `unsafe` for trusted rules.")
    ] = None,
) -> None:
    """Run the daemon until SIGTERM or Ctrl-C.

    Prints one JSON line with its addresses when it accepts requests. Every other setting comes
    from the environment or the file:
    """
    flags = {
        "host": host,
        "port": port,
        "http_port": http_port,
        "data_dir": data,
        "sandbox": sandbox,
    }
    try:
        settings = Config.load(flags, os.environ, config)
    except ConfigError as error:
        print(f"moored: {error}", file=sys.stderr)
        raise typer.Exit(EXIT_USAGE) from None
    from moorage.daemon.main import serve as run  # noqa: PLC0415  # `--help` stays quick.

    raise typer.Exit(run(settings))


def main() -> None:
    """Run the command line."""
    app()


if __name__ == "__main__":
    main()
