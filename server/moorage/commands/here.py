"""`moored serve --here`: register this machine, and publish the policies that ship.

It is a client of the server that it fills, like any other: `daemon.main` calls it in a thread, with
the address of the HTTP side, before it says that it is ready.
"""

from pathlib import Path

import structlog

from moorage.backends.local import machine
from moorage.backends.local.machine import RegisteredNode
from moorage.config.settings import Config
from moorage.records.json_values import JsonObject
from moorage_client.errors import MoorageError
from moorage_client.inventory import InventoryError
from moorage_client.inventory.documents import nodes_of
from moorage_client.inventory.this_machine import machine_inventory
from moorage_client.services import Services
from moorage_policies import catalog as shipped

log = structlog.get_logger("moored")


def stock(config: Config, url: str, token: str) -> None:
    """Register and publish the missing documents; log those that fail.

    Args:
        config: Has the data folder.
        url: Of the server's HTTP side.
        token: That of the server itself: others may have leases on this machine.
    """
    registered: list[str] = []
    published: list[str] = []
    with Services(url, token) as services:
        try:
            (document,) = machine_inventory("this machine", "").documents
            registered.append(_register(services, document, config.data_dir / "local"))
        except (InventoryError, MoorageError) as error:
            log.warning("here", finding=f"this machine is not registered: {error}")
        try:
            known = {each["policy_rule_uri"] for each in services.policies()}
            for document in map(shipped.document, shipped.shipped()):
                if (uri := document["policy_rule_uri"]) not in known:
                    services.publish_policy(document)
                    published.append(uri)
        except MoorageError as error:
            log.warning("here", finding=f"a policy that ships is not published: {error}")
    log.info("here", registered=", ".join(registered), published=", ".join(published))


def _register(services: Services, document: JsonObject, folder: Path) -> str:
    """Register this machine, under its earlier name if there is one; return its node."""
    (node,) = document["nodes"]["nodeData"]
    before = _node_before(services, document["id"], node, machine.read_registration(folder))
    if before is not None:
        document = {**document, "id": before.cluster_id}
        node["id"] = before.node_id
    services.add_nodes(document)
    machine.write_registration(folder, RegisteredNode(document["id"], node["id"]))
    return f"{document['id']}/{node['id']}"


def _node_before(
    services: Services, name: str, node: JsonObject, noted: RegisteredNode | None
) -> RegisteredNode | None:
    """Return the registered node of this machine; None if there is none.

    The folder's own note goes before the machine id, which copies of one disk share.
    """
    clusters = services.clusters()
    nodes = {
        RegisteredNode(cluster["id"], str(each.get("id"))): each
        for cluster in clusters
        for each in nodes_of(cluster)
    }
    if noted in nodes:
        return noted
    if any(cluster["id"] == name for cluster in clusters) or not node.get("machineId"):
        return None
    same = (place for place, each in nodes.items() if each.get("machineId") == node["machineId"])
    return next(same, None)
