"""`moored storage`: commands about the database that a server may use instead of files."""

from typing import Annotated

import typer

from moorage.commands.errors import fail, fail_on, load_config
from moorage.commands.options import FileOption
from moorage.storage.base import StorageError
from moorage.storage.opening import need_postgres

storage = typer.Typer(
    help="Prepare the database of the setting `storage`, or copy a server's data to it or back.",
    no_args_is_help=True,
)


@storage.command("prepare", short_help="Create or update the tables in PostgreSQL.")
def storage_prepare(
    role: Annotated[
        str | None,
        typer.Option("--for", help="PostgreSQL role of the server, which may only use the tables."),
    ] = None,
    config: FileOption = None,
) -> None:
    """Create the tables in the database of the setting `storage`. Stop all servers on it first.

    The role in `storage` will own the tables, and needs the right to create a schema. A server that
    connects as this role creates them itself.
    """
    settings = load_config({}, config)
    if not settings.storage:
        fail("set `storage` (MOORAGE_STORAGE) to the database")
    with fail_on(StorageError):
        need_postgres()
        from moorage.storage.postgres.storage import prepare  # noqa: PLC0415  # An extra.

        for sentence in prepare(settings.storage, role):
            typer.echo(sentence)


@storage.command("copy", short_help="Copy a server's data from its folder to PostgreSQL, or back.")
def storage_copy(
    source: Annotated[
        str, typer.Argument(metavar="FROM", help="Source: a data folder, or postgresql://…")
    ],
    target: Annotated[
        str, typer.Argument(metavar="TO", help="Target of the other kind: empty or new.")
    ],
    without_audit: Annotated[
        bool, typer.Option("--without-audit", help="Leave out the audit log.")
    ] = False,
) -> None:
    """Copy all data between a data folder and a PostgreSQL database. Stop all servers first.

    The copy is read again and compared. If the command was interrupted, run it again. Give the
    password in PGPASSWORD or in a password file.
    """
    from moorage.commands.storage_copy import copy  # noqa: PLC0415  # As in serve.

    with fail_on(StorageError, OSError):
        done = copy(source, target, audit=not without_audit)
    typer.echo(
        f"{done.facts} facts, {done.records} records, {done.tokens} tokens and {done.agents} "
        f"agents {'were copied, and are' if done.is_new else 'were there, and are'} the same."
    )
    typer.echo("Start a server on only one of the two: both have the same leases.")
