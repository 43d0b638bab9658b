"""`moorage pool`: the commands for a slot pool that the processes of one machine share."""

import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from msgspec import Struct

from moorage.model import Code
from moorage.records.json_values import JsonObject
from moorage_client.answers import read_as
from moorage_client.cli.output import local_time, note, print_json, say, table
from moorage_client.cli.server_program import become_server, check_installation
from moorage_client.cli.session import CommandSession
from moorage_client.errors import refusal

if TYPE_CHECKING:
    from moorage_client.pool.adapter import ResourcePoolAdapter

AddressOption = Annotated[
    str | None,
    typer.Option(
        help="Where the pool is served: uds:PATH or tcp:HOST:PORT (MOORAGE_POOL_ADDRESS, or "
        "CANARY_RESOURCE_POOL_ADDR, else this user's own socket)",
        metavar="ADDRESS",
    ),
]

COUNT_MAX: Final = 10_000
"""Maximum instances that one argument may request."""

_WANTED: Final = re.compile(r"([^=]+?)(?:=(\d+)(?:x(\d+(?:\.\d+)?))?)?")
"""The form of a request: TYPE, TYPE=COUNT or TYPE=COUNTxSLOTS."""
_SLOTS_PER: Final = "slots_per_"
_AMOUNT: Final = re.compile(r"([^=:]+)[=:](\d+(?:\.\d+)?)")


class _Slot(Struct):
    """An instance of a pool's resources, with its free or held slots."""

    id: str | int
    slots: int | float = 0


class _Holding(Struct):
    """A holder of slots of a pool, and these slots."""

    transaction: str
    resources: dict[str, list[_Slot]] = {}
    pid: int | None = None
    expires_at: float | None = None


class _State(Struct):
    """All slots of a pool, and their holders."""

    resources: dict[str, list[_Slot]] = {}
    holdings: list[_Holding] = []


def serve(
    session: CommandSession,
    address: AddressOption = None,
    resource_pool_file: Annotated[
        Path | None,
        typer.Option(
            help="YAML or JSON file of the instances (default: this machine's CPUs and GPUs)"
        ),
    ] = None,
    resource: Annotated[
        list[str] | None,
        typer.Option("--resource", "-r", metavar="TYPE=N", help="Instances of a type; repeatable"),
    ] = None,
    slots_per: Annotated[
        list[str] | None, typer.Option(metavar="TYPE=N", help="Slots of each instance of a type")
    ] = None,
    oversubscribe: Annotated[
        list[str] | None, typer.Option(metavar="TYPE=N", help="Factor for the slots of a type")
    ] = None,
    ttl: Annotated[
        float,
        typer.Option(help="Lifetime in seconds of a checkout without a process and without --ttl"),
    ] = 86_400,
) -> None:
    """Serve a pool of this machine's resources until SIGTERM or Ctrl-C.

    It prints one line of JSON once it is ready. Its state is in memory: before a restart, end the
    processes that hold slots.
    """
    counts = _amounts(resource, "--resource")
    slots = {  # Also written `-r slots_per_TYPE=N`, which existing scripts have.
        kind.removeprefix(_SLOTS_PER): counts.pop(kind)
        for kind in list(counts)
        if kind.startswith(_SLOTS_PER)
    }
    config: JsonObject = {
        "resources": counts,
        "slots_per": slots | _amounts(slots_per, "--slots-per"),
        "oversubscribe": _amounts(oversubscribe, "--oversubscribe"),
    }
    check_installation()
    job: JsonObject = {
        "config": config if resource_pool_file else config | {"gpu_ids": _gpu_ids()},
        "file": resource_pool_file and str(resource_pool_file),
        "address": address,
        "ttl": ttl,
        "json": session.json,
    }
    become_server("moorage.pool_server.__main__", json.dumps(job))


def show(session: CommandSession, address: AddressOption = None) -> None:
    """Show the free slots, and the held slots with their holders."""
    state = _adapter(session, address).state()
    if session.json:
        print_json(state)
        return
    shown = read_as(_State, state)
    held: dict[tuple[str, str | int], list[str]] = {}
    for each in shown.holdings:
        for kind, rows in each.resources.items():
            for row in rows:
                holder = f"{each.transaction} ({_holder(each)})"
                holders = held.setdefault((kind, row.id), [])
                holders += [holder] * (holder not in holders)
    table(
        ("type", "id", "free slots>", "held by"),
        (
            (kind, row.id, row.slots, "; ".join(held.get((kind, row.id), ())))
            for kind, rows in sorted(shown.resources.items())
            for row in rows
        ),
        empty="The pool has no instances.",
    )


