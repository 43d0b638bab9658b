"""`moored serve --here`: this machine in the registry, and the policies that ship in the store.

It is a client of the server that it fills, like any other: `daemon.main` calls it in a thread, with
the address of the HTTP side, before it says that it is ready.
"""

from typing import Any

import structlog

from moorage.config.settings import Config
from moorage_client.errors import MoorageError
from moorage_client.inventory import InventoryError, merged
from moorage_client.inventory.this_machine import machine_inventory
from moorage_client.services import Services
from moorage_policies import catalog as shipped

log = structlog.get_logger("moored")


def stock(config: Config, url: str) -> None:
    """Register and publish what is not there yet; say in the log what could not be.

    Args:
        config: Has a token, where one is needed.
        url: Of the server's HTTP side.

    """
    token = next(iter(config.tokens), "-")
    with Services(url, token) as services:
        try:
            for document in machine_inventory("this machine", "").documents:
                _register(services, document)
        except (InventoryError, MoorageError) as error:
            log.warning("here", finding=f"this machine is not registered: {error}")
        try:
            known = {each["policy_rule_uri"] for each in services.policies()}
            for document in map(shipped.document, shipped.shipped()):
                if document["policy_rule_uri"] not in known:
                    services.publish_policy(document)
        except MoorageError as error:
            log.warning("here", finding=f"a policy that ships is not published: {error}")


def _register(services: Services, document: dict[str, Any]) -> None:
    """Put this machine in, or again where it has been put in before."""
    known = services.clusters({"id": document["id"]})
    if known:
        services.replace_cluster(merged(known[0], document))
    else:
        services.create_cluster(document)
