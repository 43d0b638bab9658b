"""`moorage fleet import kubernetes --watch`: registers every change of clusters at a server."""

import json
import queue
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import IO, TYPE_CHECKING, Final

from moorage.model import Code
from moorage.records.json_values import JsonObject
from moorage_client.cli.output import count_things, note
from moorage_client.cli.session import CommandSession
from moorage_client.errors import ConnectionFailed, RequestRefused, Timeout, refusal
from moorage_client.inventory import Document
from moorage_client.inventory.kubernetes_live import cluster_id_of, follow_cluster

if TYPE_CHECKING:
    from moorage_client.services import Services

RETRY_SECONDS: Final = 2.0
"""Seconds between two attempts to reach a server that does not answer."""

_Lines = queue.Queue[tuple[str, bytes]]


def follow(
    session: CommandSession, sources: Sequence[str], cluster_id: str, *, replace: bool
) -> None:
    """Keep the documents of clusters up to date until interrupted.

    Raises:
        InventoryError: A source cannot be read at all.
        RequestRefused: The server refuses a document; or the cluster exists and `replace` is not
            set.
    """
    names = {cluster_id_of(source, cluster_id): source for source in sources}
    lines: _Lines = queue.Queue(maxsize=len(sources))
    with session.services() as services, ExitStack() as stack:
        known = {} if replace else _read_clusters_of(services, [*names])
        if known:
            reason = f"{', '.join(sorted(known))}: registered already; give --replace to follow it"
            raise refusal(Code.ALREADY_EXISTS, reason, field="id")
        for name, source in names.items():
            stream = stack.enter_context(follow_cluster(source, name, watch=True))
            threading.Thread(target=_read, args=(name, stream, lines), daemon=True).start()
        latest: dict[str, Document] = {}
        while True:
            name, line = lines.get()
            if not line:
                raise refusal(Code.INTERNAL, f"{name} is no longer followed; the reason is above")
            said: JsonObject = json.loads(line)
            latest[name] = said.get("document") or {
                **(
                    latest.get(name)
                    or _read_clusters_of(services, [name]).get(name)
                    or {"id": name}
                ),
                "unavailable": said["stale"],
            }
            _register(services, latest[name])
            _report(session, latest[name])


def _read(name: str, stream: IO[bytes], lines: _Lines) -> None:
    for line in stream:
        lines.put((name, line))
    lines.put((name, b""))


def _read_clusters_of(services: "Services", names: Sequence[str]) -> dict[str, Document]:
    return {each["id"]: each for each in services.clusters({"id": {"$in": [*names]}})}


def _register(services: "Services", document: Document) -> None:
    """Store a cluster document; repeat until the server answers."""
    noted = False
    while True:
        try:
            services.put_cluster(document)
        except (ConnectionFailed, Timeout) as error:
            reason: Exception = error
        except RequestRefused as error:
            if error.code not in {Code.BUSY, Code.SHUTTING_DOWN, Code.UNAVAILABLE}:
                raise
            reason = error
        else:
            return
        if not noted:
            note(f"{document['id']}: {reason}; trying again")
        noted = True
        time.sleep(RETRY_SECONDS)  # No event tells a client that a lost server is back.


def _report(session: CommandSession, document: Document) -> None:
    nodes = document.get("nodes", {}).get("nodeData", [])
    row = {
        "cluster_id": document["id"],
        "nodes": len(nodes),
        "nodes_unavailable": sum(1 for each in nodes if each.get("unavailable")),
        "unavailable": document.get("unavailable", ""),
    }
    if session.json:
        print(json.dumps(row), flush=True)  # noqa: T201  # A line for each, as `watch` prints them.
    else:
        few = (
            f", {row['nodes_unavailable']} of them unavailable" if row["nodes_unavailable"] else ""
        )
        why = f"; out of date: {row['unavailable']}" if row["unavailable"] else ""
        note(f"{row['cluster_id']}: {count_things(row['nodes'], 'node')}{few}{why}")
