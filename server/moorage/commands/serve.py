"""`moored serve`."""

import gc
import os
from functools import partial
from typing import Annotated

import typer

from moorage.commands.errors import load_config, refuse_root_beside_server
from moorage.commands.options import DataOption, FileOption
from moorage.config.settings import Config, service_links, settings_file
from moorage.launch import import_structlog


def serve(
    context: typer.Context,
    host: Annotated[str | None, typer.Option(help="Address of the WebSocket.")] = None,
    port: Annotated[int | None, typer.Option(help="Port of the WebSocket; 0: a free one.")] = None,
    http_port: Annotated[int | None, typer.Option(help="Port of HTTP; 0: a free one.")] = None,
    data: DataOption = None,
    config: FileOption = None,
    sandbox: Annotated[
        str | None, typer.Option(help="`jail`; or `unsafe`, if you trust all policies.")
    ] = None,
    insecure_plaintext: Annotated[
        bool,
        typer.Option(
            "--insecure-plaintext", help="Allow other addresses than loopback without TLS."
        ),
    ] = False,
    here: Annotated[
        bool,
        typer.Option("--here", help="Register this machine, and publish the shipped policies."),
    ] = False,
) -> None:
    """Run the daemon until SIGTERM or Ctrl-C.

    Prints one JSON line with its addresses once it accepts requests. Set all other settings in the
    environment or in the file:
    """
    flags = {
        "host": host,
        "port": port,
        "http_port": http_port,
        "data_dir": data,
        "sandbox": sandbox,
        "insecure_plaintext": insecure_plaintext or None,
    }
    settings = load_config(flags, config)
    refuse_root_beside_server(settings.data_dir)
    gc.disable()  # Imports make no garbage; collections would cost a tenth of the start.
    import_structlog()
    from moorage.daemon.main import serve as run  # noqa: PLC0415  # `--help` stays quick.

    filling = None
    if here:
        from moorage.commands.here import stock  # noqa: PLC0415  # As above.

        filling = partial(stock, settings)
    gc.enable()

    file = settings_file(os.environ, config)
    read = partial(Config.load, flags, os.environ, file)
    links = service_links(os.environ)
    raise typer.Exit(run(settings, context.obj, read, file, filling, links))
