"""The commands that test policies without a server: test, backtest.

These commands need the server's sandbox and core, which a client does not import; see
`server_program`.
"""

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final

import typer

from moorage.records.json_values import JsonObject
from moorage_client.cli.asking import json_object
from moorage_client.cli.exits import Exit
from moorage_client.cli.output import count_things, note, say, table
from moorage_client.cli.policies import document_of, read_json
from moorage_client.cli.server_program import run
from moorage_client.cli.session import CommandSession
from moorage_client.cli.testing import FINDINGS_SHOWN, policy_name, test_file_of

SUFFIXES: Final = (".py", ".json", ".zip", ".tar.gz", ".tar.xz")
LINES_SHOWN: Final = 12
"""Maximum lines in a profile."""
SHARE_SHOWN: Final = 0.001
"""A profile shows a line only if the line took at least this fraction of the whole time."""

SEED_MAX: Final = 2**31 - 1
"""Largest seed: the seed of one request combines it with the request's number, in 63 bits."""


class Stays(StrEnum):
    """The distribution of the lifetimes of leases in a replay."""

    MEMORYLESS = "memoryless"
    LOGNORMAL = "lognormal"
    SIZED = "sized"


class Mode(StrEnum):
    """The place of evaluation: the jail, or a plain process, which is unsafe."""

    JAIL = "jail"
    UNSAFE = "unsafe"


Sandbox = Annotated[
    Mode, typer.Option(help="`jail`; or `unsafe`, only for policies that you trust")
]


def try_policy(
    session: CommandSession,
    path: Annotated[Path, typer.Argument(help="A policy, as for `policy push`")],
    requests: Annotated[
        Path | None,
        typer.Option(help="Requests in place of the built-in ones: a JSON list of messages"),
    ] = None,
    clusters: Annotated[
        Path | None,
        typer.Option(help="Cluster documents in place of the built-in ones"),
    ] = None,
    parameters: Annotated[
        str | None, typer.Option(help="Default parameters: JSON, @file or @-")
    ] = None,
    settings: Annotated[
        str | None, typer.Option(help="Default settings: JSON, @file or @-")
    ] = None,
    seed: Annotated[
        int, typer.Option(min=0, max=SEED_MAX, help="Seed of the policy's random numbers")
    ] = 1,
    profile: Annotated[
        bool,
        typer.Option("--profile", help="Show the time of each line, even if the policy is quick"),
    ] = False,
    sandbox: Sandbox = Mode.JAIL,
) -> None:
    """Test a policy without a server, in the server's jail; exit 6 if it is not sound."""
    report = test_file_of(
        path,
        {
            "policy": policy_document(path, parameters, settings),
            "requests": _documents(requests, "--requests"),
            "clusters": _documents(clusters, "--clusters"),
            "seed": seed,
            "profile": profile,
            "mode": sandbox.value,
        },
    )
    session.show(report, _show)
    raise typer.Exit(Exit.OK if report["passed"] else Exit.RULE_FAILED)


def policy_document(
    path: Path, parameters: str | None = None, settings: str | None = None
) -> JsonObject:
    """Return the PolicyRule document of a file; its default name is that of the file."""
    document = document_of(path)
    if not document.get("policy_rule_uri"):
        name = policy_name(path)
        document = {"name": name, "version": "0", "release_tag": "test", **document}
        uri = "{name}:{version}-{release_tag}".format_map(document)
        document["policy_rule_uri"] = uri
    for field, text, option in (
        ("policy_parameters", parameters, "--parameters"),
        ("policy_settings", settings, "--settings"),
    ):
        given = json_object(text, option)
        if given is not None:
            document = {**document, field: given}
    return document


def _documents(path: Path | None, option: str) -> list[JsonObject]:
    """Return the objects in a file, which has a list of objects or a single object."""
    if path is None:
        return []
    value = read_json(path, f"{option}: ")
    found = value if isinstance(value, list) else [value]
    if not found:
        raise typer.BadParameter(f"{option}: {path} holds no JSON objects")
    for number, each in enumerate(found):
        if not isinstance(each, dict):
            raise typer.BadParameter(f"{option}: item {number} of {path} is not a JSON object")
    return found


def _show(report: JsonObject) -> None:
    for finding in report["findings"][:FINDINGS_SHOWN]:
        say(finding)
    more = len(report["findings"]) - FINDINGS_SHOWN
    if more > 0:
        say(f"… and {count_things(more, 'more finding')} (--json has all)")
    for remark in report["notes"]:
        note(f"note: {remark}")
    if report["requests"]:
        outcomes = ", ".join(f"{count} {name}" for name, count in report["outcomes"].items())
        p50, longest = 1e3 * report["p50_seconds"], 1e3 * report["max_seconds"]
        seeds = ", ".join(map(str, report["hash_seeds"]))
        count = count_things(len(report["requests"]), "request")
        say(f"{count}: {outcomes}; under hash seeds {seeds}")
        if longest:  # Rankings and blocks are not timed.
            say(f"an evaluation took {p50:.2f} ms at the median, {longest:.2f} ms at most")
    if report["printed"]:
        note(f"the policy printed:\n{report['printed']}")
    if report["profile"]:
        _show_profile(report["profile"])
    say(f"{report['uri']}: {'passed' if report['passed'] else 'NOT SOUND'}")


