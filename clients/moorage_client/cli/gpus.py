"""`moorage gpus`: free GPUs per model, and the number of requests of each size that fit."""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Final

import typer

from moorage.records.json_values import JsonObject
from moorage.records.replies import ClusterCapacity, NodeCapacity
from moorage_client.answers import read_as
from moorage_client.cli.completing import clusters as complete_clusters
from moorage_client.cli.live import WatchFlag, show_listing
from moorage_client.cli.session import CommandSession

if TYPE_CHECKING:
    from moorage_client.client import Client

SIZES: Final = (1, 2, 4, 8)
"""Request sizes to show, in GPUs of one node."""
AT_ONCE: Final = 8
"""Maximum clusters that are read at the same time."""
WHOLE: Final = 1000


@dataclass
class _Model:
    """The GPUs of one model.

    Attributes:
        total: Whole GPUs.
        free: GPUs that are free as a whole.
        part_milli: Free thousandths of partly held GPUs.
        fits: The number of requests that fit, by size in whole GPUs of one node (`SIZES`).
        clusters: The clusters that have GPUs of the model.
    """

    total: int = 0
    free: int = 0
    part_milli: int = 0
    fits: list[int] = field(default_factory=lambda: [0] * len(SIZES))
    clusters: dict[str, None] = field(default_factory=dict[str, None])

    def add(self, cluster: str, node: NodeCapacity) -> None:
        self.total += len(node.gpus)
        self.clusters[cluster] = None
        if node.unavailable:
            return
        free = sum(milli == WHOLE for milli in node.gpus.values())
        self.free += free
        self.part_milli += sum(milli for milli in node.gpus.values() if milli < WHOLE)
        self.fits = [count + free // size for count, size in zip(self.fits, SIZES, strict=True)]


def gpus(
    session: CommandSession,
    model: Annotated[str, typer.Argument(help="Only models whose name contains this")] = "",
    cluster: Annotated[
        str, typer.Option(help="Only GPUs of this cluster", autocompletion=complete_clusters)
    ] = "",
    watch: WatchFlag = False,
) -> None:
    """Show the free GPUs per model, and how many requests of each size fit now.

    All GPUs of a request are on one node. Nodes that accept no new leases count as full.
    """

    async def work(client: "Client") -> list[JsonObject]:
        named = [cluster] if cluster else await _clusters(client)
        limit = asyncio.Semaphore(AT_ONCE)

        async def nodes(name: str) -> tuple[str, list[NodeCapacity]]:
            async with limit:
                return name, read_as(list[NodeCapacity], await client.fleet(name).all())

        return _rows(await asyncio.gather(*map(nodes, named)), model)

    columns = ["model", "free>", "total>", *(f"of {size}>" for size in SIZES), "parts>"]
    show_listing(
        session,
        work,
        [*columns, *(["clusters"] if session.wide else [])],
        lambda rows: [_cells(row, wide=session.wide) for row in rows],
        empty=(
            f"No GPU model has {model!r} in its name; `moorage gpus` lists all models."
            if model
            else "No GPUs. Import machines with GPUs: moorage fleet import SOURCE"
        ),
        watch=watch,
    )


async def _clusters(client: "Client") -> list[str]:
    rows = read_as(list[ClusterCapacity], await client.fleet().all())
    return [row.cluster_id for row in rows if row.gpus]


def _rows(found: Iterable[tuple[str, Sequence[NodeCapacity]]], wanted: str) -> list[JsonObject]:
    models: dict[str, _Model] = {}
    for cluster, nodes in found:
        for node in nodes:
            name = " or ".join(node.models) or "unknown"
            if node.gpus and not node.duplicate_of and wanted.lower() in name.lower():
                models.setdefault(name, _Model()).add(cluster, node)
    return [
        {
            "model": name,
            "free": each.free,
            "total": each.total,
            "fits": {str(size): count for size, count in zip(SIZES, each.fits, strict=True)},
            "part_milli_free": each.part_milli,
            "clusters": list(each.clusters),
        }
        for name, each in sorted(models.items())
    ]


def _cells(row: JsonObject, *, wide: bool) -> list[object]:
    cells = [row["model"], row["free"], row["total"], *row["fits"].values()]
    cells.append(f"{row['part_milli_free'] / WHOLE:g}")
    return [*cells, ", ".join(row["clusters"])] if wide else cells
