"""The program behind `moorage fleet import kubernetes`: writes a cluster as JSON lines to stdout.

The command line is a client and may not import the server's packages. It starts this program with a
job, as JSON in the only argument: `cluster_id`, `context`, and `watch`. Each line is `{"document":
…}` or `{"stale": "why"}`; after `{"error": "why"}`, no line follows. The program ends when its
stdin ends.
"""

import asyncio
import os
import sys
import threading
from typing import Final

import msgspec

from moorage.backends.kubernetes.connection import ClusterConnection
from moorage.backends.kubernetes.documents import free_capacity_document
from moorage.backends.kubernetes.errors import KubernetesError
from moorage.backends.kubernetes.following import ClusterFollower, ClusterSource
from moorage.backends.kubernetes.inventory import ClusterInventory
from moorage.records.json_values import JsonObject

_encode: Final = msgspec.json.Encoder().encode


def main() -> None:
    """Follow the cluster and print its documents, one line of JSON each."""
    job = msgspec.json.decode(sys.argv[1])
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    source = ClusterSource(job["cluster_id"], job["context"])
    asyncio.run(_follow(source) if job["watch"] else _read(source))


async def _read(source: ClusterSource) -> None:
    try:
        async with (
            await ClusterConnection.open(context=source.context) as connection,
            ClusterInventory(connection, source.cluster_id) as inventory,
        ):
            await inventory.listed()
            _say({"document": free_capacity_document(inventory.document())})
    except KubernetesError as error:
        _say({"error": str(error)})


async def _follow(source: ClusterSource) -> None:
    stale = ""
    async for view in ClusterFollower(source).views():
        if view.document is not None:
            _say({"document": view.document | {"unavailable": view.stale}})
        elif bool(view.stale) != bool(stale):
            _say({"stale": view.stale})
        stale = view.stale


def _say(line: JsonObject) -> None:
    sys.stdout.buffer.write(_encode(line) + b"\n")
    sys.stdout.buffer.flush()


def _end_with_stdin() -> None:
    # Not `sys.stdin`: the interpreter aborts if a thread reads from it when `main` returns.
    os.read(0, 1)
    os._exit(0)  # No open file needs closing.


if __name__ == "__main__":
    main()
