"""The commands about the fleet: `moorage fleet [CLUSTER]` shows it, `fleet import` registers it.

`cordon`, `drain`, `uncordon`, `forget` and `delete` take clusters and nodes out of service, and put
them back.
"""

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from msgspec import Struct

from moorage.model import Code
from moorage.records.json_values import JsonMapping, JsonObject, JsonValue
from moorage.records.replies import NodeCapacity
from moorage_client.answers import read_as
from moorage_client.cli import completing
from moorage_client.cli.output import (
    SHORT_CHARS,
    count_things,
    note,
    print_json,
    say,
    short_name,
    table,
)
from moorage_client.cli.session import CommandSession
from moorage_client.errors import MoorageError, RequestRefused, refusal

if TYPE_CHECKING:
    from moorage_client.client import Client
    from moorage_client.services import Services

_BEGINNING: Final = re.compile(rf"[0-9a-f]{{{SHORT_CHARS},39}}")
"""Matches the beginning of a node's hash, which tables show in place of the hash."""
DEFAULT: Final = "show"
"""The command that runs if the first argument names no command."""

_HELPS: Final = ("-h", "--help")


class FleetGroup(typer.core.TyperGroup):
    """A group of commands with a default command, `show`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Insert the name of the default command before arguments that name no command."""
        named = bool(args) and (args[0] in self.commands or args[0] in _HELPS)
        return super().parse_args(ctx, args if named else [DEFAULT, *args])


class _Count(Struct):
    """A number of nodes, GPUs or CPUs in a cluster; a number of CPUs may be a fraction."""

    count: int | float = 0


class _Stored(Struct):
    """The fields of a cluster document that are shown."""

    id: str
    nodes: _Count | None = None
    gpus: _Count | None = None
    vcpus: _Count | None = None
    memory: int | float | None = 0


def import_fleet(
    session: CommandSession,
    sources: Annotated[
        list[str],
        typer.Argument(
            help="A file, or - for stdin: CSV of nodes (sn, cpu_milli, memory_mib, gpu, model), "
            "JSON of cluster documents, of `kubectl get nodes -o json`, or of `ray list nodes "
            "--detail --format json`. Or: local (this machine), kubernetes, kubernetes:CONTEXT (of "
            "the kubeconfig), ray, ray:URL (of its dashboard)",
            show_default=False,
        ),
    ],
    cluster_id: Annotated[
        str, typer.Option(help="Id of the one cluster to make of all sources")
    ] = "",
    replace: Annotated[
        bool, typer.Option("--replace", help="Replace an existing cluster by the imported one")
    ] = False,
    merge: Annotated[
        bool,
        typer.Option("--merge", help="Add the nodes to an existing cluster, and keep the rest"),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the documents, and change nothing")
    ] = False,
    watch: Annotated[
        bool,
        typer.Option(
            "--watch", help="For Kubernetes: keep running, and register every change at once"
        ),
    ] = False,
) -> None:
    """Register the machines of a site as clusters, from files or systems that list them.

    If a cluster exists already, the import is refused, unless --replace or --merge is given.
    """
    from moorage_client.inventory import InventoryError, collect  # noqa: PLC0415  # Slow to import.

    if replace and merge:
        raise typer.BadParameter("give --replace or --merge, not both")
    if watch:
        _watch(session, sources, cluster_id, replace=replace, otherwise=merge or dry_run)
        return
    try:
        found = collect(sources, cluster_id)
    except InventoryError as error:
        raise typer.BadParameter(str(error)) from error
    for each in found.notes:
        note(each)
    if dry_run and not merge:
        print_json({"clusters": found.documents})
        return
    with session.services() as services:
        known = {} if replace else _read_clusters_of(services, found.documents)
        if known and not merge:
            raise refusal(
                Code.ALREADY_EXISTS,
                f"{', '.join(sorted(known))}: registered already, so nothing was changed; give "
                "--replace, or --merge to add nodes",
                field="id",
            )
        if dry_run:
            print_json({"clusters": [_merge(known, each) for each in found.documents]})
        else:
            done = _register(services, known, found.documents, replace=replace, merge=merge)
            session.show({"clusters": done}, _report)


def _watch(
    session: CommandSession,
    sources: Sequence[str],
    cluster_id: str,
    *,
    replace: bool,
    otherwise: bool,
) -> None:
    from moorage_client.cli.following import follow  # noqa: PLC0415  # Slow to import.
    from moorage_client.inventory import InventoryError  # noqa: PLC0415  # As above.
    from moorage_client.inventory.kubernetes_live import is_live  # noqa: PLC0415  # As above.

    if otherwise or not all(map(is_live, sources)) or (cluster_id and len(sources) > 1):
        wanted = "kubernetes or kubernetes:CONTEXT as sources, and neither --merge nor --dry-run"
        raise typer.BadParameter(f"--watch: expected {wanted}; --cluster-id needs a single source")
    try:
        follow(session, sources, cluster_id, replace=replace)
    except InventoryError as error:
        raise typer.BadParameter(str(error)) from error


def _read_clusters_of(
    services: "Services", documents: Sequence[JsonMapping]
) -> dict[str, JsonObject]:
    wanted = [document["id"] for document in documents]
    found: list[JsonObject] = services.clusters({"id": {"$in": wanted}})
    stored = read_as(list[_Stored], found)
    return {each.id: document for each, document in zip(stored, found, strict=True)}


def _merge(known: Mapping[str, JsonMapping], document: JsonMapping) -> JsonMapping:
    from moorage_client.inventory import merge_documents  # noqa: PLC0415  # Slow to import.

    old = known.get(document["id"])
    return document if old is None else merge_documents(old, document)


