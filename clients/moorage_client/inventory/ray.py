"""Reads the nodes of a Ray cluster as a cluster document, from its dashboard or Ray's output.

The reader uses plain HTTP, so it needs no `ray` package of the cluster's version. As `ray list
nodes` does, it sends `GET /api/v0/nodes`; `GET /nodes?view=summary` adds the names and sizes of the
devices. For a cluster without a dashboard, it reads the output of `ray.nodes()` as JSON.

A node keeps Ray's own id, since Ray's node affinity needs that id; the node's name is a label.
"""

import json
import os
import re
from collections.abc import Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Final

from moorage.records.json_values import JsonMapping, JsonValue
from moorage_client.endpoint import Endpoint, check_token, setting
from moorage_client.inventory.documents import (
    MIB,
    Document,
    Inventory,
    InventoryError,
    cluster_document,
    device,
    node_document,
)

URL_DEFAULT: Final = "http://127.0.0.1:8265"
"""Default URL of the dashboard of `ray start --head`."""
NODES_MAX: Final = 10_000
"""Maximum nodes that Ray's API server returns (`RAY_MAX_LIMIT_FROM_API_SERVER`)."""
REPLY_BYTES_MAX: Final = 256 << 20
"""Maximum bytes of one reply of the dashboard, whose summary names each process of each node."""
SECONDS_MAX: Final = 30.0
"""Seconds for connecting, and for each wait for more of a reply."""

RACK_LABEL: Final = "rack"
ZONE_LABEL: Final = "ray.io/availability-zone"
NAME_LABEL: Final = "ray.io/node-name"

_MODEL: Final = re.compile(r"accelerator_type:(.+)")
_HUMAN: Final = re.compile(r"(\d+(?:\.\d+)?) (B|KiB|MiB|GiB|TiB)")
_UNITS: Final = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


def dashboard_inventory(source: str, url: str, cluster_id: str) -> Inventory:
    """Read the nodes of a Ray cluster from its dashboard.

    Args:
        source: The source's name in errors.
        url: URL of the dashboard; empty: Ray's default address on this machine.
        cluster_id: Id of the cluster, since Ray has none; empty: the caller chooses it.

    Raises:
        InventoryError: Nothing answers at the URL, or the answer is not that of a Ray dashboard.
        SettingRefused: No header can carry the cluster's token.
    """
    url = (url or URL_DEFAULT).rstrip("/")
    answer = _get(source, f"{url}/api/v0/nodes?detail=1&limit={NODES_MAX}")
    listed = answer.get("result")
    if not isinstance(listed, dict) or not isinstance(listed.get("result"), list):
        raise InventoryError(source, "data.result.result", "a list of nodes from Ray's API")
    summary = _get(source, f"{url}/nodes?view=summary").get("summary")
    if (listed.get("total") or 0) > len(listed["result"]):
        expected = f"at most {NODES_MAX} nodes, which is all that Ray lists, not {listed['total']}"
        raise InventoryError(source, "", expected)
    found = ray_inventory(source, listed["result"], cluster_id, summary or ())
    warning = listed.get("partial_failure_warning")
    return Inventory(
        found.documents, (*found.notes, *([f"{source}: {warning}"] if warning else []))
    )


def ray_inventory(
    source: str, nodes: Sequence[JsonValue], cluster_id: str, summary: Sequence[JsonValue] = ()
) -> Inventory:
    """Return the nodes of a Ray cluster as one cluster document; dead nodes are left out.

    Args:
        source: The source's name in errors.
        nodes: The nodes as `ray list nodes --detail --format json` or `ray.nodes()` prints them.
        cluster_id: Id of the cluster; empty: the caller chooses it.
        summary: The dashboard's measurements of the nodes, if there is a dashboard.

    Raises:
        InventoryError: No node is alive, or a field does not match Ray's documentation.
    """
    measured = {
        str(each["raylet"].get("nodeId")): each
        for each in summary
        if isinstance(each, dict) and isinstance(each.get("raylet"), dict)
    }
    documents, dead = [], 0
    for number, node in enumerate(nodes):
        if not isinstance(node, dict):
            raise InventoryError(source, f"[{number}]", "a node (an object)")
        if node.get("state", "ALIVE") != "ALIVE" or node.get("Alive", True) is not True:
            dead += 1
            continue
        documents.append(_node(source, f"[{number}].", node, measured))
    if not documents:  # With --replace, such a document would remove all nodes.
        raise InventoryError(source, "", f"at least one node that is alive ({dead} are dead)")
    found = cluster_document(cluster_id, documents, tag="ray", description="Nodes of a Ray cluster")
    return Inventory((found,), (f"{source}: left out {dead} dead nodes",) if dead else ())


