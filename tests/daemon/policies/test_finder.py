"""Searches of several tenants take turns."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from moorage.catalog.allowances import Allowance
from moorage.catalog.opening import open_catalog
from moorage.catalog.ports import Catalog
from moorage.daemon.policies.finder import SEARCHES_WAITING_MAX, Finder
from moorage.daemon.requests.services import CatalogReader
from moorage.model import Code, Tenant
from moorage.policy import Fleet
from moorage.protocol.faults import ServiceError
from moorage.sandbox.host.sandbox import Sandbox
from moorage.storage.sqlite.records import SqliteRecords

EAST = {"matchType": "cluster", "filter": {"clusterQuery": {"id": "east"}}}


@pytest.fixture
async def finder(tmp_path: Path) -> AsyncIterator[Finder]:
    catalog: Catalog = await open_catalog(SqliteRecords(tmp_path / "catalog.db"))
    await catalog.clusters.create({"id": "east", "nodes": {"nodeData": []}})
    sandbox = Sandbox(fleet=Fleet(), services=CatalogReader(catalog), deliver=lambda _event: None)
    yield Finder(catalog, sandbox)
    await sandbox.close()
    await catalog.close()


async def test_a_flood_of_searches_neither_delays_nor_refuses_those_of_another_tenant(
    finder: Finder,
):
    def find(tenant: str) -> asyncio.Task[object]:
        return asyncio.ensure_future(finder.find("filter", EAST, Tenant(tenant), Allowance()))

    flood = [find("mallory") for _ in range(SEARCHES_WAITING_MAX + 9)]
    await asyncio.sleep(0)
    found = await finder.find("filter", EAST, Tenant("bob"), Allowance())
    assert found.ids == ["east"]
    assert sum(each.done() and not each.exception() for each in flood) < 9
    for each in flood[9:]:
        each.cancel()
    answers = await asyncio.gather(*flood, return_exceptions=True)
    refused = [each for each in answers if isinstance(each, ServiceError)]
    assert {each.code for each in refused} == {Code.BUSY}
