"""`moored backup` and `moored restore`."""

import shlex
import time
from pathlib import Path
from typing import Annotated, Final, NoReturn

import typer

from moorage.commands.errors import fail, fail_on, load_config
from moorage.commands.options import DataOption, FileOption
from moorage.storage.base import FENCING_SKIP, StorageError
from moorage.storage.opening import need_postgres

_SKIP_FENCING: Final = "UPDATE moorage.meta SET value = value + {} WHERE name = 'fencing'"


def backup(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="New folder, or an empty one.")],
    data: DataOption = None,
    config: FileOption = None,
) -> None:
    """Copy ledger, catalog, tokens, agents and secret of a server, and check the copy.

    The server may be running. The copy is a data folder. The copy contains secrets, so only its
    owner can read the copy.
    """
    settings = load_config({"data_dir": data}, config)
    from moorage.commands.folder_copies import back_up  # noqa: PLC0415  # As in serve.
    from moorage.ledger.base import LedgerError  # noqa: PLC0415  # As in serve.

    with fail_on(LedgerError, StorageError, OSError):
        if settings.storage:
            _say_pg_dump(settings.storage)
        made = back_up(settings.data_dir, folder)
    typer.echo(f"{folder}: {made.facts} facts and {made.records} records, all undamaged")


def restore(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="A folder that `moored backup` made.")
    ],
    data: DataOption = None,
    config: FileOption = None,
) -> None:
    """Make a new data folder from a backup, after a check of the whole backup.

    Its fencing numbers continue far above all numbers that the server may have used since the
    backup.
    """
    settings = load_config({"data_dir": data}, config)
    if settings.storage and data is None:
        fail(
            "this server keeps everything in PostgreSQL, so restore it with pg_restore; then, "
            "before a server starts, run: " + _SKIP_FENCING.format(FENCING_SKIP)
        )
    from moorage.commands.folder_copies import restore_folder  # noqa: PLC0415  # As in serve.
    from moorage.ledger.base import LedgerError  # noqa: PLC0415  # As in serve.

    with fail_on(LedgerError, StorageError, OSError):
        made = restore_folder(folder, settings.data_dir)
    moment = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(made.newest_at))
    known = f"{moment}, the last fact of the backup" if made.facts else "the backup, without facts"
    typer.echo(f"{settings.data_dir}: {made.facts} facts and {made.records} records")
    typer.echo(f"Fencing numbers continue above {made.fencing}.")
    typer.echo(
        f"Leases that were granted after {known}, are unknown here, and their GPUs may be "
        "granted again: end their workloads before you start the server. "
        "Leases that ended after this are held again until they expire. Tokens that were revoked "
        "after this are valid again."
    )


def _say_pg_dump(address: str) -> NoReturn:
    need_postgres()
    from moorage.storage.postgres.connection import without_password  # noqa: PLC0415  # An extra.

    way = f"--dbname={shlex.quote(without_password(address))}"
    fail(
        "this server keeps everything in PostgreSQL, so copy it with its own tool, while the "
        f"server runs: pg_dump --format=custom --schema=moorage --file=moorage.dump {way}"
    )