def is_ray_node(value: JsonValue) -> bool:
    """Return whether a value looks like a node as Ray prints it."""
    return isinstance(value, dict) and ("resources_total" in value or "NodeManagerAddress" in value)


def _node(source: str, place: str, node: JsonMapping, measured: JsonMapping) -> Document:
    key = "node_id" if "node_id" in node else "NodeID"
    name = node.get(key)
    if not isinstance(name, str) or not name:
        raise InventoryError(source, place + key, "Ray's id of the node")
    key = "resources_total" if "resources_total" in node else "Resources"
    resources = node.get(key)
    if not isinstance(resources, dict):
        expected = "an object of resources; with `ray list nodes`, give --detail"
        raise InventoryError(source, place + key, expected)
    given = node.get("labels", node.get("Labels"))
    labels = {str(k): str(v) for k, v in given.items()} if isinstance(given, dict) else {}
    called = node.get("node_name", node.get("NodeName"))
    if isinstance(called, str) and called:
        labels[NAME_LABEL] = called

    def amount(resource: str) -> float:
        return _amount(source, f"{place}{key}.{resource}", resources.get(resource, 0))

    return node_document(
        name,
        cpu_milli=round(amount("CPU") * 1000),
        memory_mib=int(amount("memory") / MIB),
        devices=_devices(int(amount("GPU")), resources, measured.get(name) or {}),
        rack=labels.get(RACK_LABEL, ""),
        zone=labels.get(ZONE_LABEL, ""),
        labels=labels,
        provider_id=f"ray:{name}",  # Ray never uses an id twice.
    )


def _devices(count: int, resources: JsonMapping, measured: JsonMapping) -> list[Document]:
    """Return the devices that Ray schedules, with measured properties if Ray measured each one."""
    named = (found[1] for key in resources if (found := _MODEL.fullmatch(key)))
    model = next(named, "")
    seen = [each for each in measured.get("gpus") or () if isinstance(each, dict)]
    if len(seen) != count:  # Ray was started with another number, so devices cannot be matched.
        return [device(model) for _ in range(count)]
    return [
        device(
            str(each.get("name") or model),
            int(each.get("memoryTotal") or 0),
            uuid=str(each.get("uuid") or ""),
        )
        for each in seen
    ]


def _amount(source: str, place: str, value: JsonValue) -> float:
    """Return a number, also from the format of Ray's command line: `22.420 GiB`."""
    if isinstance(value, str) and (found := _HUMAN.fullmatch(value)):
        return float(found[1]) * _UNITS[found[2]]
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        raise InventoryError(source, place, f"a number, not {value!r}")
    return value


def _token() -> str:
    """Return the token from the places where Ray's tools look for it; "" without a token.

    Source: https://docs.ray.io/en/latest/ray-security/token-auth.html
    """
    if token := setting(None, "RAY_AUTH_TOKEN"):
        return token
    named = os.environ.get("RAY_AUTH_TOKEN_PATH")
    try:
        # `ray.init()` itself creates the file in the home folder.
        return Path(named or Path.home() / ".ray" / "auth_token").read_text().strip()
    except (OSError, RuntimeError, UnicodeDecodeError):  # RuntimeError: this user has no home.
        return ""


def _get(source: str, url: str) -> JsonMapping:
    """Return the `data` of a reply of the dashboard."""
    # Slow to import: readers of other inventory would wait.
    import requests  # noqa: PLC0415  # See above.

    from moorage_client.http_session import HttpSession  # noqa: PLC0415  # As above.

    session = HttpSession(Endpoint(url, check_token(_token(), "RAY_AUTH_TOKEN") or None))
    try:
        with session, session.get(url, timeout=SECONDS_MAX, stream=True) as response:
            content = bytearray()
            for chunk in response.iter_content(1 << 20):
                content += chunk
                if len(content) > REPLY_BYTES_MAX:
                    expected = f"a reply of at most {REPLY_BYTES_MAX} bytes from {url}"
                    raise InventoryError(source, "", expected)
    except requests.RequestException as error:
        hint = "give its dashboard as ray:http://HOST:8265"
        cause = session.failure(error).reason
        raise InventoryError(source, "", f"a Ray dashboard at {url}; {hint} ({cause})") from error
    try:
        reply = json.loads(content)
    except ValueError:
        reply = None
    if not isinstance(reply, dict) or not isinstance(reply.get("data"), dict):
        message = reply.get("msg") if isinstance(reply, dict) else None
        got = message or f"HTTP {response.status_code} {response.reason}"
        if response.status_code == HTTPStatus.UNAUTHORIZED:
            got += "; put the cluster's token into RAY_AUTH_TOKEN"
        raise InventoryError(source, "", f"Ray's answer to GET {url}, not: {got}")
    data: JsonMapping = reply["data"]
    return data
