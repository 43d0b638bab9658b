"""Shell completions of values: ids of leases and requests, URIs of policies, and clusters.

A completion asks the server and waits a moment for the answer. Without an answer, a completion
completes nothing, and prints nothing: the user is in the middle of a line.
"""

import asyncio
import contextlib
import os
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import typer

from moorage.records.json_values import JsonObject
from moorage_client.cli.output import count_things

if TYPE_CHECKING:
    from moorage_client.client import Client

SECONDS_MAX: Final = 1.5
"""Longest time of a completion after Tab, in seconds."""
SHOWN_MAX: Final = 200

Names = list[tuple[str, str]]
"""Completions, each with a short description."""


def leases(context: typer.Context, incomplete: str) -> Names:
    """Complete the id of a lease that has not ended."""

    async def names(client: "Client") -> Names:
        found = await client.leases().all()
        return [(lease.id, lease.state) for lease in found if lease.state != "ended"]

    return _complete(incomplete, lambda: _with_client(context, names))


def subjects(context: typer.Context, incomplete: str) -> Names:
    """Complete the id of a lease or of a waiting request."""
    return [*leases(context, incomplete), *requests(context, incomplete)]


def requests(context: typer.Context, incomplete: str) -> Names:
    """Complete the id of a waiting request."""

    async def names(client: "Client") -> Names:
        return [(row["request"], "waits") for row in await client.queue().all()]

    return _complete(incomplete, lambda: _with_client(context, names))


def clusters(context: typer.Context, incomplete: str) -> Names:
    """Complete the id of a cluster."""

    async def names(client: "Client") -> Names:
        rows = await client.fleet().all()
        return [(row["cluster_id"], count_things(row["nodes"], "node")) for row in rows]

    return _complete(incomplete, lambda: _with_client(context, names))


def policies(context: typer.Context, incomplete: str) -> Names:
    """Complete the URI of a policy, or an alias."""
    return _complete(incomplete, lambda: _policies(context))


async def _policies(context: typer.Context) -> Names:
    from moorage_client.services import Services  # noqa: PLC0415  # Slow to import.

    given = _read_shared_options(context)
    with Services(
        given.get("http_url"), given.get("token"), timeout=SECONDS_MAX, ca_file=given.get("ca_file")
    ) as services:
        aliases = [(each["alias"], "alias") for each in services.aliases()]
        found = services.policies()
    return [*aliases, *((each["policy_rule_uri"], each["description"] or "") for each in found)]


async def _with_client(
    context: typer.Context, names: Callable[["Client"], Coroutine[object, object, Names]]
) -> Names:
    from moorage_client.client import Client  # noqa: PLC0415  # Slow to import.

    given = _read_shared_options(context)
    async with Client(
        given.get("url"), given.get("token"), timeout=SECONDS_MAX, ca_file=given.get("ca_file")
    ) as client:
        return await names(client)


def _complete(incomplete: str, work: Callable[[], Coroutine[object, object, Names]]) -> Names:
    async def complete_in_time() -> Names:
        async with asyncio.timeout(SECONDS_MAX):
            return await work()

    found: Names = []
    with (
        contextlib.suppress(Exception),  # See above: a completion never fails.
        Path(os.devnull).open("w", encoding="utf-8") as nowhere,
        contextlib.redirect_stderr(nowhere),
    ):
        found = asyncio.run(complete_in_time())
    return sorted(each for each in found if each[0].startswith(incomplete))[:SHOWN_MAX]


def _read_shared_options(context: typer.Context) -> JsonObject:
    """Return the shared options typed so far, before and after the command's name."""
    given: JsonObject = {}
    each: Any = context
    while each is not None:
        given = {**{k: v for k, v in each.params.items() if v is not None}, **given}
        each = each.parent
    return given
