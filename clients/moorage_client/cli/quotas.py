"""The commands about quotas: `moorage quota list`, `set` and `remove`."""

from difflib import get_close_matches
from math import isfinite
from typing import TYPE_CHECKING, Annotated, Final

import typer

from moorage.model import GPU_MILLI, RESOURCES
from moorage.records.fields import field_title
from moorage.records.json_values import JsonMapping, JsonObject
from moorage_client.answers import read_object
from moorage_client.cli.output import note, print_json, say, table
from moorage_client.cli.session import CommandSession
from moorage_client.listing import pages

if TYPE_CHECKING:
    from moorage_client.client import Client

WHO: Final = typer.Argument(
    metavar="TENANT[/PROJECT]",
    help="A tenant, one of its projects, or * for each tenant without a quota",
    show_default=False,
)


def list_quotas(session: CommandSession) -> None:
    """Show all quotas, and the held resources of each."""
    found = session.run(_all)
    if session.json:
        print_json(found)
        return
    table(
        ("who", "weight>", "resource", "used>", "quota>", "borrowed>", "room>"),
        (
            (
                _who(row),
                f"{row['weight']:g}",
                _resource(name),
                *(
                    _amount_text(name, use[figure])
                    for figure in ("used", "quota", "borrowed", "room")
                ),
            )
            for row in found
            for name, use in _limits(row).items()
        ),
        empty="No quotas: every tenant may hold the whole fleet. Set one: moorage quota set TENANT",
    )


def set_quota(  # Each is an option of the command.
    session: CommandSession,
    who: Annotated[str, WHO],
    weight: Annotated[
        float, typer.Option(help="A tenant with twice the weight gets twice as much")
    ] = 1.0,
    gpus: Annotated[float | None, typer.Option(help="The tenant's GPUs (else no limit)")] = None,
    cpu_milli: Annotated[int | None, typer.Option(help="Thousandths of a core")] = None,
    memory_mib: Annotated[int | None, typer.Option(help="Memory")] = None,
    borrow_gpus: Annotated[
        float | None, typer.Option(help="Unused GPUs of others that the tenant may hold")
    ] = None,
    lend_gpus: Annotated[
        float | None, typer.Option(help="The tenant's unused GPUs that others may hold (else all)")
    ] = None,
    notice: Annotated[
        float,
        typer.Option(
            metavar="SECONDS", help="Seconds that borrowed leases stay once the tenant needs quota"
        ),
    ] = 0.0,
) -> None:
    """Set the quota of a tenant, or of one of its projects; omitted resources have no limit."""
    for option, value in (("--weight", weight), ("--notice", notice)):
        finite(option, value)
    own = {"gpu_milli": _milli("--gpus", gpus), "cpu_milli": cpu_milli, "memory_mib": memory_mib}
    borrows, lends = _milli("--borrow-gpus", borrow_gpus), _milli("--lend-gpus", lend_gpus)
    change = {
        "op": "set_quota",
        **_parts(who),
        "weight": weight,
        "nominal": {name: amount for name, amount in own.items() if amount is not None},
        "borrow": {} if borrows is None else {"gpu_milli": borrows},
        "lend": {} if lends is None else {"gpu_milli": lends},
        "notice_seconds": notice,
    }
    session.show(session.run(lambda client: client.call(change)), _print_limits)


def remove_quota(session: CommandSession, who: Annotated[str, WHO]) -> None:
    """Remove the quota of a tenant or project. A tenant without a quota has the quota `*`."""
    change = {"op": "remove_quota", **_parts(who)}
    with_quota = [_who(row) for row in session.run(_all) if row.get("quota")]
    session.show(session.run(lambda client: client.call(change)), _print_limits)
    if who not in with_quota:
        near = get_close_matches(who, with_quota, 1)
        note(f"There was no such quota{''.join(f' (did you mean {each}?)' for each in near)}.")


async def _all(client: "Client") -> list[JsonObject]:
    return await pages(client.url, client.call, ("quotas", "quotas"), read_object, {}).all()


def _print_limits(row: JsonObject) -> None:
    limits = [
        f"{_amount_text(name, use['used'])} of {_amount_text(name, use['quota'])} {_resource(name)}"
        for name, use in _limits(row).items()
        if use["quota"] is not None
    ]
    say(f"{_who(row)}: holds {', '.join(limits)}" if limits else f"{_who(row)}: no limit")


def _limits(row: JsonMapping) -> dict[str, JsonMapping]:
    """Return the use and limits of each resource in a row; the row `*` has only limits."""
    if "resources" in row:
        found: dict[str, JsonMapping] = row["resources"]
        return found
    nominal = row["quota"]["nominal"] if row["quota"] else {}
    return {
        name: {"used": None, "quota": nominal.get(name), "borrowed": None, "room": None}
        for name in RESOURCES
    }


def _parts(who: str) -> JsonObject:
    tenant, slash, project = who.partition("/")
    return {"tenant": tenant, **({"project": project} if slash else {})}


def _who(row: JsonMapping) -> str:
    project = row["project"]
    return str(row["tenant"]) if project is None else f"{row['tenant']}/{project}"


def _milli(option: str, gpus: float | None) -> int | None:
    return None if gpus is None else milli(option, gpus)


def milli(option: str, gpus: float) -> int:
    """Return a number of GPUs in milli; refuse a number with more than three decimals."""
    amount = finite(option, gpus) * GPU_MILLI
    if abs(amount - round(amount)) > 1e-6:  # noqa: PLR2004  # 0.3 GPUs are 299.99999999999994.
        raise typer.BadParameter(f"{option}: expected thousandths of GPUs; got {gpus:g}")
    return round(amount)


def finite(option: str, value: float) -> float:
    """Return a finite number; refuse NaN and infinity, which JSON does not have."""
    if not isfinite(value):
        raise typer.BadParameter(f"{option}: expected a number; got {value:g}")
    return value


def _resource(name: str) -> str:
    return field_title("gpus" if name == "gpu_milli" else name)


def _amount_text(resource: str, amount: int | None) -> str:
    """Return an amount as text for people: GPUs instead of milli."""
    if amount is None:
        return "-"
    return f"{amount / GPU_MILLI:g}" if resource == "gpu_milli" else str(amount)