def _show_profile(profile: JsonObject) -> None:
    total = profile["seconds"] or 1.0
    table(
        ("share>", "ms>", "hits>", "line", "source"),
        (
            (
                f"{line['seconds'] / total:.1%}",
                f"{1e3 * line['seconds']:.2f}",
                line["hits"],
                f"{line['file']}:{line['line']}",
                line["text"],
            )
            for line in profile["lines"][:LINES_SHOWN]
            if line["seconds"] >= SHARE_SHOWN * total
        ),
        empty="No line of the policy was run.",
    )


def backtest(
    session: CommandSession,
    rules: Annotated[
        list[str],
        typer.Argument(
            help="Policies: files as for `policy test`, names of shipped ones, or URIs on a server"
        ),
    ],
    trace: Annotated[
        tuple[Path, Path] | None,
        typer.Option(metavar="NODES PODS", help="Replay a trace in the openb format"),
    ] = None,
    ledger: Annotated[
        Path | None,
        typer.Option(help="Replay the history in a daemon's data directory; it may be running"),
    ] = None,
    arrive: Annotated[
        float, typer.Option(min=0.01, max=100, help="GPU demand, as a multiple of the capacity")
    ] = 1.3,
    timed: Annotated[
        bool, typer.Option("--timed", help="Use the trace's own times, each request once")
    ] = False,
    churn: Annotated[
        float | None,
        typer.Option(
            min=0.01, max=100, metavar="LOAD", help="Let the trace's requests end and be replaced"
        ),
    ] = None,
    stays: Annotated[
        Stays, typer.Option(help="With --churn: distribution of lifetimes, one hour on average")
    ] = Stays.MEMORYLESS,
    wait: Annotated[
        float, typer.Option(min=0, help="Seconds that requests of a trace may wait")
    ] = 0.0,
    seed: Annotated[int, typer.Option(min=0, max=SEED_MAX, help="Seed of all random numbers")] = 42,
    limit: Annotated[int | None, typer.Option(min=1, help="Requests at most")] = None,
    plot: Annotated[
        list[Path] | None,
        typer.Option(help="Write a chart to this .png or .svg file; may be repeated"),
    ] = None,
    sandbox: Sandbox = Mode.JAIL,
) -> None:
    """Replay a trace, or a daemon's ledger, with several policies, and compare the outcomes."""
    if (trace is None) == (ledger is None):
        raise typer.BadParameter("give --trace NODES PODS, or --ledger DIR")
    if churn is not None and (ledger is not None or timed):
        raise typer.BadParameter("--churn draws its own times: omit --timed and --ledger")
    nodes, pods = trace or ("", "")
    outcome = run(
        "backtest",
        {
            "rules": [_policy(session, each) for each in rules],
            "nodes": str(nodes),
            "pods": str(pods),
            "ledger": "" if ledger is None else str(ledger),
            "arrive": arrive,
            "timed": timed,
            "churn": churn or 0.0,
            "stays": stays.value,
            "wait_seconds": wait,
            "seed": seed,
            "limit": limit,
            "plots": [str(path) for path in plot or []],
            "mode": sandbox.value,
            "progress": sys.stderr.isatty(),
        },
    )
    session.show(outcome, _show_backtest)


def _policy(session: CommandSession, name: str) -> JsonObject:
    """Return a policy, given its file, its URI on a server, or the name of a shipped one."""
    if Path(name).exists():
        return policy_document(Path(name))
    if ":" in name:
        with session.services() as services:
            document: JsonObject = services.policy(name)
        return document
    if name.endswith(SUFFIXES):
        raise typer.BadParameter(f"FILE: there is no file {name}")
    return {"shipped": name}


def _show_backtest(outcome: JsonObject) -> None:
    table(
        (
            "policy",
            "asked>",
            "granted>",
            "alloc. %>",
            "mean %>",
            "refused %>",
            "fragm. %>",
            "waited>",
            "mean s>",
        ),
        (
            (
                run["rule"],
                run["asked"],
                run["granted"],
                f"{run['allocation_percent']:.2f}",
                f"{run['allocation_percent_mean']:.2f}",
                f"{run['refused_percent']:.2f}",
                f"{run['fragmentation_percent']:.2f}",
                run["waited"],
                f"{run['waited_seconds_mean']:.1f}",
            )
            for run in outcome["rules"]
        ),
        empty="No policies.",
    )
    table(
        ("policy", "size", "asked>", "granted>", "mean s>"),
        (
            (
                run["rule"],
                size,
                each["asked"],
                each["granted"],
                f"{each['waited_seconds_mean']:.1f}",
            )
            for run in outcome["rules"]
            for size, each in run["sizes"].items()
        ),
        empty="No requests.",
    )
    for played in outcome["rules"]:
        refused = ", ".join(f"{count} {code}" for code, count in played["refusals"].items())
        say(f"{played['rule']} refused: {refused or 'nothing'}")
    for pair in outcome["differing"]:
        say(
            f"{' and '.join(pair['rules'])} differ in {pair['asks']} asks: "
            f"{pair['placed_elsewhere']} placed elsewhere, {pair['granted_by_first_only']} granted "
            f"by the first only, {pair['granted_by_second_only']} by the second only"
        )
    for remark in outcome["notes"]:
        note(f"note: {remark}")
