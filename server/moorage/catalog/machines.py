"""Identifies the machines of registered nodes, so that no machine is registered twice.

The checks run in the store's thread, before a change is committed. The commit may fail, so before a
refusal the remembered cluster is looked up in the file.
"""

from typing import Final

from moorage.catalog.documents.clusters import (
    CheckedCluster,
    check_names,
    cluster_model,
    read_cluster_document,
)
from moorage.catalog.documents.encoding import decode
from moorage.catalog.embedded.store import Database
from moorage.core.state.identities import is_same_machine
from moorage.model import Cluster, ClusterId, Code, Node
from moorage.protocol.faults import ServiceError
from moorage.records.json_values import JsonValue
from moorage.records.rights import SERVER_ITSELF

_SPARE: Final = 1000
"""Removed clusters are dropped once memory has twice the existing clusters and this number."""


class Machines:
    """The machines of all nodes whose documents identify them."""

    def __init__(self) -> None:
        self._places: dict[str, tuple[str, str]] = {}
        self._keys: dict[str, list[str]] = {}

    def keep(self, cluster: Cluster) -> None:
        """Store the machines of a cluster, in place of the cluster's earlier machines."""
        for key in self._keys.pop(cluster.id, ()):
            if self._places[key][0] == cluster.id:
                del self._places[key]
        for node in cluster.nodes:
            for key in node.identity:
                if self._places.setdefault(key, (cluster.id, node.id)) == (cluster.id, node.id):
                    self._keys.setdefault(cluster.id, []).append(key)

    def read(self, database: Database, given: JsonValue) -> CheckedCluster:
        """Check the machines of a cluster document before it is stored.

        Raises:
            ServiceError: As in `read_cluster_document`; `conflict`: a node's machine is registered
            as another node.
        """
        read = read_cluster_document(given)
        check_names(read.cluster)
        own: dict[str, Node] = {}
        for number, node in enumerate(read.cluster.nodes):
            other, owner = self._other(database, read.cluster, node, own)
            if other:
                who = "" if owner in {"", database.tenant} else owner
                raise _twice(f"{read.id}/{node.id}", number, other, who)
            own |= dict.fromkeys(node.identity, node)
        self.keep(read.cluster)
        if len(self._keys) > 2 * database.count("cluster") + _SPARE:
            for former in [name for name in self._keys if not database.has("cluster", name)]:
                if former != read.id:
                    self.keep(Cluster(ClusterId(former), ()))
        return read

    def _other(
        self, database: Database, cluster: Cluster, node: Node, own: dict[str, Node]
    ) -> tuple[str, str]:
        """Return the other node of the same machine, as `cluster/node`, and its cluster's owner.

        Both texts are empty if no other node has the machine.
        """
        for key in node.identity:
            twin = own.get(key)
            if twin is not None and is_same_machine(node.identity, twin.identity):
                return f"{cluster.id}/{twin.id}", ""
            name, other = self._places.get(key, ("", ""))
            if name in {"", cluster.id}:
                continue  # The cluster's own former nodes do not count.
            row = database.get("cluster", name)
            known = cluster_model(decode(row.document)).nodes if row is not None else ()
            if row and any(is_same_machine(node.identity, each.identity) for each in known):
                return f"{name}/{other}", row.files.decode(errors="replace")
        return "", ""


def _twice(name: str, number: int, other: str, owner: str) -> ServiceError:
    """Return the refusal of a node whose machine is registered already.

    `owner` is the tenant that registered it; empty: the same tenant, or unknown.
    """
    cluster = other.partition("/")[0]
    move = f"take it out of {cluster} first"
    if owner:
        whose = "the server" if owner == SERVER_ITSELF else f"the tenant “{owner}”"
        move = f"ask an operator to take it out of {cluster} first, which belongs to {whose}"
    return ServiceError(
        Code.CONFLICT,
        f"nodes.nodeData[{number}]: {name} is the machine that is registered as {other} (the same"
        f" machineId, providerId or uuid of a device). To move it, {move};"
        " a copy of another machine's disk needs a machine id of its own",
        field=f"nodes.nodeData[{number}]",
        expected="a machine that no other node is",
        details={"node": name, "registered_as": other},
    )
