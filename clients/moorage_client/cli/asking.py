"""The commands that change leases and requests: ask, renew, release, flush, cancel."""

import asyncio
import json
import sys
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from msgspec.structs import replace

from moorage.model import LeaseTerms
from moorage.records.fields import TTL_SECONDS, TTL_SECONDS_MAX, WAIT_SECONDS_MAX
from moorage.records.json_values import JsonObject, JsonValue
from moorage_client.answers import Answer, Lease, read_lease
from moorage_client.cli import completing
from moorage_client.cli.exits import TokenMissing
from moorage_client.cli.output import ends_in, fields, note, print_json, say, to_line, where
from moorage_client.cli.session import CommandSession
from moorage_client.cli.tokens import TokenFile, state_path
from moorage_client.errors import LeaseLost
from moorage_client.state_file import StateUnusable
from moorage_client.text_files import decode_text, read_bounded, read_text

if TYPE_CHECKING:
    from moorage_client.client import Client

_of_resources = partial(typer.Option, rich_help_panel="Resources that must fit")
_of_lease = partial(typer.Option, rich_help_panel="Lease")
_for_policy = partial(typer.Option, rich_help_panel="Input and settings of the policy")

LOOK_SECONDS: Final = 0.1
"""Seconds between two checks of a lease that starts or ends."""
_OVER: Final = frozenset({"ending", "ended", "warm"})


class Until(StrEnum):
    """The state of a request at which `moorage ask` returns."""

    GRANTED = "granted"
    ACTIVE = "active"


LeaseArgument = Annotated[
    str, typer.Argument(help="Id of the lease", autocompletion=completing.leases)
]
_PolicyArgument = Annotated[
    str,
    typer.Argument(
        help="The policy: name:version-tag, or an alias", autocompletion=completing.policies
    ),
]
_Topology = Annotated[str | None, _of_resources(help="nvlink, numa, rack or zone")]
_Where = Annotated[
    list[str] | None,
    _of_resources(
        "--where",
        metavar="LABEL",
        help="Label of the nodes: key=value, key=a,b, key!=value, key or !key",
    ),
]
_Alternatives = Annotated[
    list[str] | None,
    _of_resources(
        "--or",
        metavar="JSON",
        help="Acceptable instead, in this order; '{\"gpus\": 4}' changes only this field",
    ),
]
_ClusterOption = Annotated[
    list[str] | None, _of_resources(help="Candidate cluster", autocompletion=completing.clusters)
]
_HoldSeconds = Annotated[
    float | None,
    _of_lease(min=1, max=TTL_SECONDS_MAX, help=f"Seconds of the lease (else {TTL_SECONDS:g})"),
]
_WaitSeconds = Annotated[
    float | None, _of_lease(min=0, max=WAIT_SECONDS_MAX, help="Seconds to wait in the queue")
]
Preemptible = Annotated[
    bool, _of_lease("--preemptible", help="Let the lease give way to a higher priority")
]
_RuntimeMin = Annotated[
    float,
    _of_lease(
        min=0,
        max=WAIT_SECONDS_MAX,
        metavar="SECONDS",
        help="With --preemptible: seconds that the lease lasts in any case",
    ),
]
_Notice = Annotated[
    float,
    _of_lease(
        min=0,
        max=WAIT_SECONDS_MAX,
        metavar="SECONDS",
        help="With --preemptible: seconds from the notice to the lease's end",
    ),
]
_Apart = Annotated[
    str,
    _of_lease(
        metavar="GROUP[=TOPOLOGY]",
        help="Share no node, rack or zone with your other leases of this group",
    ),
]
_TtlMin = Annotated[
    float,
    _of_lease(
        min=0,
        max=TTL_SECONDS_MAX,
        metavar="SECONDS",
        help="Shortest acceptable lease, in seconds, if a reservation begins earlier",
    ),
]
_Project = Annotated[str, _of_lease(help="Project to whose use the lease is added")]


def requirement(text: str) -> JsonObject:
    """Convert a label selector (in the syntax of `kubectl get -l`) to a requirement of `where`.

    Raises:
        typer.BadParameter: The selector is invalid.
    """
    key, equals, values = text.partition("=")
    negated = key.endswith("!") if equals else key.startswith("!")
    key = key.rstrip("=!").lstrip("!").strip()
    if not key or (equals and not values.lstrip("=")):
        raise typer.BadParameter(f"--where: expected key=value, key!=value, key or !key: {text}")
    if not equals:
        return {"key": key, "operator": "DoesNotExist" if negated else "Exists"}
    listed = [each.strip() for each in values.removeprefix("=").split(",")]
    return {"key": key, "operator": "NotIn" if negated else "In", "values": listed}


