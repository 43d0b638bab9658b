"""`moored lead`."""

import json
from datetime import UTC, datetime
from typing import Annotated

import typer

from moorage.commands.errors import fail, fail_on, load_config
from moorage.commands.options import FileOption, JsonFlag
from moorage.records.json_values import JsonObject
from moorage.storage.base import Leader, Seat, StorageError
from moorage.storage.opening import need_postgres


def lead(
    resign: Annotated[
        bool, typer.Option("--resign", help="Make the leading server hand over to a standby.")
    ] = False,
    as_json: JsonFlag = False,
    config: FileOption = None,
) -> None:
    """Show which of several servers on one database leads, and which stand by.

    The setting `storage` must name the database. A server that resigns ends with exit code 75, and
    stands by once its supervisor starts it again.
    """
    settings = load_config({}, config)
    if not settings.storage:
        fail("set `storage` (MOORAGE_STORAGE) to the database; a data folder has only one server")
    with fail_on(StorageError):
        need_postgres()
        from moorage.storage.postgres.leadership import ask_to_resign, look_around  # noqa: PLC0415  # An extra.

        leader, standbys = look_around(settings.storage)
        if resign:
            if leader is None:
                fail("no server leads on this database")
            if not standbys:
                fail("no server stands by: after --resign none would lead")
            ask_to_resign(settings.storage)
    if as_json:
        typer.echo(json.dumps(_describe(leader, standbys)))
    else:
        typer.echo("\n".join(_lines(leader, standbys, resign=resign)))


def _describe(leader: Leader | None, standbys: list[Seat]) -> JsonObject:
    shown = None
    if leader is not None:
        shown = {**leader.seat._asdict(), "epoch": leader.epoch, "since": leader.since}
    return {"leader": shown, "standbys": [each._asdict() for each in standbys]}


def _lines(leader: Leader | None, standbys: list[Seat], *, resign: bool) -> list[str]:
    lines = ["no server leads"]
    if leader is not None:
        since = datetime.fromtimestamp(leader.since, UTC).isoformat(" ", "seconds")
        verb = (
            "was leading, and resigns" if resign else f"leads since {since}, epoch {leader.epoch}"
        )
        lines = [f"{leader.seat.ws} ({leader.seat.name}) {verb}"]
    return lines + [f"{each.ws} ({each.name}) stands by" for each in standbys]
