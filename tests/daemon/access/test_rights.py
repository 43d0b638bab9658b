"""Who may change a cluster, by its owner and the caller's role."""

import pytest

from moorage.catalog.opening import open_catalog
from moorage.core.state.state import State
from moorage.daemon.access.rights import Ownership
from moorage.model import Tenant
from moorage.protocol.faults import ServiceError
from moorage.records.rights import SERVER_ITSELF, Caller, Role
from moorage.storage.sqlite.records import SqliteRecords

OWNERS = ("", "ann", "bob", SERVER_ITSELF)
MAY = {
    Role.AUTHOR: {"", "ann"},
    Role.OPERATOR: set(OWNERS),
    Role.ADMIN: set(OWNERS),
}
"""Whose clusters each role of the tenant ann may change that may change any at all."""


@pytest.mark.parametrize("role", MAY)
async def test_a_cluster_is_changed_by_its_owner_and_operators(tmp_path, role):
    catalog = await open_catalog(SqliteRecords(tmp_path / "catalog.db"))
    memory = catalog.memory
    owned = Ownership(
        State(), catalog.policies, catalog.aliases.find, memory.owner, memory.policy_uris
    )
    caller = Caller(Tenant("ann"), role)
    for number, owner in enumerate(OWNERS):
        await catalog.clusters.create({"id": f"c{number}", "nodes": {"nodeData": []}}, owner)
        if owner in MAY[role]:
            owned.check_cluster(caller, f"c{number}")
        else:
            said = "the server maintains" if owner == SERVER_ITSELF else f"the tenant “{owner}”"
            with pytest.raises(ServiceError, match=said) as refused:
                owned.check_cluster(caller, f"c{number}")
            assert refused.value.status == 403
        owned.check_new_cluster(caller, "new")
    await catalog.close()
