"""The commands that publish versions of a policy: activate, rollback, canary, shadow and others."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from msgspec import UNSET

from moorage.records.json_values import JsonObject
from moorage.records.policies import (
    AliasDocument,
    CanaryOutcomes,
    CanaryShare,
    ComparedAnswer,
    Latency,
    PolicyOutput,
    ShadowComparison,
)
from moorage_client.answers import read_as
from moorage_client.cli import completing
from moorage_client.cli.asking import json_object
from moorage_client.cli.output import fields, note, print_json, say, table
from moorage_client.cli.session import CommandSession
from moorage_client.cli.testing import test_first
from moorage_client.errors import NotFound

if TYPE_CHECKING:
    from moorage_client.services import Services

SAMPLES_SHOWN: Final = 10
"""Maximum differences printed as text, the most recent ones; `--json` prints all of them."""

AliasArgument = Annotated[
    str,
    typer.Argument(
        help="The alias, as name:word; a bare policy name means its name:stable",
        autocompletion=completing.policies,
    ),
]


CandidateArgument = Annotated[
    str,
    typer.Argument(
        help="The candidate; omit it with the other options", autocompletion=completing.policies
    ),
]
PolicyArgument = Annotated[
    str,
    typer.Argument(help="A version, an alias, or a bare name", autocompletion=completing.policies),
]


class By(StrEnum):
    """What decides the version of a request in a canary: the request itself, or its tenant."""

    REQUEST = "request"
    TENANT = "tenant"


def activate(
    session: CommandSession,
    uri: Annotated[
        str,
        typer.Argument(help="The version, name:version-tag", autocompletion=completing.policies),
    ],
    alias: Annotated[
        str, typer.Option(help="The alias to point at it: a word, or name:word")
    ] = "stable",
    force: Annotated[
        bool,
        typer.Option("--force", help="Accept an unsound version, or one that fails as a shadow"),
    ] = False,
    test: Annotated[bool, typer.Option("--test/--no-test", help="Test the version first")] = True,
) -> None:
    """Make an alias point at a version. Open requests finish with the old version.

    If the server is installed here, the version is tested first, as by `policy test`. A version
    that is not sound, or fails as the alias's shadow, is refused.
    """
    name = alias if ":" in alias else f"{uri.partition(':')[0]}:{alias}"
    with session.services() as services:
        if test and not force:
            _try_first(session, services, uri, "activated")
        session.show(services.activate_policy(name, uri, force=force), _print_change)


def _try_first(session: CommandSession, services: "Services", uri: str, done: str) -> None:
    """Refuse a version that is not sound; the server refuses an unknown version itself."""
    try:
        document = read_as(JsonObject, services.policy(uri))
    except NotFound:
        return
    if isinstance(document.get("code"), str):
        test_first(Path(uri), document, done, quiet=session.json, force=False)


def roll_back(session: CommandSession, alias: AliasArgument) -> None:
    """Make an alias point at its previous version."""
    with session.services() as services:
        session.show(services.roll_back_policy(alias), _print_change)


def aliases(
    session: CommandSession,
    alias: Annotated[
        str,
        typer.Argument(help="An alias whose history to show", autocompletion=completing.policies),
    ] = "",
    delete: Annotated[bool, typer.Option("--delete", help="Delete it; the versions stay")] = False,
) -> None:
    """List the aliases, or the history of one."""
    if delete and not alias:
        raise typer.BadParameter("--delete needs the alias to delete")
    with session.services() as services:
        if not alias:
            session.show(services.aliases(), _list)
        elif delete:
            session.show(services.delete_alias(alias), _print_deletion)
        else:
            session.show(services.alias(alias), _show)


def canary(
    session: CommandSession,
    alias: AliasArgument,
    uri: CandidateArgument = "",
    percent: Annotated[
        float, typer.Option(help="The candidate's share of the requests: more than 0, at most 100")
    ] = 10.0,
    by: Annotated[By, typer.Option(help="What decides the version of a request")] = By.REQUEST,
    seed: Annotated[int, typer.Option(help="Another seed draws other requests")] = 0,
    report: Annotated[
        bool, typer.Option("--report", help="Show the outcomes of both versions")
    ] = False,
    stop: Annotated[bool, typer.Option("--stop", help="End the canary")] = False,
    force: Annotated[bool, typer.Option("--force", help="Accept an unsound version")] = False,
    test: Annotated[bool, typer.Option("--test/--no-test", help="Test the version first")] = True,
) -> None:
    """Send a share of an alias's requests to another version; or show or stop this canary.

    The version is tested first, as by `activate`, and refused if it is not sound.
    """
    _one_of(uri, report, stop)
    if not 0 < percent <= 100:  # noqa: PLR2004  # As the help says; this also refuses nan.
        raise typer.BadParameter(
            f"--percent: expected more than 0 and at most 100, got {percent:g}"
        )
    with session.services() as services:
        if report:
            session.show(services.canary_report(alias), _report)
        elif stop:
            session.show(services.stop_canary(alias), _print_change)
        else:
            if test and not force:
                _try_first(session, services, uri, "started")
            started = services.start_canary(alias, uri, percent, by=by.value, seed=seed)
            session.show(started, _print_change)


def shadow(
    session: CommandSession,
    alias: AliasArgument,
    uri: CandidateArgument = "",
    report: Annotated[bool, typer.Option("--report", help="Show the differences")] = False,
    stop: Annotated[bool, typer.Option("--stop", help="End the shadow")] = False,
) -> None:
    """Run a candidate on an alias's requests without effect; or show or stop this shadow."""
    _one_of(uri, report, stop)
    with session.services() as services:
        if report:
            session.show(services.shadow_report(alias), _differences)
        elif stop:
            session.show(services.stop_shadow(alias), _print_change)
        else:
            session.show(services.start_shadow(alias, uri), _print_change)


