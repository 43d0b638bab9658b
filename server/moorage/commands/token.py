"""`moored token`: named tokens of a server. The server may be running."""

import contextlib
import json
import re
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer
from msgspec.structs import asdict

from moorage.commands.errors import (
    fail_on,
    load_local_config,
    refuse_no_server,
    refuse_option,
    refuse_root,
)
from moorage.commands.noting import note
from moorage.commands.options import DataOption, FileOption, JsonFlag, read_duration
from moorage.config.settings import Config
from moorage.records.json_values import JsonObject
from moorage.records.rights import Role
from moorage.records.tokens import NAME_EXPECTED, NAME_PATTERN, expected_tenant
from moorage.storage.base import StorageError
from moorage.storage.opening import open_storage

if TYPE_CHECKING:
    from moorage.daemon.access.token_store import TokenStore

token = typer.Typer(help="Create, list and revoke tokens of callers.", no_args_is_help=True)


@token.command("create", short_help="Create a token and print it once.")
def token_create(
    name: Annotated[str, typer.Argument(help="Name for lists and logs, e.g. `ci`.")],
    role: Annotated[
        Role, typer.Option(help="Role of the token, which decides its holder's rights.")
    ],
    tenant: Annotated[str, typer.Option(help="Tenant whose leases and policies its holder uses.")],
    expires: Annotated[
        str, typer.Option(help="Lifetime, such as `12h`, `30d` or `8w`; `never` for none.")
    ] = "never",
    data: DataOption = None,
    config: FileOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Create a token and print it. Only its digest is stored. The token is valid at once."""
    if not re.match(NAME_PATTERN, name):
        refuse_option("NAME", NAME_EXPECTED)
    if (expected := expected_tenant(tenant)) is not None:
        refuse_option("--tenant", expected)
    now = time.time()
    expires_at = _end(expires, now)
    settings = load_local_config(data, config)

    with fail_on(OSError):
        settings.data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    with _open_store(settings, makes=True) as store:
        made = store.create(name, role, tenant, now, expires_at)
        row = {"role": role, "tenant": tenant, "expires_at": expires_at}
        note(settings, "token.created", {"token": name}, row)
    if as_json:
        typer.echo(json.dumps({"token": made, "name": name, **row}))
        return
    typer.echo(made)
    typer.echo(f"Token “{name}”: {_terms(role, tenant, expires_at)}. Shown once.", err=True)
    typer.echo(f"A server that uses {_place(settings)} accepts the token.", err=True)


@token.command("list", short_help="List tokens by name, without their secrets.")
def token_list(
    data: DataOption = None, config: FileOption = None, as_json: JsonFlag = False
) -> None:
    """List all named tokens, with those that expired or were revoked."""
    settings = load_local_config(data, config)

    now = time.time()
    with _open_store(settings) as store:
        known = list(store.tokens().values())
    if as_json:
        typer.echo(json.dumps([asdict(each.shown(now)) for each in known]))
        return
    if not known:
        typer.echo(f"No tokens in {_place(settings)}; `moored token create` makes one")
    for each in known:
        terms = _terms(each.role, each.tenant, each.expires_at)
        typer.echo(f"{each.name}: {each.state(now)}, {terms}")


@token.command("revoke", short_help="Refuse a token from now on.")
def token_revoke(
    name: Annotated[str, typer.Argument(help="Name of the token.")],
    data: DataOption = None,
    config: FileOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Refuse a token from now on; a running server ends its open sessions within a second."""
    settings = load_local_config(data, config)

    now = time.time()
    with _open_store(settings) as store:
        is_new = store.revoke(name, now)
        (was,) = (each for each in store.tokens().values() if each.name == name)
        if is_new:
            before: JsonObject = {
                "role": was.role,
                "tenant": was.tenant,
                "expires_at": was.expires_at,
            }
            note(settings, "token.revoked", {"token": name}, before=before)
    if as_json:
        typer.echo(json.dumps(asdict(was.shown(now))))
    else:
        typer.echo(f"Token “{name}” {'is' if is_new else 'was already'} revoked.")


@contextlib.contextmanager
def _open_store(settings: Config, *, makes: bool = False) -> "Iterator[TokenStore]":
    """Open the store of tokens; end the command with a message about its fault.

    Args:
        settings: The settings.
        makes: Whether the folder may be new.
    """
    from moorage.daemon.access.token_store import TokenStore, TokenStoreError  # noqa: PLC0415  # As in serve.

    with fail_on(TokenStoreError, StorageError, OSError):
        refuse_root(settings.data_dir)
        rows = open_storage(settings.storage, settings.data_dir).tokens()
        if not makes and not settings.data_dir.exists():  # A new folder may be without tokens.
            refuse_no_server(settings)
        with contextlib.closing(TokenStore(rows)) as store:
            yield store


def _end(expires: str, now: float) -> float | None:
    """Return when a new token expires; None if it never expires."""
    if expires == "never":
        return None
    seconds = read_duration(expires)
    if not seconds:
        refuse_option("--expires", "a number and one of s, m, h, d, w, such as `30d`; or `never`")
    return now + seconds


def _place(settings: Config) -> str:
    return "the database" if settings.storage else str(settings.data_dir)


def _terms(role: Role, tenant: str, expires_at: float | None) -> str:
    end = "does not expire"
    if expires_at is not None:
        end = f"expires {datetime.fromtimestamp(expires_at, UTC):%Y-%m-%d %H:%M} UTC"
    return f"role {role}, tenant “{tenant}”, {end}"
