"""Finds the nodes of the inventory that stand for this machine, also by its former names.

A host name may change: by DHCP, after the first boot, or with each start of a container on the same
volume. So the backend's folder stores the names that this machine has had, and the node that
`moored serve --here` registered. `daemon` and `commands.here` are the callers.
"""

import platform
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from moorage.backends.local.workload_store import read, write
from moorage.model import Cluster, ClusterId
from moorage.protocol.cluster_documents import machine_key
from moorage.records.json_values import JsonObject

NAMES_MAX: Final = 16
"""Maximum names of this machine that are stored: the first one and the latest ones."""
_MACHINE_ID: Final = Path("/etc/machine-id")
_FILE: Final = "machine.json"


class RegisteredNode(NamedTuple):
    """The cluster and node that this machine was registered as."""

    cluster_id: str
    node_id: str


def this_node() -> str:
    """Return the name that this machine has in an inventory."""
    return platform.node() or "localhost"


def names_of(root: Path, inventory: Iterable[Cluster]) -> Sequence[str]:
    """Return the ids of the nodes that stand for this machine, and store its present name.

    Args:
        root: Folder of the backend.
        inventory: All clusters. If the folder stores no names yet, the nodes with this machine's
            id are taken.
    """
    known = _read(root)
    names = known.get("names")
    if names is None:
        key = _machine_key()
        nodes = (node for cluster in inventory for node in cluster.nodes)
        names = [node.id for node in nodes if key and f"machine {key}" in node.identity]
    names = list(dict.fromkeys((*names, this_node())))
    names = [*names[:1], *names[1:][1 - NAMES_MAX :]]
    if names != known.get("names"):
        _write(root, known | {"names": names})
    node = read_registration(root)
    return tuple(dict.fromkeys((*names, *([node.node_id] if node else ()), "localhost")))


def read_registration(root: Path) -> RegisteredNode | None:
    """Return the node that this machine was registered as; None if it was not registered."""
    node = _read(root).get("registered")
    return None if node is None else RegisteredNode(*node)


def place_of(root: Path, inventory: Mapping[ClusterId, Cluster]) -> RegisteredNode | None:
    """Return the inventory's node for this machine; None if this machine is not registered.

    Args:
        root: Folder of the backend. If it has no registration, the machine's id finds the node.
        inventory: All clusters.
    """
    noted, key = read_registration(root), f"machine {_machine_key()}"
    if noted is not None:
        cluster = inventory.get(ClusterId(noted.cluster_id))
        nodes = () if cluster is None else cluster.nodes
        return noted if any(each.id == noted.node_id for each in nodes) else None
    for cluster in inventory.values():
        for node in cluster.nodes:
            if key in node.identity:
                return RegisteredNode(cluster.id, node.id)
    return None


def write_registration(root: Path, node: RegisteredNode) -> None:
    """Store the node that this machine was registered as."""
    if read_registration(root) != node:
        _write(root, _read(root) | {"registered": [*node]})


def _machine_key() -> str:
    try:
        return machine_key(_MACHINE_ID.read_text(encoding="ascii").partition("\n")[0])
    except (OSError, ValueError):
        return ""  # E.g. in most containers.


def _read(root: Path) -> JsonObject:
    return read(root / _FILE) or {}


def _write(root: Path, known: JsonObject) -> None:
    root.mkdir(parents=True, exist_ok=True, mode=0o700)
    write(root / _FILE, known)
