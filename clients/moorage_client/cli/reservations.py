"""The commands about advance reservations: `moorage reservation list`, `add` and `cancel`."""

import re
import time
from datetime import UTC, datetime
from functools import partial
from typing import Annotated, Final

import typer

from moorage.records.json_values import JsonMapping, JsonObject
from moorage_client.answers import read_object
from moorage_client.cli import completing
from moorage_client.cli.asking import requirement
from moorage_client.cli.output import local_time, print_json, say, table
from moorage_client.cli.session import CommandSession
from moorage_client.listing import pages

_UNITS: Final = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_LATER: Final = re.compile(r"\+(\d+(?:\.\d+)?)([smhd])")
_MOMENT: Final = "2027-01-31T08:00 (local time), 2027-01-31T08:00Z, or from now on +90m, +2h, +1d"


def moment(text: str, option: str, now: float) -> float:
    """Return a time in seconds since the epoch.

    Args:
        text: An ISO 8601 time, by default in this machine's time zone; or `+`, a number and `s`,
            `m`, `h` or `d`.
        option: The option whose value the text is.
        now: The time to which `+` adds.

    Raises:
        typer.BadParameter: The text is not a time, or is a local time that the time zone skips.
    """
    if later := _LATER.fullmatch(text):
        return now + float(later[1]) * _UNITS[later[2]]
    try:
        given = datetime.fromisoformat(text)
        at = given.timestamp()
        exists = given.tzinfo is not None or datetime.fromtimestamp(at) == given  # noqa: DTZ006  # Local, as given.
    except (ValueError, OverflowError, OSError) as error:
        raise typer.BadParameter(f"{option}: expected {_MOMENT}; got {text}") from error
    if not exists:
        reason = "does not exist in this machine's time zone, where clocks are put forward then"
        utc = datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%MZ")
        way = f"an hour that does, or one with its offset, e.g. {utc}"
        raise typer.BadParameter(f"{option}: {text} {reason}; expected {way}")
    return at


def list_reservations(session: CommandSession) -> None:
    """List reservations with their tenants and times."""
    names = ("reservations", "reservations")
    found = session.run(lambda client: pages(client.url, client.call, names, read_object, {}).all())
    if session.json:
        print_json(found)
        return
    table(
        ("reservation", "tenant", "from", "to", "nodes"),
        (
            (
                row["reservation"],
                row["tenant"],
                local_time(row["starts_at"]),
                local_time(row["ends_at"]),
                _nodes(row),
            )
            for row in found
        ),
        empty="No node is reserved. Reserve nodes: moorage reservation add",
    )


def add(  # Each is an option of the command.
    session: CommandSession,
    starts: Annotated[str, typer.Option("--from", metavar="TIME", help=_MOMENT)],
    ends: Annotated[str, typer.Option("--to", metavar="TIME", help="As --from")],
    tenant: Annotated[str, typer.Option(help="Tenant of the reservation (else your own)")] = "",
    gpus: Annotated[int, typer.Option(min=0, help="GPUs of each node; 0: whole nodes")] = 1,
    model: Annotated[list[str] | None, typer.Option(help="Accepted GPU model")] = None,
    nodes: Annotated[int, typer.Option(min=1, help="Number of nodes")] = 1,
    label: Annotated[
        list[str] | None,
        typer.Option("--where", metavar="LABEL", help="Label of the nodes, as for `moorage ask`"),
    ] = None,
    cluster: Annotated[
        list[str] | None, typer.Option(help="Candidate cluster", autocompletion=completing.clusters)
    ] = None,
    lapse: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            min=0,
            help="End an unused reservation these seconds after its start; 0: never",
        ),
    ] = 0.0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only show the nodes; reserve none")
    ] = False,
) -> None:
    """Reserve GPUs, with CPU and memory of their nodes, for a tenant for some time."""
    now = time.time()
    resources: JsonObject = {"gpus": gpus, "nodes": nodes, "models": model or []}
    resources["where"] = [requirement(each) for each in label or ()]
    row = session.run(
        lambda client: client.call(
            {
                "op": "reserve",
                "resources": resources,
                "starts_at": moment(starts, "--from", now),
                "ends_at": moment(ends, "--to", now),
                "tenant": tenant,
                "clusters": cluster or None,
                "lapse_seconds": lapse,
                **({"dry_run": True} if dry_run else {}),
            },
            idempotent=dry_run,  # A repeated message would reserve a second time.
        )
    )
    session.show(row, partial(_show, dry_run=dry_run))


def cancel(
    session: CommandSession,
    reservation: Annotated[str, typer.Argument(help="Id of the reservation")],
) -> None:
    """End a reservation now, before its planned end."""
    row = session.run(lambda client: client.call({"op": "unreserve", "reservation": reservation}))
    session.show(row, _show)


def _show(row: JsonMapping, *, dry_run: bool = False) -> None:
    span = f"{local_time(row['starts_at'])} to {local_time(row['ends_at'])}"
    name = "not reserved" if dry_run else row["reservation"]
    say(f"{name}  {row['tenant']}: {_nodes(row)}, {span}")


def _nodes(row: JsonMapping) -> str:
    return ", ".join(map(_node, row["nodes"]))


def _node(row: JsonMapping) -> str:
    devices = "" if row["whole"] else f"[{','.join(row['gpus'])}]"
    return f"{row['cluster_id']}/{row['node_id']}{devices}"
