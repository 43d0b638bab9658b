"""`moorage whatif`: show the effects of a change, and the answer to a request after it."""

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Final

import typer

from moorage.records.json_values import JsonObject
from moorage_client.cli import completing
from moorage_client.cli.asking import json_object
from moorage_client.cli.fleet import read_place
from moorage_client.cli.output import note, say, table, to_line
from moorage_client.cli.quotas import finite, milli
from moorage_client.cli.session import CommandSession

_of_request = partial(typer.Option, rich_help_panel="A request to submit")
_of_change = partial(typer.Option, rich_help_panel="Changes to assume")
_AMOUNTS: Final = {"gpus": "gpu_milli", "cpu_milli": "cpu_milli", "memory_mib": "memory_mib"}
_QUOTA: Final = (
    "TENANT or TENANT/PROJECT, and weight=, gpus=, cpu_milli=, memory_mib=, borrow_gpus=, …"
)


def whatif(
    session: CommandSession,
    policy: Annotated[
        str,
        _of_request(
            "--policy",
            "-p",
            help="Policy of the request",
            autocompletion=completing.policies,
        ),
    ] = "",
    gpus: Annotated[int, _of_request("--gpus", "-g", min=0, help="GPUs")] = 1,
    wait: Annotated[float, _of_request(min=0, help="Seconds that the request would wait")] = 0.0,
    priority: Annotated[int, _of_request(help="Higher priorities go first")] = 0,
    request: Annotated[str | None, _of_request(help="The whole request: JSON, @file or @-")] = None,
    add_nodes: Annotated[
        list[str] | None, _of_change(metavar="CLUSTER/NODE[:N]", help="Add N nodes like NODE")
    ] = None,
    cordon: Annotated[
        list[str] | None, _of_change(metavar="CLUSTER[/NODE]", help="Cordon this place")
    ] = None,
    uncordon: Annotated[
        list[str] | None, _of_change(metavar="CLUSTER[/NODE]", help="Uncordon this place")
    ] = None,
    drain: Annotated[
        list[str] | None, _of_change(metavar="CLUSTER[/NODE]", help="Drain this place")
    ] = None,
    quota: Annotated[list[str] | None, _of_change(help=_QUOTA)] = None,
    swap: Annotated[
        list[str] | None, _of_change(metavar="OLD=NEW", help="Use policy NEW in place of OLD")
    ] = None,
) -> None:
    """Show the effects of a change, or the answer to a request, without making the change."""
    wanted = json_object(request, "--request")
    if wanted is None and policy:
        lease = {"wait_seconds": wait, "priority": priority}
        wanted = {"policy_rule_uri": policy, "inputs": {}, "resources": {"gpus": gpus}}
        wanted |= {"lease": lease}
    change = {
        "add_nodes": [_nodes(each) for each in add_nodes or ()],
        "cordon": [_place(each) for each in cordon or ()],
        "uncordon": [_place(each) for each in uncordon or ()],
        "drain": [_place(each) for each in drain or ()],
        "quotas": [_read_quota_change(each) for each in quota or ()],
        "policies": dict(_read_swap(each) for each in swap or ()),
    }
    change = {name: each for name, each in change.items() if each}
    if wanted is None and not change:
        raise typer.BadParameter("give a request (--policy or --request), a change, or both")
    message: JsonObject = {"op": "whatif", "change": change}
    if wanted is not None:
        message["request"] = wanted
    outcome = session.run(lambda client: client.call(message))
    session.show(outcome, _show)


def _show(outcome: JsonObject) -> None:
    for warning in outcome["warnings"]:
        note(f"warning: {warning}")
    if (answer := outcome["answer"]) is not None:
        say(f"the request is {answer['state']}{_about(answer)}")
    rows = [
        *(("granted", row["request"], _places(row)) for row in outcome["granted"]),
        *(
            ("preempted", row["lease"], f"by {row['by'] or 'another tenant'}")
            for row in outcome["preempted"]
        ),
        *(
            ("drained", row["lease"], f"{row['becomes']} {_places(row)}")
            for row in outcome["drained"]
        ),
    ]
    if rows or answer is None:
        empty = "Nothing that you may see would change"
        table(("what", "lease or request", "effect"), rows, empty=empty)
    for kind, many in outcome["others"].items():
        say(f"other tenants: {many} {kind}")
    if tenants := outcome.get("other_tenants"):  # Older servers do not count them.
        say(f"these belong to {tenants} other tenant{'s' if tenants > 1 else ''}")


def _about(answer: JsonObject) -> str:
    match answer["state"]:
        case "granted":
            return f": {_places(answer)}"
        case "advised":
            return f": {to_line(answer['data'])}"
        case "waiting":
            reason = answer.get("reason", "")
            return f", number {answer['position']} in the queue" + (f": {reason}" if reason else "")
        case _:  # The request is refused.
            return f": {answer['reason']}"


def _places(row: JsonObject) -> str:
    shares: Sequence[JsonObject] = row.get("placement", ())
    return "; ".join(
        f"{each['cluster_id']}/{each['node_id']} gpus {','.join(each['gpus'])}" for each in shares
    )


def _nodes(given: str) -> JsonObject:
    place, colon, count = given.rpartition(":")
    if not (colon and count.isdecimal()):
        place, count = given, "1"
    cluster, slash, node = place.partition("/")
    if not (cluster and slash and node):
        raise typer.BadParameter(f"--add-nodes {given!r}: expected CLUSTER/NODE, or CLUSTER/NODE:N")
    return {"cluster": cluster, "like": node, "count": int(count)}


def _place(given: str) -> JsonObject:
    cluster, node = read_place(given)
    return {"cluster": cluster, "node": node}


def _read_swap(given: str) -> tuple[str, str]:
    before, equals, after = given.partition("=")
    if not (before and equals and after):
        raise typer.BadParameter(f"--swap {given!r}: expected OLD=NEW, two policies")
    return before, after


def _read_quota_change(given: str) -> JsonObject:
    """Return the quota in a text `TENANT key=value …`, the format of the setting `quotas`."""
    who, *terms = given.split()
    tenant, slash, project = who.partition("/")
    change: JsonObject = {"tenant": tenant} | ({"project": project} if slash else {})
    if terms == ["remove"]:
        return change | {"remove": True}
    for term in terms:
        key, _, text = term.partition("=")
        kind, _, rest = key.partition("_")
        kind, name = (kind, rest) if kind in {"borrow", "lend"} else ("nominal", key)
        try:
            amount = float(text)
        except ValueError:
            raise typer.BadParameter(f"--quota {term!r}: expected KEY=NUMBER") from None
        finite(f"--quota {term!r}", amount)
        if key in {"weight", "notice_seconds"}:
            change[key] = amount
        elif name in _AMOUNTS:
            whole = milli(f"--quota {term!r}", amount) if name == "gpus" else round(amount)
            change.setdefault(kind, {})[_AMOUNTS[name]] = whole
        else:
            raise typer.BadParameter(f"--quota {term!r}: expected one of {_QUOTA}")
    return change
