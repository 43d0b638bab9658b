"""Pages of lists, in an order by a key that tells where the next page starts; for `explain`."""

import json
from collections.abc import Callable, Iterable
from typing import Any

from moorage.core.state import refusals
from moorage.core.turns.effects import Information, Response
from moorage.core.turns.events import Inquired


def page(
    inquiry: Inquired,
    name: str,
    rows: Iterable[dict[str, Any]],
    key: Callable[[dict[str, Any]], Any],
) -> Response:
    """Return one page of `rows`, which ascend by `key`, and the key after which the next starts.

    That key is JSON on the wire, for those who read it: a number, a name, or a list of such.
    """
    # The cluster chose what is listed, but for leases: of those it is where they are.
    wanted = {k: v for k, v in inquiry.filters.items() if k != "cluster" or name == "leases"}
    shown: list[dict[str, Any]] = []
    for row in rows:
        try:
            if inquiry.after and not key(row) > _cursor(key(row), inquiry.after):
                continue
        except (TypeError, ValueError):
            return refusals.no_cursor(inquiry.after)
        if all(_matches(row, k, v) for k, v in wanted.items()):
            if len(shown) == inquiry.limit:
                last = key(shown[-1])
                return Information(
                    {name: shown, "next": last if isinstance(last, str) else json.dumps(last)}
                )
            shown.append(row)
    return Information({name: shown, "next": None})


def _cursor(like: Any, after: str) -> Any:
    """Read what `next` of the page before said; raise what says that it said no such thing."""
    if isinstance(like, str):
        return after
    found = json.loads(after)
    if not isinstance(like, tuple):
        return found
    if not isinstance(found, list) or len(found) != len(like):
        raise ValueError(after)
    return tuple(found)


def _matches(row: dict[str, Any], key: str, value: Any) -> bool:
    if key in {"cluster", "cluster_id", "node_id"} and "placement" in row:
        at = "node_id" if key == "node_id" else "cluster_id"
        return any(share[at] == value for share in row["placement"])
    return bool(row.get(key) == value)
