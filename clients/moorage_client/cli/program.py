"""Collects all commands, and turns their errors into output and exit codes."""

import logging
import sys
import traceback
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated

import typer

from moorage.records.json_values import JsonObject
from moorage_client.answers import UnreadableError
from moorage_client.cli import (
    asking,
    fleet,
    gpus,
    login,
    looking,
    offline,
    policies,
    pool,
    publishing,
    quotas,
    reservations,
    running,
    server_program,
    skeleton,
    whatif,
)
from moorage_client.cli.exits import MEANINGS, Exit, exit_of
from moorage_client.cli.output import (
    as_yaml,
    explain_failure,
    failure,
    failure_document,
    note,
    print_json,
    say,
)
from moorage_client.cli.session import (
    CaFile,
    CommandSession,
    HttpUrl,
    Json,
    OutputOption,
    Timeout,
    Token,
    Url,
    command,
)
from moorage_client.errors import MoorageError, ProtocolViolated
from moorage_client.home import check_completion

_EPILOG = "Exit codes: " + "; ".join(f"{int(code)} {said}" for code, said in MEANINGS.items()) + "."

app = typer.Typer(
    name="moorage",
    help="Ask a Moorage server where to run a workload, and hold the GPUs there.",
    epilog=_EPILOG,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version as installed_version  # noqa: PLC0415  # Slow to import.

        say(f"moorage {installed_version('moorage')}")
        raise typer.Exit


@app.callback()
def _read_options(
    context: typer.Context,
    url: Url = None,
    http_url: HttpUrl = None,
    token: Token = None,
    json: Json = False,
    timeout: Timeout = None,
    output: OutputOption = None,
    ca_file: CaFile = None,
    version: Annotated[  # noqa: ARG001  # Its callback ends the program.
        bool,
        typer.Option(
            "--version", "-V", callback=_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    context.obj = CommandSession(url, http_url, token, json, timeout, output, ca_file)


policy = typer.Typer(help="Write, test, register and show policies.", no_args_is_help=True)
app.add_typer(policy, name="policy")
machines = typer.Typer(
    cls=fleet.FleetGroup,
    help="Show the fleet (`fleet` or `fleet CLUSTER`), and import machines into it.",
)
app.add_typer(machines, name="fleet")

quota = typer.Typer(help="Show and set the quotas of tenants and projects.", no_args_is_help=True)
app.add_typer(quota, name="quota")

reservation = typer.Typer(help="Reserve nodes for a tenant, for a time.", no_args_is_help=True)
app.add_typer(reservation, name="reservation")

shared = typer.Typer(help="Share this machine's slots among processes.", no_args_is_help=True)
app.add_typer(shared, name="pool")

command(app, "login")(login.login)
command(app, "logout")(login.logout)
command(app, "ask")(asking.ask)
command(app, "renew")(asking.renew)
command(app, "release")(asking.release)
command(app, "flush")(asking.flush)
command(app, "cancel")(asking.cancel)
command(app, "leases")(looking.leases)
command(app, "run", options_first=True)(running.run)
command(app, "exec")(running.execute)
command(app, "logs")(running.logs)
command(app, "status")(looking.status)
command(app, "why")(looking.why)
command(app, "queue")(looking.queue)
command(app, "history")(looking.history)
command(app, "whatif")(whatif.whatif)
command(app, "gpus")(gpus.gpus)
command(app, "watch")(looking.watch)
command(machines, fleet.DEFAULT)(looking.fleet)
command(machines, "import")(fleet.import_fleet)
command(machines, "cordon")(fleet.cordon)
command(machines, "drain")(fleet.drain)
command(machines, "uncordon")(fleet.uncordon)
command(machines, "forget")(fleet.forget)
command(machines, "delete")(fleet.delete)
command(policy, "new")(skeleton.new)
command(policy, "push")(policies.push)
command(policy, "list")(policies.list_policies)
command(policy, "show")(policies.show)
command(policy, "delete")(policies.delete)
command(policy, "activate")(publishing.activate)
command(policy, "rollback")(publishing.roll_back)
command(policy, "aliases")(publishing.aliases)
command(policy, "canary")(publishing.canary)
command(policy, "shadow")(publishing.shadow)
command(policy, "manage")(publishing.manage)
command(policy, "logs")(publishing.logs)
command(policy, "test")(offline.try_policy)
command(policy, "backtest")(offline.backtest)
command(quota, "list")(quotas.list_quotas)
command(quota, "set")(quotas.set_quota)
command(quota, "remove")(quotas.remove_quota)
command(reservation, "list")(reservations.list_reservations)
command(reservation, "add")(reservations.add)
command(reservation, "cancel")(reservations.cancel)
command(shared, "serve")(pool.serve)
command(shared, "show")(pool.show)
command(shared, "checkout")(pool.checkout)
command(shared, "checkin")(pool.checkin)


@app.command("audit", context_settings={"ignore_unknown_options": True})
def audit(
    context: typer.Context,
    options: Annotated[
        list[str] | None,
        typer.Argument(help="`moored audit --help` lists them.", show_default=False),
    ] = None,
) -> None:
    """Print the audit log of the server on this machine, as `moored audit` does."""
    server_program.check_installation()
    shared: CommandSession = context.ensure_object(CommandSession)
    given = [*(options or ()), *(["--json"] if shared.json else ())]
    server_program.become_server("moorage.__main__", "audit", *given)


def version(session: CommandSession) -> None:
    """Print the version of this program."""
    from importlib.metadata import version as installed_version  # noqa: PLC0415  # Slow to import.

    known = installed_version("moorage")
    session.say({"version": known}, f"moorage {known}")


command(app, "version")(version)


def run(arguments: Sequence[str] = ()) -> int:
    """Run one command line; print its result or its failure; return the exit code.

    Args:
        arguments: The arguments without the program's name; default: those of the process.
    """
    # The command line prints every failure itself; the log of `websockets` would repeat it.
    logging.getLogger("websockets").addHandler(logging.NullHandler())
    arguments = arguments or sys.argv[1:]
    # Read the options before the parser, which may fail: scripts rely on JSON even then.
    as_json = "--json" in arguments or _output(arguments) in {"json", "yaml"}
    as_yaml.set(_output(arguments) == "yaml")
    try:
        check_completion(arguments)
        code = app(list(arguments), prog_name="moorage", standalone_mode=False)
    except typer.TyperException as error:
        # The command line may name a group only; typer has printed the group's help.
        message = f"{error.format_message() or 'expected a command'} (try --help)"
        _fail(as_json, failure("usage", message))
        return error.exit_code
    except MoorageError as error:
        return _print_failure(as_json, error)
    except UnreadableError as error:
        return _print_failure(as_json, ProtocolViolated("the server", str(error)))
    except Exception as error:  # noqa: BLE001  # The last stop: a defect becomes an exit code.
        traceback.print_exc()
        _fail(as_json, failure("internal", f"a defect of moorage: {error!r}"))
        return Exit.INTERNAL
    if code == Exit.INTERRUPTED:
        _fail(as_json, failure("interrupted", "interrupted"))
    return code if isinstance(code, int) else Exit.OK


def _output(arguments: Sequence[str]) -> str:
    """Return the value of `-o`, which may stand anywhere before `--`; "" without `-o`."""
    options = list(arguments)
    options = options[: options.index("--")] if "--" in options else options
    for option, following in pairwise([*options, ""]):
        if option in {"-o", "--output"}:
            return following
        if option.startswith("--output="):
            return option.removeprefix("--output=")
        if option.startswith("-o"):
            return option.removeprefix("-o")
    return ""


def _print_failure(as_json: bool, error: MoorageError) -> int:
    """Print a failure that came from the server, or occurred on the way to it."""
    try:
        if as_json:
            print_json(failure_document(error))
        else:
            explain_failure(error)
    except UnreadableError as unreadable:  # The reason is shown; the details cannot be read.
        _fail(as_json, failure("protocol_violated", str(unreadable)))
    return exit_of(error)


def _fail(as_json: bool, document: JsonObject) -> None:
    """Print a failure that did not come from the server."""
    if as_json:
        print_json(document)
    else:
        note(f"moorage: {document['message']}")
