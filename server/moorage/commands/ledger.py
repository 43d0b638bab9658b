"""The commands of `moored ledger`."""

import json
from pathlib import Path
from typing import Annotated

import typer

from moorage.commands.errors import fail, fail_on, load_config, refuse_root
from moorage.commands.options import DataOption, FileOption, JsonFlag
from moorage.storage.base import StorageError

ledger = typer.Typer(help="Check and repair the files in a data folder.", no_args_is_help=True)


@ledger.command("verify", short_help="Find damage in ledger and catalog.")
def ledger_verify(
    data: DataOption = None, config: FileOption = None, as_json: JsonFlag = False
) -> None:
    """Check every fact and record; exit 1 if any is damaged. The daemon may be running."""
    folder = _folder(data, config)
    from moorage.commands.ledger_care import verify  # noqa: PLC0415  # As in serve.
    from moorage.ledger.base import LedgerError  # noqa: PLC0415  # As in serve.
    from moorage.storage.sqlite.backup import refuse_unfinished  # noqa: PLC0415  # As in serve.

    with fail_on(LedgerError, StorageError, OSError):
        refuse_unfinished(folder)
        found = verify(folder)
    report = found.report()
    if as_json:
        typer.echo(json.dumps(report))
    else:
        for finding in found.findings:
            typer.echo(finding)
        if not found.findings:
            held = f"{report['facts']} facts and {report['records']} records"
            typer.echo(f"{folder}: {held}, all undamaged")
    raise typer.Exit(bool(found.findings))


@ledger.command("repair", short_help="Remove the damaged parts, once the loss is accepted.")
def ledger_repair(
    data: DataOption = None,
    config: FileOption = None,
    accept_loss: Annotated[
        bool,
        typer.Option(
            "--accept-loss", help="Repair and accept the loss; otherwise only report the loss."
        ),
    ] = False,
) -> None:
    """Rebuild ledger and catalog from the undamaged parts, with the daemon stopped.

    The damaged files stay in a folder beside them. If there is a backup, restore it instead.
    """
    folder = _folder(data, config)
    refuse_root(folder)
    from moorage.commands.ledger_care import repair  # noqa: PLC0415  # As in serve.
    from moorage.ledger.base import LedgerError  # noqa: PLC0415  # As in serve.

    with fail_on(LedgerError, OSError):
        done = repair(folder, accept_loss=accept_loss)
    if not done.damage:
        typer.echo(f"{folder}: nothing is damaged")
        return
    _list("Damaged:", done.damage)
    lost = done.lost or ["Nothing: the damaged parts can be rebuilt."]
    _list("Lost:" if accept_loss else "A repair would lose:", lost)
    _list("Is there:" if accept_loss else "Would stay:", done.stays or ["nothing."])
    if not accept_loss:
        typer.echo("Nothing was changed. --accept-loss repairs, and accepts this loss.")
        raise typer.Exit(1)
    typer.echo(f"The damaged files are in {done.copy}. Workloads of lost leases are stopped,")
    typer.echo("and clusters are registered again, when the daemon starts.")


def _folder(data: Path | None, config: Path | None) -> Path:
    """Return the data folder; end the command if the ledger is in a database."""
    settings = load_config({"data_dir": data}, config)
    if settings.storage and data is None:
        fail(
            "this server keeps its ledger in PostgreSQL, whose tools verify and restore it; "
            "--data DIR checks the files of a folder"
        )
    return settings.data_dir


def _list(title: str, sentences: list[str]) -> None:
    typer.echo(title)
    for each in sentences:
        typer.echo(f"  {each}")