def json_object(text: str | None, option: str) -> JsonValue:
    """Return the JSON object in an option's value: text, `@file` or `@-` (stdin).

    Raises:
        typer.BadParameter: The value is not a JSON object.
    """
    if text is None:
        return None
    try:
        if text == "@-":
            text = decode_text(read_bounded(sys.stdin.buffer))
        elif text.startswith("@"):
            text = read_text(Path(text[1:]))
        value = json.loads(text)
    except OSError as error:
        raise typer.BadParameter(f"{option}: cannot read {text[1:]}: {error.strerror}") from error
    except ValueError as error:
        raise typer.BadParameter(f"{option}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise typer.BadParameter(f"{option}: expected a JSON object, got {text[:50]}")
    return value


def ask(
    session: CommandSession,
    policy: _PolicyArgument,
    gpus: Annotated[int | None, _of_resources(min=0, help="GPUs on each node")] = None,
    gpu_milli: Annotated[
        int | None, _of_resources(min=1, max=1000, help="Thousandths of each GPU")
    ] = None,
    model: Annotated[list[str] | None, _of_resources(help="Accepted GPU model")] = None,
    gpu_memory_mib: Annotated[int | None, _of_resources(min=0, help="Memory of each GPU")] = None,
    cpu_milli: Annotated[int | None, _of_resources(min=0, help="Thousandths of CPU cores")] = None,
    memory_mib: Annotated[int | None, _of_resources(min=0, help="Memory of each node")] = None,
    nodes: Annotated[int | None, _of_resources(min=1, help="Nodes of a gang")] = None,
    topology: _Topology = None,
    label: _Where = None,
    alternative: _Alternatives = None,
    cluster: _ClusterOption = None,
    inputs: Annotated[str | None, _for_policy(help="JSON, @file or @-")] = None,
    parameters: Annotated[str | None, _for_policy(help="JSON, @file or @-")] = None,
    settings: Annotated[str | None, _for_policy(help="JSON, @file or @-")] = None,
    filter: Annotated[  # noqa: A002  # The wire's name.
        str | None, _for_policy(help="Query that selects clusters")
    ] = None,
    search: Annotated[str | None, _for_policy(help="Similarity query")] = None,
    lease: Annotated[bool, _of_lease("--lease", help="Hold a lease (else only advice)")] = False,
    ttl: _HoldSeconds = None,
    ttl_min: _TtlMin = 0.0,
    apart: _Apart = "",
    wait: _WaitSeconds = None,
    priority: Annotated[int | None, _of_lease(help="Higher priorities go first")] = None,
    preemptible: Preemptible = False,
    runtime_min: _RuntimeMin = 0.0,
    notice: _Notice = 0.0,
    key: Annotated[str | None, _of_lease(help="Idempotency key: same key, same lease")] = None,
    project: _Project = "",
    provision: Annotated[str | None, _of_lease(help="Workload to start: JSON, @file")] = None,
    until: Annotated[
        Until, _of_lease(help="Return when the lease is granted, or its workload ready")
    ] = Until.GRANTED,
    explain: Annotated[bool, typer.Option("--explain", help="Show the reasons")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only decide; hold nothing")] = False,
) -> None:
    """Ask a policy for a placement, and with --lease or --ttl for a lease on it."""
    more = _gives_way(preemptible, runtime_min, notice) | _shorter(ttl_min) | _apart(apart)
    if until is Until.ACTIVE and provision is None:
        raise typer.BadParameter("--until active needs --provision")
    terms = _terms(lease, ttl, wait, priority, more, key, project, provision)
    resources = {
        "gpus": gpus,
        "gpu_milli": gpu_milli,
        "models": model or None,
        "gpu_memory_mib": gpu_memory_mib,
        "cpu_milli": cpu_milli,
        "memory_mib": memory_mib,
        "nodes": nodes,
        "topology": topology,
        "where": [requirement(each) for each in label or ()] or None,
    }
    resources = {name: value for name, value in resources.items() if value is not None}
    request = {
        "inputs": json_object(inputs, "--inputs"),
        "parameters": json_object(parameters, "--parameters"),
        "settings": json_object(settings, "--settings"),
        "filter": json_object(filter, "--filter"),
        "search": json_object(search, "--search"),
        "provision": json_object(provision, "--provision"),
        "clusters": cluster or None,
        "resources": resources or None,
        "alternatives": [resources | json_object(each, "--or") for each in alternative or ()],
        "explain": explain,
        "dry_run": dry_run,
    }

    async def work(client: "Client") -> tuple[Answer, bool]:
        answer: Answer = await client.ask(policy, lease=terms, **request)
        _refuse_ended(answer.lease, key)
        stored = keep(answer.lease, client.url)
        if until is Until.ACTIVE and answer.lease is not None:
            active = await _active(client, answer.lease, quiet=session.json)
            answer = replace(answer, lease=active)
        return answer, stored

    _show(session, *session.run(work))


def _refuse_ended(lease: Lease | None, key: str | None) -> None:
    """Raise an error if the idempotency key of a request returned a lease that has ended."""
    if lease is not None and lease.state in _OVER:
        remedy = f". --key {key} names this lease: use another key" if key else ""
        raise LeaseLost(lease.id, (lease.reason or f"it is {lease.state}") + remedy)


async def _active(client: "Client", lease: Lease, *, quiet: bool) -> Lease:
    """Wait until the workload of a lease is ready; return the lease."""
    last = ""
    while True:
        now = read_lease({**await client.status(lease.id), "token": lease.token})
        if now.state in _OVER:
            raise LeaseLost(lease.id, now.reason or f"it is {now.state}")
        if now.state == Until.ACTIVE:
            return now
        workload = now.workload
        said = "" if workload is None else f"{workload.phase} {workload.detail}".strip()
        if said != last and not quiet:
            note(f"{lease.id}: {said or now.state}")
        last = said
        pause = LOOK_SECONDS  # Only watchers get an event of this change.
        await asyncio.sleep(pause)


def renew(
    session: CommandSession,
    lease: LeaseArgument,
    ttl: Annotated[
        float | None,
        typer.Option(min=1, max=TTL_SECONDS_MAX, help="Seconds from now (else the lease's TTL)"),
    ] = None,
    lease_token: Annotated[
        str | None, typer.Option(help="Token of the lease (else the one that `moorage ask` stored)")
    ] = None,
) -> None:
    """Extend a lease."""
    token = token_of(lease, lease_token)
    renewed = session.run(lambda client: client.renew(lease, token, ttl))
    if lease_token is None:
        TokenFile(state_path()).note_renewal(renewed)
    session.say(renewed.document(), f"lease {lease} now ends in {ends_in(renewed.expires_at)}")


def release(
    session: CommandSession,
    lease: LeaseArgument,
    lease_token: Annotated[
        str | None, typer.Option(help="Token of the lease, if it is another tenant's")
    ] = None,
) -> None:
    """End a lease; repeating the command changes nothing and prints the same."""
    token = lease_token or read_stored_token(lease)
    released = session.run(lambda client: client.release(lease, token))
    # The token stays stored, so that a second release answers the same; it is dropped after days.
    session.say(released.document(), f"lease {lease} is {released.state}")


def flush(
    session: CommandSession,
    cluster: Annotated[str, typer.Option(help="Only leases on this cluster")] = "",
) -> None:
    """End your warm leases, whose released workloads still run for the next equal request."""
    flushed = session.run(lambda client: client.flush(cluster))
    if cluster and not flushed:  # If the name is wrong, this call fails with the nearest name.
        session.run(lambda client: client.call({"op": "fleet", "cluster": cluster, "limit": 1}))
    session.say(flushed, f"{len(flushed)} ended" + (f": {', '.join(flushed)}" if flushed else ""))


def cancel(
    session: CommandSession,
    request: Annotated[
        str, typer.Argument(help="Id of the request", autocompletion=completing.requests)
    ],
) -> None:
    """Cancel a waiting request."""
    ended = session.run(lambda client: client.cancel(request))
    session.show(ended, fields)


def _apart(apart: str) -> JsonObject:
    group, _, topology = apart.partition("=")
    topology = topology or "node"
    if topology not in {"node", "rack", "zone"}:
        raise typer.BadParameter("--apart: expected GROUP, GROUP=rack or GROUP=zone")
    return {"anti_affinity": {"group": group, "topology": topology}} if group else {}


def _shorter(ttl_min: float) -> JsonObject:
    return {"ttl_seconds_min": ttl_min} if ttl_min else {}


def _gives_way(preemptible: bool, runtime_min: float, notice: float) -> JsonObject:
    """Return the lease terms about preemption; empty if the lease may not be preempted."""
    for option, given in (("--runtime-min", runtime_min), ("--notice", notice)):
        if given and not preemptible:
            raise typer.BadParameter(f"{option} needs --preemptible")
    if not preemptible:
        return {}
    return {"preemptible": True, "runtime_seconds_min": runtime_min, "notice_seconds": notice}


def _terms(
    lease: bool,
    ttl: float | None,
    wait: float | None,
    priority: int | None,
    more: JsonObject,
    key: str | None,
    project: str,
    provision: str | None,
) -> LeaseTerms | None:
    wanted = {
        "--wait": wait is not None,
        "--priority": priority is not None,
        "--preemptible": "preemptible" in more,
        "--ttl-min": "ttl_seconds_min" in more,
        "--apart": "anti_affinity" in more,
        "--key": key is not None,
        "--project": bool(project),
        "--provision": provision is not None,
    }
    if not lease and ttl is None:
        for option, given in wanted.items():
            if given:
                raise typer.BadParameter(f"{option} needs --lease or --ttl SECONDS")
        return None
    return LeaseTerms(
        ttl_seconds=TTL_SECONDS if ttl is None else ttl,
        wait_seconds=wait or 0.0,
        priority=priority or 0,
        idempotency_key=key or "",
        project=project,
        **more,
    )


def keep(lease: Lease | None, url: str) -> bool:
    """Store the token of a new lease; return False if that failed."""
    if lease is None or not lease.token:
        return True
    try:
        TokenFile(state_path()).keep(lease, url)
    except StateUnusable as problem:
        # The lease exists, so the command succeeds; `_show` prints the token that was not stored.
        note(f"moorage: {problem}")
        return False
    return True


def _show(session: CommandSession, answer: Answer, stored: bool) -> None:
    if session.json:
        print_json(_envelope(answer))
        return
    for warning in answer.warnings:
        note(f"warning: {warning}")
    lease = answer.lease
    if lease is None:
        say(to_line(answer.data))
    else:
        say(f"{lease.id}  {where(lease.placement)}")
        if lease.choice:
            note(f"The placement is for alternative {lease.choice} of --or.")
        if lease.ttl_max_seconds is not None:
            note(
                f"The lease lasts at most {lease.ttl_max_seconds:.0f} s: then its nodes are "
                "reserved or drained."
            )
        note(
            f"{lease.state}; ends in {ends_in(lease.expires_at)} unless renewed; fencing number "
            f"{lease.fencing}. Release it with: moorage release {lease.id}"
        )
        if not stored:
            note(f"Write down the lease's token, which was not stored: {lease.token}")
    if answer.reasons:
        fields(answer.reasons)


def _envelope(answer: Answer) -> JsonObject:
    """Return the answer as the protocol's success reply."""
    document: JsonObject = {"success": True, "data": answer.data}
    if answer.lease is not None:
        document["lease"] = {**answer.lease.document(), "token": answer.lease.token}
    if answer.warnings:
        document["warnings"] = list(answer.warnings)
    if answer.reasons is not None:
        document["reasons"] = answer.reasons
    if answer.policy_rule_uri:
        document["policy_rule_uri"] = answer.policy_rule_uri
    return document | ({"request": answer.request} if answer.request else {})


def read_stored_token(lease: str) -> str | None:
    """Return the stored token of a lease, or None; a lease of one's own tenant needs no token."""
    try:
        return TokenFile(state_path()).token(lease)
    except StateUnusable:
        return None


def token_of(lease: str, given: str | None) -> str:
    """Return the token of a lease, from the option or from the file of stored tokens.

    Raises:
        TokenMissing: Neither the option nor the file has the token.
    """
    if given:
        return given
    tokens = TokenFile(state_path())
    token = tokens.token(lease)
    if token is None:
        raise TokenMissing(
            f"the token of lease {lease} is not in {tokens.path}; pass it with --lease-token"
        )
    return token
