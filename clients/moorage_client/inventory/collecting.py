"""Reads sources of any kind, and merges data about the same cluster."""

import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from moorage.records.json_values import JsonValue
from moorage_client.inventory.documents import Document, Inventory, InventoryError, combine
from moorage_client.inventory.kubernetes import KINDS, kubernetes_inventory
from moorage_client.inventory.kubernetes_live import KUBERNETES, is_live, live_inventory
from moorage_client.inventory.openb import nodes_in, trace_document
from moorage_client.inventory.ray import dashboard_inventory, is_ray_node, ray_inventory
from moorage_client.inventory.this_machine import machine_inventory
from moorage_client.text_files import decode_text, plain_name, read_bounded, read_file

STDIN: Final = "-"
MACHINE: Final = "local"
RAY: Final = "ray"

_FORMS: Final = (
    "cluster documents, the output of `kubectl get nodes -o json`, of "
    "`ray list nodes --detail --format json`, or of ray.nodes()"
)


def collect(sources: Sequence[str], cluster_id: str = "") -> Inventory:
    """Read sources; merge data about the same cluster into one document.

    Args:
        sources: The sources, in the forms that the package's docstring lists.
        cluster_id: Id of one cluster with the nodes of all sources; empty: each source names its
            own cluster, by default after its file.

    Returns:
        Documents with ids, in the order of the sources, and all notes.

    Raises:
        InventoryError: A source cannot be read; a cluster has no name; or two sources list the same
            node.
    """
    documents: list[tuple[str, Document]] = []
    notes: list[str] = []
    for source in sources:
        found = read(source, cluster_id)
        if cluster_id and len(found.documents) > 1:
            raise InventoryError(
                source, "", f"one cluster to be called {cluster_id}, not {len(found.documents)}"
            )
        for document in found.documents:
            if not (cluster_id or document["id"]):
                raise InventoryError(source, "", "a name for its cluster; give --cluster-id NAME")
            documents.append((source, {**document, "id": cluster_id or document["id"]}))
        notes += found.notes
    return Inventory(tuple(combine(documents)), tuple(notes))


def read(source: str, cluster_id: str = "") -> Inventory:
    """Read one source.

    Args:
        source: A source, in a form that the package's docstring lists.
        cluster_id: Id for a cluster that the source does not name; empty: the name of the file; if
            the source is not a file, the id stays empty.

    Raises:
        InventoryError: The source cannot be read.
    """
    if source == MACHINE:
        return machine_inventory(source, cluster_id)
    if is_live(source):
        return live_inventory(source, cluster_id)
    kind, _, url = source.partition(":")
    if kind == RAY:
        return dashboard_inventory(source, url, cluster_id)
    text = _text(source)
    path = Path("stdin" if source == STDIN else source)
    if source != STDIN:
        cluster_id = cluster_id or plain_name(path)
    if text.lstrip()[:1] in {"{", "["}:
        return _json(str(path), text, cluster_id)
    table = nodes_in(path, io.StringIO(text, newline=""))
    if not table:  # With --replace, a table without machines would remove all nodes.
        raise InventoryError(str(path), "", "at least one machine below the header")
    return Inventory((trace_document(table, cluster_id),))


def _text(source: str) -> str:
    name = "stdin" if source == STDIN else source
    try:
        content = read_bounded(sys.stdin.buffer) if source == STDIN else read_file(Path(source))
    except OSError as error:
        named = f"`{STDIN}`, `{MACHINE}`, `{KUBERNETES}`, `{RAY}` or `{RAY}:URL`"
        expected = f"a file, {named} ({error.strerror})"
        raise InventoryError(name, "", expected) from error
    try:
        return decode_text(content)
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        expected = "text in UTF-8; a spreadsheet saves it as `CSV UTF-8`"
        raise InventoryError(name, f"line {line}", expected) from error


def _json(source: str, text: str, cluster_id: str) -> Inventory:
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        place = f"line {error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        raise InventoryError(source, place, f"valid JSON ({error})") from error
    if isinstance(value, dict) and value.get("kind") in KINDS:
        return kubernetes_inventory(source, value, cluster_id)
    if isinstance(value, dict) and isinstance(value.get("clusters"), list):
        return _documents(source, "clusters", value["clusters"])
    entries = value if isinstance(value, list) else [value]
    if entries and all(map(is_ray_node, entries)):
        return ray_inventory(source, entries, cluster_id)
    return _documents(source, "", entries)


def _refuse_constant(name: str) -> None:
    """Refuse NaN and Infinity, which Python accepts and JSON does not have."""
    raise ValueError(f"{name} is not JSON")


def _documents(source: str, place: str, entries: Sequence[JsonValue]) -> Inventory:
    """Return cluster documents as they are; the server checks all their fields."""
    if not entries:
        raise InventoryError(source, place, _FORMS)
    for number, entry in enumerate(entries):
        here = f"{place}[{number}]" if place or len(entries) > 1 else ""
        if not isinstance(entry, dict):
            raise InventoryError(source, here, f"an object; a source has {_FORMS}")
        cluster_id = entry.get("id")
        if not isinstance(cluster_id, str) or not cluster_id:
            expected = f"the id of a cluster (a text); a source has {_FORMS}"
            raise InventoryError(source, f"{here}.id".lstrip("."), expected)
    return Inventory(tuple(entries))