def manage(
    session: CommandSession,
    policy: PolicyArgument,
    action: Annotated[str, typer.Argument(help="An action that the policy's `management` knows")],
    data: Annotated[str | None, typer.Option(help="Data for the action: JSON, @file or @-")] = None,
) -> None:
    """Call the `management` of a policy and print its result as JSON."""
    with session.services() as services:
        print_json(services.manage_policy(policy, action, json_object(data, "--data")))


def logs(
    session: CommandSession,
    policy: PolicyArgument,
) -> None:
    """Print a policy's recent output and log lines for your requests."""
    with session.services() as services:
        session.show(services.policy_logs(policy), _print_output)


def _print_output(found: JsonObject) -> None:
    shown = read_as(PolicyOutput, found)
    if circuit := shown.rests:
        note(
            f"The circuit of {shown.policy_rule_uri} is open for another "
            f"{circuit.get('retry_after_seconds', 0):g}"
            f" s: {circuit.get('overruns', 0):g} of its latest evaluations for your tenant were "
            "stopped at their deadline."
        )
    if not shown.printed:
        note(f"{shown.policy_rule_uri} has printed nothing lately.")
    for occasion, text in shown.printed.items():
        note(f"{occasion}:")
        say(text.rstrip("\n"))


def _one_of(uri: str, report: bool, stop: bool) -> None:
    if bool(uri) + report + stop != 1:
        raise typer.BadParameter("name a candidate, or give --report or --stop")


def _differences(document: JsonObject) -> None:
    report = read_as(ShadowComparison, document)
    alone = report.differ_alone
    say(
        f"{report.asked} asked, {report.compared} compared: {report.same} the same,"
        f" {report.differ} different"
        + ("" if alone is UNSET else f" ({alone} of them with no other decision in between)")
        + f"; {report.dropped} dropped"
    )
    if not report.whole:
        note("The alias is another tenant's: figures change in steps, samples are your own.")
    table(
        ("policy", "placed>", "refused>", "GPUs opened>", "nodes opened>", "p50 ms>", "p99 ms>"),
        (
            (
                side.policy_rule_uri,
                side.placed,
                side.refused,
                "" if side.gpus_opened is UNSET else side.gpus_opened,
                "" if side.nodes_opened is UNSET else side.nodes_opened,
                *_percentiles(side.latency_ms),
            )
            for side in (report.active, report.candidate)
        ),
        empty="",
    )
    for sample in report.samples[-SAMPLES_SHOWN:]:
        say(f"{sample.request}  {_answer(sample.active)}  |  {_answer(sample.candidate)}")


def _percentiles(latency: Latency) -> tuple[float | str, float | str]:
    return ("", "") if latency is None else (latency.get("p50", ""), latency.get("p99", ""))


def _answer(side: ComparedAnswer) -> str:
    if side.error:
        return f"{side.error.code}: {side.error.reason}"
    if not side.placement:
        return side.data or ""
    return "; ".join(f"{p.cluster_id}/{p.node_id} gpus {','.join(p.gpus)}" for p in side.placement)


def _print_deletion(document: JsonObject) -> None:
    was = read_as(AliasDocument, document)
    say(f"{was.alias} is deleted; it meant {was.policy_rule_uri}")


def _print_change(document: JsonObject) -> None:
    alias = read_as(AliasDocument, document)
    beside = [("canary", _canary(alias.canary)), ("shadow", alias.shadow)]
    others = "".join(f", {what} {which}" for what, which in beside if which)
    say(f"{alias.alias} -> {alias.policy_rule_uri}{others}")


def _list(found: list[JsonObject]) -> None:
    table(
        ("alias", "policy", "former", "canary", "shadow", "activated by"),
        (
            (
                alias.alias,
                alias.policy_rule_uri,
                alias.former or "",
                _canary(alias.canary),
                alias.shadow or "",
                alias.who or "",
            )
            for alias in read_as(list[AliasDocument], found)
        ),
        empty="No aliases. Make one: moorage policy activate my-rule:1-stable",
    )


def _show(alias: JsonObject) -> None:
    shown = read_as(AliasDocument, alias)
    alias.pop("history", None)
    fields({**alias, "canary": _canary(shown.canary)})
    for change in shown.history:
        say("")
        fields(change)


def _canary(canary: CanaryShare | None) -> str:
    return f"{canary.version} {canary.percent:g} % by {canary.by}" if canary else ""


def _report(document: JsonObject) -> None:
    report = read_as(CanaryOutcomes, document)
    versions = [version for version in (report.active, report.candidate) if version]
    table(
        ("policy", "asked>", "granted>", "advised>", "refused>", "faults>", "p50 ms>", "p99 ms>"),
        (
            (
                version.policy_rule_uri,
                version.asked,
                version.granted,
                version.advised,
                sum(version.refused.values()) - version.faults,
                version.faults,
                *_percentiles(version.latency_ms),
            )
            for version in versions
        ),
        empty="",
    )
