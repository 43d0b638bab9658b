"""`moored serve --here`: registers this machine, and publishes the shipped policies.

`daemon.main` calls `stock` in a thread before the daemon reports that it is ready. It
publishes policies as any client does.
"""

from pathlib import Path

import structlog

from moorage.backends.local import machine
from moorage.backends.local.machine import RegisteredNode
from moorage.config.settings import Config
from moorage.daemon.main import Register
from moorage.protocol.faults import ServiceError
from moorage_client.errors import MoorageError
from moorage_client.inventory import InventoryError
from moorage_client.inventory.this_machine import machine_inventory
from moorage_client.services import Services
from moorage_policies import catalog as shipped

log = structlog.get_logger("moored")


def stock(config: Config, url: str, token: str, register: Register) -> None:
    """Register this machine and publish missing policies; log failures."""
    registered: list[str] = []
    published: list[str] = []
    try:
        registered.append(_register(register, config.data_dir / "local"))
    except (InventoryError, ServiceError) as error:
        log.warning("here", finding=f"this machine could not be registered: {error}")
    with Services(url, token) as services:
        try:
            known = {each["policy_rule_uri"] for each in services.policies()}
            for document in map(shipped.document, shipped.shipped()):
                if (uri := document["policy_rule_uri"]) not in known:
                    services.publish_policy(document)
                    published.append(uri)
        except MoorageError as error:
            log.warning("here", finding=f"a shipped policy could not be published: {error}")
    log.info("here", registered=", ".join(registered), published=", ".join(published))


def _register(register: Register, folder: Path) -> str:
    """Register this machine, under its earlier name if it has one; return its node."""
    (document,) = machine_inventory("this machine", "").documents
    node = RegisteredNode(*register(document, machine.read_registration(folder)))
    machine.write_registration(folder, node)
    return "/".join(node)