def _register(
    services: "Services",
    known: Mapping[str, JsonMapping],
    documents: Sequence[JsonMapping],
    *,
    replace: bool,
    merge: bool,
) -> list[JsonObject]:
    """Store cluster documents one by one, and return each outcome."""
    done: list[JsonObject] = []
    try:
        for document in documents:
            if merge:  # The server merges, since other users may add machines at the same time.
                action = "merged" if document["id"] in known else "created"
                done.append(_row(services.add_nodes(document), action))
                continue
            try:
                done.append(_row(services.create_cluster(document), "created"))
            except RequestRefused as refused:
                if not replace or refused.code != Code.ALREADY_EXISTS:
                    raise
                done.append(_row(services.replace_cluster(document), "replaced"))
    except MoorageError:
        if done:  # Clusters are stored one by one; those before the failure are stored.
            note(f"imported before the failure: {', '.join(row['cluster_id'] for row in done)}")
        raise
    return done


def _row(document: JsonMapping, action: str) -> JsonObject:
    stored = read_as(_Stored, document)
    totals = {"nodes": stored.nodes, "gpus": stored.gpus, "vcpus": stored.vcpus}
    counts = {name: 0 if group is None else group.count for name, group in totals.items()}
    return {"cluster_id": stored.id, "action": action, **counts, "memory_mib": stored.memory or 0}


def _report(done: Mapping[str, list[JsonObject]]) -> None:
    table(
        ("cluster", "", "nodes>", "GPUs>", "CPUs>", "memory MiB>"),
        (
            (
                row["cluster_id"],
                row["action"],
                row["nodes"],
                row["gpus"],
                row["vcpus"],
                row["memory_mib"],
            )
            for row in done["clusters"]
        ),
        empty="The sources name no cluster.",
    )


PLACE: Final = typer.Argument(
    metavar="CLUSTER[/NODE]",
    help="A node (CLUSTER/NODE), or a whole cluster",
    show_default=False,
    autocompletion=completing.clusters,
)
REASON: Final = typer.Option(help="Reason to show when a request finds no place there")


def cordon(
    session: CommandSession, place: Annotated[str, PLACE], reason: Annotated[str, REASON] = ""
) -> None:
    """Place no new leases on a node or cluster. Existing leases stay."""

    async def work(client: "Client") -> JsonValue:
        return await client.cordon(*await _node(client, place), reason)

    session.show(session.run(work), _out_of_service)


def drain(
    session: CommandSession,
    place: Annotated[str, PLACE],
    reason: Annotated[str, REASON] = "",
    within: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="End the leases after these seconds; otherwise they last until they are released",
        ),
    ] = None,
) -> None:
    """Place no new leases on a node or cluster, and end or move existing ones.

    Warm leases end, and leases that may be requeued start elsewhere. Run the command again to see
    the remaining leases.
    """

    async def work(client: "Client") -> JsonValue:
        return await client.drain(*await _node(client, place), reason, seconds=within)

    session.show(session.run(work), _out_of_service)


def uncordon(session: CommandSession, place: Annotated[str, PLACE]) -> None:
    """Undo `cordon` or `drain` of this node, or of this cluster."""

    async def work(client: "Client") -> JsonValue:
        return await client.uncordon(*await _node(client, place))

    done = session.run(work)
    session.say(done, f"{place} is {done['unavailable'] or 'in service'}")


def forget(
    session: CommandSession,
    node: Annotated[str, typer.Argument(help="CLUSTER/NODE", metavar="NODE")],
) -> None:
    """Remove a machine whose agent will not come back: its leases fail, its node is removed.

    Only do this if nothing runs there any more: the machine's workloads are not stopped.
    """
    if "/" not in node:
        raise typer.BadParameter(f"expected CLUSTER/NODE, as `moored agent list` prints it: {node}")

    async def work(client: "Client") -> JsonValue:
        return await client.forget(*await _node(client, node))

    session.show(session.run(work), _out_of_service)


def delete(
    session: CommandSession,
    cluster: Annotated[
        str,
        typer.Argument(
            help="Id of the cluster", show_default=False, autocompletion=completing.clusters
        ),
    ],
) -> None:
    """Remove a cluster from the inventory. Its leases stay until they end."""
    with session.services() as services:
        services.delete_cluster(cluster)
    session.say({"deleted": cluster}, f"{cluster} is deleted")


def read_place(given: str) -> tuple[str, str]:
    """Return cluster and node of `CLUSTER[/NODE]`; the node is empty for a whole cluster.

    Raises:
        typer.BadParameter: A name is empty, for example since a variable of the shell is not set.
    """
    cluster, slash, node = given.partition("/")
    if not cluster or (slash and not node):
        raise typer.BadParameter(f"expected CLUSTER or CLUSTER/NODE, and no empty name: {given!r}")
    return cluster, node


async def _node(client: "Client", place: str) -> tuple[str, str]:
    """Return cluster and node of `CLUSTER[/NODE]`; a prefix of a node's hash is enough."""
    cluster, node = read_place(place)
    if not _BEGINNING.fullmatch(node):
        return cluster, node
    names = [row.node_id for row in read_as(list[NodeCapacity], await client.fleet(cluster).all())]
    begin = [name for name in names if name.startswith(node)]
    return cluster, begin[0] if node not in names and len(begin) == 1 else node


def _out_of_service(done: JsonMapping) -> None:
    place = "/".join(filter(None, (done["cluster_id"], short_name(done["node_id"] or ""))))
    leases = done["leases"]
    there = f"{count_things(len(leases), 'lease')} there: {', '.join(leases)}"
    left = there if leases else "no lease is there"
    say(f"{place} is {done['unavailable']}; {left}")