def checkout(
    session: CommandSession,
    wanted: Annotated[
        list[str],
        typer.Argument(
            metavar="TYPE[=COUNT[xSLOTS]]...",
            help="Instances to take: gpus, cpus=4, gpus=2x0.5 (two halves)",
            show_default=False,
        ),
    ],
    address: AddressOption = None,
    pid: Annotated[
        int | None,
        typer.Option(
            help="Process whose end gives the slots back (default: the one that runs this"
            " command; 0: none, only --ttl counts)"
        ),
    ] = None,
    ttl: Annotated[
        float | None, typer.Option(help="Seconds after which the slots are given back in any case")
    ] = None,
) -> None:
    """Take all requested slots or none; print their ids and the id of the transaction."""
    request = [member for each in wanted for member in _members(each)]
    holder = os.getppid() if pid is None else pid
    adapter = _adapter(session, address)
    with _refusals(lambda: adapter.accommodates(request)):
        taken = adapter.checkout(request, pid=holder, ttl_seconds=ttl)
    if session.json:
        print_json({"transaction": taken.transaction, "resources": taken})
        return
    for kind, rows in read_as(dict[str, list[_Slot]], dict(taken)).items():
        say(f"{kind}  {','.join(str(row.id) for row in rows)}")
    say(f"transaction  {taken.transaction}")


def checkin(
    session: CommandSession,
    transaction: Annotated[str, typer.Argument(help="Id of the transaction, from `checkout`")],
    address: AddressOption = None,
) -> None:
    """Give back the slots of a transaction."""
    with _refusals():
        _adapter(session, address).checkin(transaction)
    session.say({"transaction": transaction, "checked_in": True}, f"{transaction} is given back.")


def _adapter(session: CommandSession, address: str | None) -> "ResourcePoolAdapter":
    from moorage_client.pool.adapter import SECONDS_MAX, ResourcePoolAdapter  # noqa: PLC0415  # Slow to import.

    try:
        return ResourcePoolAdapter(address, session.timeout or SECONDS_MAX)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


@contextmanager
def _refusals(possible: Callable[[], object] | None = None) -> Iterator[None]:
    """Turn the errors of a pool into errors with exit codes."""
    from moorage.slots import InvalidCheckin, ResourceUnavailable, SlotsError  # noqa: PLC0415  # Slow to import.

    try:
        yield
    except ResourceUnavailable as error:
        later = possible is not None and possible()
        raise refusal(Code.NO_CAPACITY if later else Code.NEVER_FITS, str(error)) from error
    except InvalidCheckin as error:
        raise refusal(Code.NOT_FOUND, str(error)) from error
    except SlotsError as error:
        raise refusal(Code.BAD_MESSAGE, str(error)) from error


def _gpu_ids() -> list[str]:
    """Return the ids of this machine's NVIDIA GPUs; for divided GPUs, of their MIG instances."""
    from moorage_client.inventory.documents import InventoryError  # noqa: PLC0415  # Slow to import.
    from moorage_client.inventory.nvml import devices_here  # noqa: PLC0415  # Slow to import.

    try:
        devices, _, why = devices_here("this machine")
    except InventoryError as error:
        raise typer.BadParameter(str(error)) from error
    if why:
        note(why)
    return [str(each["id"]) for each in devices]


def _members(text: str) -> list[JsonObject]:
    found = _WANTED.fullmatch(text)
    if found is None:
        raise typer.BadParameter(f"{text!r}: expected TYPE, TYPE=COUNT or TYPE=COUNTxSLOTS")
    kind, count, slots = found[1], int(found[2] or 1), _number(found[3] or "1")
    if count > COUNT_MAX:
        raise typer.BadParameter(f"{text!r}: expected a COUNT up to {COUNT_MAX}")
    return [{"type": kind, "slots": slots}] * count


def _amounts(texts: list[str] | None, option: str) -> dict[str, int | float]:
    amounts = {}
    for text in texts or ():
        found = _AMOUNT.fullmatch(text)
        if found is None:
            raise typer.BadParameter(f"{option} {text!r}: expected TYPE=N")
        amounts[found[1]] = _number(found[2])
    return amounts


def _number(text: str) -> int | float:
    return float(text) if "." in text else int(text)


def _holder(holding: _Holding) -> str:
    parts = [f"process {holding.pid}"] if holding.pid is not None else []
    if holding.expires_at is not None:
        parts.append(f"until {local_time(holding.expires_at)}")
    return ", ".join(parts)
