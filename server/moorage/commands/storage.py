"""`moored storage`: commands about the database that a server may use instead of files."""

from typing import Annotated

import typer

from moorage.commands.errors import fail, fail_on, load_config
from moorage.commands.options import FileOption
from moorage.storage.base import StorageError
from moorage.storage.opening import need_postgres

storage = typer.Typer(
    help="Prepare the database of the setting `storage`, or move a server there and back.",
    no_args_is_help=True,
)


@storage.command("prepare", short_help="Make the tables in PostgreSQL, or bring them up to date.")
def storage_prepare(
    role: Annotated[
        str | None, typer.Option("--for", help="Role that serves, which may only use the tables.")
    ] = None,
    config: FileOption = None,
) -> None:
    """Create the tables in the database in `storage`. Stop all servers on it first.

    The role in `storage` will own them, and needs the right to make a schema. A server that is
    let in as that role makes them itself.
    """
    settings = load_config({}, config)
    if not settings.storage:
        fail("set `storage` (MOORAGE_STORAGE) to the database")
    with fail_on(StorageError):
        need_postgres()
        from moorage.storage.postgres.storage import prepare  # noqa: PLC0415  # An extra.

        for sentence in prepare(settings.storage, role):
            typer.echo(sentence)


@storage.command("copy", short_help="Copy a server from its folder to PostgreSQL, or back.")
def storage_copy(
    source: Annotated[str, typer.Argument(metavar="FROM", help="Data folder, or postgresql://…")],
    target: Annotated[str, typer.Argument(metavar="TO", help="The other one: empty, or new.")],
) -> None:
    """Copy all data between a data folder and a PostgreSQL database. Stop all servers first.

    What was copied is read again and compared. Where that was interrupted, run it again. Leave
    the password to PGPASSWORD or a password file.
    """
    from moorage.commands.storage_copy import copy  # noqa: PLC0415  # As in serve.

    with fail_on(StorageError, OSError):
        done = copy(source, target)
    typer.echo(
        f"{done.facts} facts, {done.records} records, {done.tokens} tokens and {done.agents} "
        f"agents {'were copied, and are' if done.is_new else 'were there, and are'} the same."
    )
    typer.echo("Start a server on one of the two only: both have the same leases.")
