"""`moored`: the daemon, and the commands that play a client against it."""

import contextlib
import io
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from moorage.config.settings import Config, ConfigError, settings_file, settings_help
from moorage_client import server_extra

EXIT_USAGE = 2
STDERR = 2
"""The last of the three descriptors that every program has."""

app = typer.Typer(
    name="moored",
    help="Decides which cluster, node and GPUs run a workload, and holds the answer as a lease.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON document, nothing else.")]
SandboxOption = Annotated[
    str | None,
    typer.Option(help="`jail`, or `unsafe` for policies you trust as the daemon itself."),
]


@app.command(epilog=settings_help(), short_help="Run the daemon.")
def serve(
    host: Annotated[str | None, typer.Option(help="Address of the WebSocket.")] = None,
    port: Annotated[int | None, typer.Option(help="Port of the WebSocket; 0: a free one.")] = None,
    http_port: Annotated[int | None, typer.Option(help="Port of HTTP; 0: a free one.")] = None,
    data: Annotated[Path | None, typer.Option(help="Folder of ledger and catalog.")] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file with settings.")] = None,
    sandbox: Annotated[
        str | None, typer.Option(help="`jail`, or `unsafe` for trusted policies.")
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
    settings = _config(flags, config)
    from moorage.daemon.main import serve as run  # noqa: PLC0415  # `--help` stays quick.

    file = settings_file(os.environ, config)
    raise typer.Exit(run(settings, lambda: Config.load(flags, os.environ, file), file))


@app.command(short_help="Play the main job with everything embedded.")
def demo(as_json: JsonFlag = False, sandbox: SandboxOption = None) -> None:
    """Start a daemon, register a small fleet, ask over a real socket, show lease and reason."""
    started = time.perf_counter()
    from moorage.commands import display  # noqa: PLC0415  # As in serve.
    from moorage.commands.demo import demo as play  # noqa: PLC0415  # As in serve.

    with _command_errors():
        options = ("--sandbox", sandbox) if sandbox else ()
        display.demo(play(started, options=options), as_json=as_json)


@app.command(short_help="Drive a trace through a real daemon.")
def replay(
    nodes: Annotated[Path, typer.Option(help="CSV: sn,cpu_milli,memory_mib,gpu,model")],
    pods: Annotated[
        Path, typer.Option(help="CSV: name,cpu_milli,memory_mib,num_gpu,gpu_milli[,gpu_spec]")
    ],
    policy: Annotated[str, typer.Option(help="Shipped policy that decides.")] = "expected_fill",
    arrive: Annotated[float, typer.Option(min=0.01, max=100, help="GPU demand / capacity.")] = 1.3,
    seed: Annotated[int, typer.Option(help="Of the order of nodes and requests.")] = 42,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds, from --seed on; reports means.")] = 1,
    limit: Annotated[int | None, typer.Option(min=1, help="Requests at most.")] = None,
    connections: Annotated[int, typer.Option(min=1, max=1000, help="WebSockets.")] = 1,
    sandbox: SandboxOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Drive a trace through a real daemon, socket, sandbox and ledger, and report."""
    from moorage.benchmarks.replay import Options  # noqa: PLC0415  # As in serve.
    from moorage.commands import display  # noqa: PLC0415  # As in serve.

    options = Options(
        nodes,
        pods,
        policy,
        arrive,
        seed,
        seeds,
        limit,
        connections,
        ("--sandbox", sandbox) if sandbox else (),
    )
    with _command_errors():
        display.replay(options, as_json=as_json)


@app.command(short_help="Tell what works here, and why not.")
def doctor(
    as_json: JsonFlag = False,
    config: Annotated[Path | None, typer.Option(help="TOML file with settings.")] = None,
) -> None:
    """Tell which sandbox layers, services and backends work here; exit 1 if serve would fail."""
    from moorage.commands import display  # noqa: PLC0415  # As in serve.
    from moorage.commands.doctor import examine  # noqa: PLC0415  # As in serve.

    findings = examine(_config({}, config))
    display.doctor(findings, as_json=as_json)
    raise typer.Exit(any(finding.state == "broken" for finding in findings))


@app.command(short_help="Measure, as ratios to a baseline of the same run.")
def bench(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            help="grants, startup, first_lease, candidates, workflow, fleet, slots, rules, "
            "sandbox, engines; all of these by default. placement and kills, where named."
        ),
    ] = None,
    nodes: Annotated[
        Path | None, typer.Option(help="Node file of a trace: `grants`, `rules`, `placement`.")
    ] = None,
    pods: Annotated[
        Path | None, typer.Option(help="Request file; `placement` takes all beside the nodes.")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each kind, for `placement`.")] = 10,
    rule: Annotated[
        list[str] | None,
        typer.Option(help="For `placement`, repeatable; else the six published ones."),
    ] = None,
    stream_seeds: Annotated[
        int, typer.Option(min=1, help="For `placement`: seeds of `expected_fill`'s streams.")
    ] = 1,
    kills: Annotated[int, typer.Option(min=1, help="For `kills`: of the daemon.")] = 20,
    category: Annotated[
        str, typer.Option(help="For `kills`: `process` or `container` workloads.")
    ] = "process",
    image: Annotated[str | None, typer.Option(help="For `kills`: of its containers.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Measure what it costs. Every figure is a ratio to a baseline taken in the same run."""
    from moorage.commands import display  # noqa: PLC0415  # As in serve.

    with _command_errors():
        table = {"seeds": seeds, "rules": rule or [], "stream_seeds": stream_seeds}
        killing = {"times": kills, "category": category, "image": image}
        display.bench(names or [], nodes, pods, table, killing, as_json=as_json)


@app.command(short_help="Ask AWS for instance types and prices.")
def prices(
    region: Annotated[str, typer.Option(help="Of AWS.")] = "us-east-1",
    data: Annotated[Path | None, typer.Option(help="Folder of ledger and catalog.")] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file with settings.")] = None,
) -> None:
    """Ask AWS for the instance types of a region and what they cost, for the backend aws.

    A daemon that runs uses them from then on. Needs the extra aws, and credentials that may do
    ec2:DescribeInstanceTypes and pricing:GetProducts.
    """
    folder = _config({"data_dir": data}, config).data_dir / "aws"
    try:
        from moorage.backends.aws.calls import AwsCalls  # noqa: PLC0415  # It needs an extra.
        from moorage.backends.aws.catalogue import refresh  # noqa: PLC0415  # As above.
    except ModuleNotFoundError as error:
        typer.echo(f"moored: prices needs {error.name}: pip install 'moorage[aws]'", err=True)
        raise typer.Exit(1) from None
    from moorage.resources import BackendError  # noqa: PLC0415  # As in serve.

    try:
        made = refresh(AwsCalls(), folder, region)
    except (BackendError, OSError) as error:
        typer.echo(f"moored: {error}", err=True)
        raise typer.Exit(1) from None
    priced = sum(each.usd_per_hour is not None for each in made.types)
    typer.echo(
        f"{len(made.types)} instance types of {region}, {priced} with prices of {made.as_of}"
    )


ledger = typer.Typer(help="Look after what a daemon keeps on the disk.", no_args_is_help=True)
app.add_typer(ledger, name="ledger")

DataOption = Annotated[Path | None, typer.Option(help="Folder of ledger and catalog.")]
FileOption = Annotated[Path | None, typer.Option(help="TOML file with settings.")]


@ledger.command("verify", short_help="Say what of ledger and catalog is damaged, and where.")
def ledger_verify(
    data: DataOption = None, config: FileOption = None, as_json: JsonFlag = False
) -> None:
    """Look at every fact and record; exit 1 if one is damaged. The daemon may be running."""
    folder = _config({"data_dir": data}, config).data_dir
    from moorage.commands.ledger_care import verify  # noqa: PLC0415  # As in serve.

    with _ledger_errors():
        found = verify(folder)
    report = found.report()
    if as_json:
        typer.echo(json.dumps(report))
    else:
        for finding in found.findings:
            typer.echo(finding)
        if not found.findings:
            held = f"{report['facts']} facts and {report['records']} records"
            typer.echo(f"{folder}: {held}, all as they were written")
    raise typer.Exit(bool(found.findings))


@ledger.command("repair", short_help="Go on without what is damaged, once the loss is accepted.")
def ledger_repair(
    data: DataOption = None,
    config: FileOption = None,
    accept_loss: Annotated[
        bool, typer.Option("--accept-loss", help="Do it; else only say what would be lost.")
    ] = False,
) -> None:
    """Rebuild ledger and catalog from what is not damaged, with the daemon stopped.

    The damaged files are kept in a folder beside them. Prefer a backup, where there is one.
    """
    folder = _config({"data_dir": data}, config).data_dir
    from moorage.commands.ledger_care import repair  # noqa: PLC0415  # As in serve.

    with _ledger_errors():
        lost, copy = repair(folder, accept_loss=accept_loss)
    if not lost:
        typer.echo(f"{folder}: nothing is damaged")
        return
    typer.echo("Lost:" if accept_loss else "Would be lost:")
    for each in lost:
        typer.echo(f"  {each}")
    if not accept_loss:
        typer.echo("Nothing was changed. --accept-loss goes on without it.")
        raise typer.Exit(1)
    typer.echo(f"The damaged files are kept in {copy}. Workloads of lost leases are stopped, and")
    typer.echo("clusters are registered anew, when the daemon starts.")


@contextlib.contextmanager
def _ledger_errors() -> Iterator[None]:
    from moorage.ledger.base import LedgerError  # noqa: PLC0415  # As in serve.

    try:
        yield
    except (LedgerError, OSError) as error:
        typer.echo(f"moored: {error}", err=True)
        raise typer.Exit(1) from None


def _config(flags: dict[str, Any], file: Path | None) -> Config:
    try:
        return Config.load(flags, os.environ, file)
    except ConfigError as error:
        typer.echo(f"moored: {error}", err=True)
        raise typer.Exit(EXIT_USAGE) from None


@contextlib.contextmanager
def _command_errors() -> Iterator[None]:
    """Turn what keeps a command from running into one line and an exit code."""
    from httpx import HTTPError  # noqa: PLC0415  # As in serve.
    from websockets.exceptions import WebSocketException  # noqa: PLC0415  # As in serve.

    from moorage.lab.errors import CommandError  # noqa: PLC0415  # As in serve.
    from moorage.lab.trace import TraceError  # noqa: PLC0415  # As in serve.

    # Whoever stops a command stops its daemon too, and lets it clean up.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    except (CommandError, TraceError, OSError, HTTPError, WebSocketException) as error:
        typer.echo(f"moored: {error}", err=True)
        raise typer.Exit(1) from None


def _open_standard_streams() -> None:
    """Put /dev/null where stdin, stdout or stderr is closed.

    Their numbers would go to the next files that are opened; libuv ends the process over that.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) <= STDERR:
        os.set_inheritable(number, True)  # noqa: FBT003  # The os module's own signature.
    os.close(number)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(STDERR, "w", closefd=False)


def main() -> None:
    """Run the command line."""
    _open_standard_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # Whatever the terminal can show.
    if server_extra.missing():
        typer.echo(f"moored: the server is not installed here: {server_extra.INSTALL}", err=True)
        raise SystemExit(EXIT_USAGE)
    app()


if __name__ == "__main__":
    main()
