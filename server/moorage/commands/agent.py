"""`moored agent`: run the agent of a machine, and manage agents at the server."""

import contextlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from moorage.commands.errors import (
    EXIT_USAGE,
    fail,
    fail_on,
    load_config,
    load_local_config,
    refuse_option,
    refuse_root,
)
from moorage.commands.noting import note
from moorage.commands.options import DataOption, FileOption, JsonFlag
from moorage.config.sources import ConfigError, default_data_dir
from moorage.launch import import_structlog
from moorage.setting_kinds import NAME_CHARS_MAX
from moorage.storage.base import StorageError
from moorage.storage.opening import open_storage

if TYPE_CHECKING:
    from moorage.config.settings import Config
    from moorage.daemon.agents.agent_store import AgentStore

agent = typer.Typer(
    help="Run the agent that joins this machine to a fleet; or let machines join, list and remove"
    " them.",
    invoke_without_command=True,
)

MINUTES_MAX: Final = 1_440
UNHEARD_SECONDS_MAX: Final = 3_600
"""Largest `--unheard-seconds`: in this time, two clocks drift by less than the server's margin."""
_ClusterNode = Annotated[str, typer.Argument(help="CLUSTER/NODE, as `moored agent list` has it.")]


@agent.callback()
def agent_run(
    context: typer.Context,
    server: Annotated[
        str | None,
        typer.Option(
            envvar="MOORAGE_URL",
            help="The WebSocket URL of the server, or of several, separated by commas; "
            "default `ws://127.0.0.1:8765`.",
        ),
    ] = None,
    token: Annotated[
        str | None,
        typer.Option(
            envvar="MOORAGE_TOKEN", help="From `moored agent token`; needed once, to join."
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            envvar="MOORAGE_AGENT_DATA",
            help="Folder of the agent's key and workloads; default `~/.local/state/moored-agent`.",
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Name of the node; default: the machine's own name.")
    ] = None,
    label: Annotated[
        list[str] | None, typer.Option(help="A label of the node, KEY=VALUE; may be repeated.")
    ] = None,
    no_machine_id: Annotated[
        bool,
        typer.Option(
            "--no-machine-id",
            help="Do not send the machine id: for machines, or agents, that share one.",
        ),
    ] = False,
    unheard_seconds: Annotated[
        float,
        typer.Option(
            envvar="MOORAGE_AGENT_UNHEARD_SECONDS",
            help="End the workloads here after these seconds without the server; 0: never.",
        ),
    ] = 0.0,
    address: Annotated[
        str,
        typer.Option(
            envvar="MOORAGE_AGENT_ADDRESS",
            help="This machine's address for gangs; default: the one that the server sees.",
        ),
    ] = "",
) -> None:
    """Run the agent of this machine until SIGTERM or Ctrl-C; its workloads keep running.

    Only the agent opens connections. It prints one JSON line once it is connected.
    """
    if context.invoked_subcommand is not None:
        return
    labels = _read_labels(label or ())
    if unheard_seconds and not 1 <= unheard_seconds <= UNHEARD_SECONDS_MAX:
        refuse_option("--unheard-seconds", f"0, or 1 to {UNHEARD_SECONDS_MAX}")
    _check_place(name, address)
    import_structlog()
    from moorage.commands.agent_program import AgentOptions, run  # noqa: PLC0415  # As in serve.

    folder = (data or _default_folder()).absolute()
    token = token and token.strip()
    options = AgentOptions(
        server, token, folder, name or "", labels, not no_machine_id, unheard_seconds, address
    )
    raise typer.Exit(run(options, load_config({"data_dir": options.data}, None)))


def _default_folder() -> Path:
    """Return the default folder of an agent; end the command if the user has no home folder."""
    try:
        return default_data_dir(os.environ).with_name("moored-agent")
    except ConfigError:
        refuse_option("--data", "a folder: this user has no home folder")


@agent.command("token", short_help="Create a token that lets one machine join.")
def agent_token(
    cluster: Annotated[str, typer.Option(help="Id of the cluster that the machine joins.")],
    minutes: Annotated[int, typer.Option(help="Minutes in which the token can be used.")] = 10,
    data: DataOption = None,
    config: FileOption = None,
) -> None:
    """Create a token and print it. One machine can join with it; the server may be running."""
    if not 0 < minutes <= MINUTES_MAX:
        refuse_option("--minutes", f"1 to {MINUTES_MAX}")
    _check_name("--cluster", cluster, "the id of a cluster")
    now = time.time()
    with _store(data, config) as (store, settings):
        typer.echo(store.create_token(cluster, now, now + 60 * minutes))
        expires = {"expires_at": now + 60 * minutes}
        note(settings, "agent.token_created", {"cluster": cluster}, expires)
    typer.echo(f"One machine may join “{cluster}” by this token in {minutes} minutes.", err=True)


@agent.command("list", short_help="List the machines with agents.")
def agent_list(
    data: DataOption = None, config: FileOption = None, as_json: JsonFlag = False
) -> None:
    """List the machines with agents, and whether they are connected."""
    with _store(data, config) as (store, _):
        known = list(store.agents().values())
    if as_json:
        rows = [
            {
                "cluster_id": each.cluster_id,
                "node_id": each.node_id,
                "connected": each.connected,
                "since": each.changed_at,
                "joined_at": each.joined_at,
                "address": each.address,
                "release": each.release,
                "revoked": each.revoked,
                "unheard_seconds": each.unheard_seconds,
            }
            for each in known
        ]
        typer.echo(json.dumps(rows))
        return
    if not known:
        typer.echo("No machine has an agent; `moored agent token` lets one join")
    for each in known:
        state = "connected" if each.connected else "not connected"
        since = datetime.fromtimestamp(each.changed_at, UTC)
        line = f"{each.name}: {state} since {since:%Y-%m-%d %H:%M:%S} UTC"
        line += f", {each.address}, release {each.release}" if each.address else ""
        typer.echo(line + (", revoked" if each.revoked else ""))


@agent.command("revoke", short_help="Refuse the key of an agent from now on.")
def agent_revoke(name: _ClusterNode, data: DataOption = None, config: FileOption = None) -> None:
    """Refuse the key of an agent; a running server ends its connection within a second.

    The workloads there run on, and their leases hold. With a new token the machine may join again.
    """
    with _store(data, config) as (store, settings):
        gone = store.revoke(name)
        note(settings, "agent.revoked", {"cluster": gone.cluster_id, "node": gone.node_id})
    typer.echo(f"The key of {name} is revoked.")


@agent.command("forget", short_help="Remove a machine that will not come back.")
def agent_forget(name: _ClusterNode, data: DataOption = None, config: FileOption = None) -> None:
    """Remove a machine that is not connected: its leases end, and its node leaves the cluster.

    Only do this if nothing runs there any more: the machine's workloads are not stopped.
    """
    with _store(data, config) as (store, settings):
        gone = store.forget(name)
        note(settings, "agent.forgotten", {"cluster": gone.cluster_id, "node": gone.node_id})
    typer.echo(f"{name} is forgotten.")


@agent.command("reclaim", short_help="Have agents follow a server that was restored or moved.")
def agent_reclaim(data: DataOption = None, config: FileOption = None) -> None:
    """Make agents accept orders from this server, although another server has led them since.

    Use this after a server's storage was restored from a backup, or moved: agents refuse orders
    from a server that another server has replaced. First make sure that the other server never runs
    again.
    """
    with _store(data, config) as (store, settings):
        epoch = store.reclaim(time.time())
        note(settings, "agent.reclaimed", {}, {"epoch": epoch})
    typer.echo("Agents follow this server when they connect next, within half a minute.")


def _read_labels(given: Sequence[str]) -> dict[str, str]:
    """Return the labels of a node; end the command if a label is invalid."""
    labels = dict(each.partition("=")[::2] for each in given)
    if "" in labels or any("=" not in each for each in given):
        refuse_option("--label", "KEY=VALUE")
    return labels


def _check_place(name: str | None, address: str) -> None:
    """End the command if a name and address cannot be those of a machine."""
    if name:
        _check_name("--name", name, "the name of a node")
    if not address.isprintable() or set(address) & set(" ,/") or len(address) > NAME_CHARS_MAX:
        refuse_option("--address", "one address or name of a host")


def _check_name(option: str, name: str, what: str) -> None:
    """End the command if a name is invalid in the inventory."""
    if not name.strip() or "/" in name or not name.isprintable():
        refuse_option(option, f"{what}, without `/`")
    if len(name) > NAME_CHARS_MAX:
        refuse_option(option, f"at most {NAME_CHARS_MAX} characters")


@contextlib.contextmanager
def _store(data: Path | None, config: Path | None) -> "Iterator[tuple[AgentStore, Config]]":
    """Open the store of agents in the server's data folder; report a fault in one line."""
    settings = load_local_config(data, config)
    from moorage.daemon.agents.agent_store import AgentStore, AgentStoreError  # noqa: PLC0415  # As in serve.

    if not settings.storage and not settings.data_dir.is_dir():
        fail(f"{settings.data_dir} is not a data folder of a server", EXIT_USAGE)
    refuse_root(settings.data_dir)
    with fail_on(AgentStoreError, StorageError, OSError):
        rows = open_storage(settings.storage, settings.data_dir).agents()
        with contextlib.closing(AgentStore(rows)) as store:
            yield store, settings
