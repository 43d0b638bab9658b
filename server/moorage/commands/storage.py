"""`moored storage`: the database that a server may have in place of files."""

from typing import Annotated

import typer

from moorage.commands.errors import load_config
from moorage.commands.options import FileOption

storage = typer.Typer(help="Prepare the database of the setting `storage`.", no_args_is_help=True)


@storage.command("prepare", short_help="Make the tables in PostgreSQL, or bring them up to date.")
def storage_prepare(
    role: Annotated[
        str | None, typer.Option("--for", help="Role that serves, which may only use the tables.")
    ] = None,
    config: FileOption = None,
) -> None:
    """Make the tables in the database that `storage` names, with no server running on it.

    The role in `storage` will own them, and needs the right to make a schema. A server that is
    let in as that role makes them itself.
    """
    settings = load_config({}, config)
    if not settings.storage:
        typer.echo("moored: set `storage` (MOORAGE_STORAGE) to the database", err=True)
        raise typer.Exit(1)
    from moorage.storage.base import StorageError  # noqa: PLC0415  # As in serve.
    from moorage.storage.opening import need_postgres  # noqa: PLC0415  # As in serve.

    try:
        need_postgres()
        from moorage.storage.postgres.storage import prepare  # noqa: PLC0415  # An extra.

        for sentence in prepare(settings.storage, role):
            typer.echo(sentence)
    except StorageError as error:
        typer.echo(f"moored: {error}", err=True)
        raise typer.Exit(1) from None
