"""The commands of `moored ledger`."""

import json
from pathlib import Path
from typing import Annotated

import typer

from moorage.commands.errors import fail, fail_on, load_config
from moorage.commands.options import DataOption, FileOption, JsonFlag

ledger = typer.Typer(help="Look after what a daemon keeps on the disk.", no_args_is_help=True)


@ledger.command("verify", short_help="Say what of ledger and catalog is damaged, and where.")
def ledger_verify(
    data: DataOption = None, config: FileOption = None, as_json: JsonFlag = False
) -> None:
    """Check every fact and record; exit 1 if one is damaged. The daemon may be running."""
    folder = _folder(data, config)
    from moorage.commands.ledger_care import verify  # noqa: PLC0415  # As in serve.
    from moorage.ledger.base import LedgerError  # noqa: PLC0415  # As in serve.

    with fail_on(LedgerError, OSError):
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
    """Rebuild ledger and catalog from the undamaged parts, with the daemon stopped.

    The damaged files stay in a folder beside them. Prefer a backup, where there is one.
    """
    folder = _folder(data, config)
    from moorage.commands.ledger_care import repair  # noqa: PLC0415  # As in serve.
    from moorage.ledger.base import LedgerError  # noqa: PLC0415  # As in serve.

    with fail_on(LedgerError, OSError):
        done = repair(folder, accept_loss=accept_loss)
    if not done.damage:
        typer.echo(f"{folder}: nothing is damaged")
        return
    _list("Damaged:", done.damage)
    lost = done.lost or ["nothing: all that is damaged can be made again."]
    _list("Lost:" if accept_loss else "Would be lost:", lost)
    _list("Is there:" if accept_loss else "Would stay:", done.stays or ["nothing."])
    if not accept_loss:
        typer.echo("Nothing was changed. --accept-loss goes on without it.")
        raise typer.Exit(1)
    typer.echo(f"The damaged files are in {done.copy}. Workloads of lost leases are stopped,")
    typer.echo("and clusters are registered again, when the daemon starts.")


def _folder(data: Path | None, config: Path | None) -> Path:
    """Return the data folder; refuse if the ledger is in a database."""
    settings = load_config({"data_dir": data}, config)
    if settings.storage and data is None:
        fail(
            "this server keeps its ledger in PostgreSQL, whose own tools verify and restore it; "
            "--data DIR looks at the files of a folder"
        )
    return settings.data_dir


def _list(title: str, sentences: list[str]) -> None:
    typer.echo(title)
    for each in sentences:
        typer.echo(f"  {each}")
