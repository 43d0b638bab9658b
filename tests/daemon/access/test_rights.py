"""Tests of the right that each message needs, and of the right to change a document, by owner."""

from contextlib import nullcontext
from functools import partial

import pytest

from moorage.catalog.opening import open_catalog
from moorage.catalog.ports import Catalog
from moorage.core.state.state import State
from moorage.daemon.access.rights import RIGHT_OF, Owners, Ownership
from moorage.model import Tenant
from moorage.protocol.faults import ServiceError
from moorage.records.rights import SERVER_ITSELF, Caller, Right, Role
from moorage.storage.sqlite.records import SqliteRecords

OWNERS = ("", "ann", "bob", SERVER_ITSELF)
MAY = {
    Role.AUTHOR: {"", "ann"},
    Role.OPERATOR: set(OWNERS),
    Role.ADMIN: set(OWNERS),
}
"""For each role that may change clusters: the owners whose clusters the tenant ann may change."""

NEEDED = {
    Right.PLACE: "AllocationRequest BlockRequest",
    Right.LEASE: "Cancel Flush Release Renew",
    Right.EXEC: "Exec Files",
    Right.POLICY: "Manage",
    Right.CORDON: "Cordon Drain ForgetMachine Uncordon",
    Right.RESERVE: "ReserveNodes UnreserveNodes",
    Right.QUOTA: "RemoveQuota SetQuota",
}
"""The messages that need more than the right to read."""


def test_each_message_that_changes_something_needs_its_right() -> None:
    named = {name: right for right, names in NEEDED.items() for name in names.split()}
    assert {k.__name__: right for k, right in RIGHT_OF.items() if right is not Right.READ} == named


def ownership(catalog: Catalog) -> Ownership:
    memory, blocks = catalog.memory, partial(catalog.blocks.owner, "block_metrics")
    owners = Owners(memory.owner, memory.metrics_owner, blocks, catalog.executors.owner)
    uris = catalog.memory.policy_uris
    return Ownership(State(), catalog.policies, catalog.aliases.find, owners, uris)


@pytest.mark.parametrize("role", MAY)
async def test_only_its_owner_and_operators_may_change_a_cluster(tmp_path, role):
    catalog = await open_catalog(SqliteRecords(tmp_path / "catalog.db"))
    owned = ownership(catalog)
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


@pytest.mark.parametrize("role", MAY)
async def test_only_owners_and_operators_may_change_metrics_blocks_and_executors(tmp_path, role):
    file = tmp_path / "catalog.db"
    catalog = await open_catalog(SqliteRecords(file))
    caller = Caller(Tenant("ann"), role)
    for number, owner in enumerate(OWNERS):
        await catalog.clusters.create({"id": f"c{number}", "nodes": {"nodeData": []}}, owner)
        await catalog.blocks.create({"id": f"b{number}"}, owner)
        await catalog.executors.create({"executor_id": f"e{number}"}, owner)
        await catalog.blocks.update("block", f"b{number}", {"cluster": {"id": "c0"}})
        await catalog.executors.update(f"e{number}", {"description": "new"})
    await catalog.close()
    catalog = await open_catalog(SqliteRecords(file))  # Owners survive a restart and changes.
    owned = ownership(catalog)
    for number, owner in enumerate(OWNERS):
        checks = (
            lambda n: owned.check_metrics(caller, f"c{n}"),
            lambda n: owned.check_block(caller, f"b{n}"),
            lambda n: owned.check_executor(caller, f"e{n}"),
        )
        for check in checks:
            with nullcontext() if owner in MAY[role] else pytest.raises(ServiceError) as refused:
                if (waiting := check(number)) is not None:
                    await waiting
            assert refused is None or refused.value.status == 403
    for unknown in (owned.check_metrics, owned.check_block):
        unknown(caller, "not registered")
    await catalog.close()
