"""Tests of the number of earlier fleets that one tenant, and all tenants, may compute at once."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from moorage.daemon.history.decisions import Decisions
from moorage.daemon.history.recalled_fleets import (
    RECALLS_MAX,
    RECALLS_OF_TENANT_MAX,
    RecalledFleets,
)
from moorage.model import Code, Tenant
from moorage.protocol.faults import ServiceError
from moorage.records.rights import Caller, Role
from tests.ledger.facts import opened


@pytest.fixture
async def fleets(tmp_path: Path) -> AsyncIterator[RecalledFleets]:
    ledger = await opened(tmp_path / "ledger.db")
    yield RecalledFleets(ledger, Decisions(ledger))
    await ledger.close()


def caller(name: str) -> Caller:
    return Caller(Tenant(name), Role.CLIENT)


async def recall(fleets: RecalledFleets, *tenants: str) -> list[object]:
    """Recall a fleet for each tenant at the same time; return the fleets or errors."""
    recalls = (fleets.at(1e9, caller(each)) for each in tenants)
    return await asyncio.gather(*recalls, return_exceptions=True)


def busy(outcomes: list[object]) -> list[str]:
    refused = [each for each in outcomes if isinstance(each, Exception)]
    assert all(isinstance(each, ServiceError) and each.code is Code.BUSY for each in refused)
    return [str(each) for each in refused]


@pytest.mark.parametrize("surplus", [1, 2, 100])
async def test_recalled_fleets_per_tenant_are_bounded(fleets: RecalledFleets, surplus: int) -> None:
    outcomes = await recall(fleets, *["ann"] * (RECALLS_OF_TENANT_MAX + surplus), "bob")
    assert busy(outcomes[-1:]) == []
    refused = busy(outcomes)
    assert len(refused) == surplus
    assert "of your tenant" in refused[0]
    assert busy(await recall(fleets, "ann")) == []  # The earlier ones are computed.


async def test_recalled_fleets_of_all_tenants_are_bounded(fleets: RecalledFleets) -> None:
    names = [f"tenant {number}" for number in range(RECALLS_MAX + 1)]
    refused = busy(await recall(fleets, *names))
    assert len(refused) == 1
    assert "wait here" in refused[0]


async def test_a_caller_that_leaves_frees_the_place_of_its_recalled_fleet(
    fleets: RecalledFleets,
) -> None:
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(fleets.at(1e9, caller("ann"))) for _ in range(RECALLS_OF_TENANT_MAX)
        ]
        await asyncio.sleep(0)
        assert len(busy(await recall(fleets, "ann"))) == 1
        for each in tasks:
            each.cancel()
    assert busy(await recall(fleets, "ann")) == []
