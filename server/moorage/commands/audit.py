"""`moored audit`: print and verify the audit log, in a data folder or in the database.

Both commands also work while the server runs.
"""

import contextlib
import fnmatch
import json
import re
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Annotated, Final

import typer

from moorage.commands.errors import fail_on, load_config, refuse_no_server, refuse_option
from moorage.commands.options import DataOption, FileOption, JsonFlag, read_duration
from moorage.config.settings import Config
from moorage.records.json_values import JsonObject, JsonValue
from moorage.storage.base import AuditRows, StorageError
from moorage.storage.opening import open_storage

audit = typer.Typer(help="Print the audit log, or verify that it is complete and unchanged.")

_FOLLOW_SECONDS: Final = 0.5
_HASH: Final = re.compile("[0-9a-f]{64}")


@audit.callback(invoke_without_command=True)
def audit_list(
    context: typer.Context,
    who: Annotated[str, typer.Option(help="A tenant, or the name of a token.")] = "",
    what: Annotated[str, typer.Option(help="A kind of action, such as `lease.*`.")] = "*",
    since: Annotated[str, typer.Option(help="`2h`, `3d`, or a date such as `2026-12-01`.")] = "",
    follow: Annotated[bool, typer.Option("--follow", help="Keep printing new entries.")] = False,
    data: DataOption = None,
    config: FileOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON lines, as stored.")] = False,
) -> None:
    """Print entries, the oldest first."""
    if context.invoked_subcommand is not None:
        return
    settings, begin = load_config({"data_dir": data}, config), _begin(since)
    for entry in _entries(settings, follow=follow):
        by = (entry.get("who", ""), entry.get("token", ""))
        if entry["at"] < begin or (who and who not in by):
            continue
        if fnmatch.fnmatchcase(entry["what"], what):
            typer.echo(json.dumps(entry, ensure_ascii=False) if as_json else _line(entry))


@audit.command("verify", short_help="Check that no line was changed, dropped or moved.")
def audit_verify(
    noted: Annotated[
        str,
        typer.Option(
            help="NUMBER:HASH from an earlier call: the log must still contain this entry."
        ),
    ] = "",
    data: DataOption = None,
    config: FileOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Check the chain of hashes; exit 1 if it is broken.

    Store the printed number and hash elsewhere, for the `--noted` of a later call.
    """
    settings = load_config({"data_dir": data}, config)
    from moorage.daemon.access import audit_files, audit_table  # noqa: PLC0415  # As in serve.
    from moorage.daemon.access.audit_chain import ChainEnd, ChainError  # noqa: PLC0415  # As in serve.

    number, _, digest = noted.partition(":")
    if noted and not (number.isdecimal() and _HASH.fullmatch(digest)):
        refuse_option("--noted", "NUMBER:HASH, as `moored audit verify` prints them")
    known = ChainEnd(int(number), digest) if noted else None
    with fail_on(ChainError, OSError, StorageError), _rows(settings) as rows:
        place = settings.data_dir if rows is None else rows.place.removesuffix(",")
        if rows is None:
            first, end = audit_files.verify(settings.data_dir, known)
            is_begin_known = first <= 1 or audit_files.is_begin_known(settings.data_dir)
        else:
            first, end = audit_table.verify_rows(rows, known)
            is_begin_known = first <= 1 or audit_table.is_begin_known(rows)
    if as_json:
        seen = {"first": first, "last": end.number, "hash": end.hash}
        typer.echo(json.dumps(seen | {"begin_known": is_begin_known}))
    elif not end.number:
        typer.echo(f"{place}: no audit log")
    else:
        typer.echo(f"{place}: entries {first} to {end.number} are unchanged")
        if not is_begin_known:
            typer.echo(
                f"whether entries before {first} were removed cannot be checked: an older release "
                "deleted them without a note, and the next start of the server makes the note"
            )
        typer.echo(f"store this elsewhere: {end.number}:{end.hash}")


@contextlib.contextmanager
def _rows(settings: Config) -> Iterator[AuditRows | None]:
    """Yield the log's lines from the database; None if the log is in files of the data folder."""
    rows = open_storage(settings.storage, settings.data_dir).audit()
    refuse_no_server(settings)
    try:
        yield rows
    finally:
        if rows is not None:
            rows.close()


def _begin(since: str) -> float:
    """Return the time from which on entries are printed, in seconds since the epoch."""
    if not since:
        return 0.0
    if (seconds := read_duration(since)) is not None:
        return time.time() - seconds
    try:
        date = datetime.fromisoformat(since)
    except ValueError:
        refuse_option("--since", "such as `2h` or `3d`, or a date such as `2026-12-01T08:00`")
    return date.timestamp()


def _entries(settings: Config, *, follow: bool) -> Iterator[JsonObject]:
    from moorage.daemon.access.audit_chain import ChainError  # noqa: PLC0415  # As in serve.
    from moorage.daemon.access.audit_files import read_lines  # noqa: PLC0415  # As in serve.
    from moorage.daemon.access.audit_table import read_rows  # noqa: PLC0415  # As in serve.

    last = 0
    with fail_on(ChainError, OSError, StorageError), _rows(settings) as rows:
        while True:
            for line in (
                read_lines(settings.data_dir, last) if rows is None else read_rows(rows, last)
            ):
                last = line["number"]
                yield line
            if not follow:
                return
            time.sleep(_FOLLOW_SECONDS)  # No event announces new lines.


def _line(entry: JsonObject) -> str:
    """Return an entry as one line for people."""
    at = datetime.fromtimestamp(entry["at"], UTC).isoformat(" ", "seconds")
    by = ", ".join(filter(None, (entry.get("token"), entry.get("role"), entry.get("remote"))))
    who = (entry.get("who") or "?") + (f" ({by})" if by else "")
    about = " ".join(f"{name}={_text(value)}" for name, value in entry.get("about", {}).items())
    change = "".join(
        f" {name} {_text(entry[name])}" for name in ("before", "after") if name in entry
    )
    why = f": {entry['why']}" if entry.get("why") else ""
    return f"{at} {who} {entry['what']} {about}{change}{why}"


def _text(value: JsonValue) -> str:
    """Return a value without control characters, for a terminal."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return "".join(each if each.isprintable() else "?" for each in text)
