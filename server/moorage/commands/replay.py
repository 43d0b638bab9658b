"""`moored replay`."""

from pathlib import Path
from typing import Annotated

import typer

from moorage.commands.errors import command_errors
from moorage.commands.options import JsonFlag, SandboxOption


def replay(
    nodes: Annotated[Path, typer.Option(help="CSV: sn,cpu_milli,memory_mib,gpu,model")],
    pods: Annotated[
        Path, typer.Option(help="CSV: name,cpu_milli,memory_mib,num_gpu,gpu_milli[,gpu_spec]")
    ],
    policy: Annotated[
        str, typer.Option(help="Shipped policy that places the requests.")
    ] = "expected_fill",
    arrive: Annotated[
        float, typer.Option(min=0.01, max=100, help="GPU demand, as a multiple of the capacity.")
    ] = 1.3,
    seed: Annotated[int, typer.Option(help="Seed of the order of nodes and requests.")] = 42,
    seeds: Annotated[
        int, typer.Option(min=1, help="Number of seeds, from --seed on; the report has means.")
    ] = 1,
    limit: Annotated[int | None, typer.Option(min=1, help="Most requests to replay.")] = None,
    connections: Annotated[int, typer.Option(min=1, max=1000, help="WebSockets.")] = 1,
    sandbox: SandboxOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Replay a trace with a real daemon, its socket, sandbox and ledger, and print a report."""
    from moorage.bench.replay import Options  # noqa: PLC0415  # As in serve.
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
    with command_errors():
        display.replay(options, as_json=as_json)
