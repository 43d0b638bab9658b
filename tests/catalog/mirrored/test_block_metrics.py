"""Tests of block metrics of an external service: the requests, and the age of answers."""

import pytest
from faulty_service import FaultyService, answer, hang_up

from moorage.catalog.allowances import Allowance
from moorage.catalog.opening import External, open_catalog
from moorage.model import Code
from moorage.protocol.faults import ServiceError
from moorage.query import parse_filter
from moorage.storage.sqlite.records import SqliteRecords

BUSY = {"blockId": "busy", "instances": [{"latency": 90}]}
IDLE = {"blockId": "idle", "instances": [{"latency": 5}]}


@pytest.fixture
async def faulty():
    faulty = FaultyService()
    faulty.behave = answer({"success": True, "data": [BUSY, IDLE]})
    await faulty.start()
    yield faulty
    await faulty.stop()


@pytest.fixture
async def open_catalogs(tmp_path, faulty):
    """Open catalogs that have two equal blocks, and different bounds of age."""
    catalogs = []

    async def open_one(fresh_seconds=3600.0):
        external = External(
            block_metrics=faulty.url, timeout_seconds=0.5, metrics_fresh_seconds=fresh_seconds
        )
        path = tmp_path / f"{len(catalogs)}.db"
        catalog = await open_catalog(SqliteRecords(path), external=external)
        catalogs.append(catalog)
        for name in ("busy", "idle"):
            await catalog.blocks.create({"id": name})
        return catalog.blocks

    yield open_one
    for catalog in catalogs:
        await catalog.close()


async def slow_blocks(blocks):
    """Return what a filter by metrics finds, and the warnings."""
    request = parse_filter(
        {
            "matchType": "block",
            "filter": {
                "blockMetricsQuery": {
                    "variable": "instances.latency",
                    "operator": ">",
                    "value": 50,
                }
            },
        }
    )
    warnings = await blocks.fetch(Allowance())
    return await blocks.matching(request), warnings


async def test_metrics_are_read_once_and_read_again_when_they_are_too_old(faulty, open_catalogs):
    blocks = await open_catalogs()
    assert await slow_blocks(blocks) == (["busy"], [])
    faulty.behave = answer([IDLE])
    assert await slow_blocks(blocks) == (["busy"], [])
    assert [(each.method, each.path, each.body) for each in faulty.requests] == [
        ("POST", "/block/query", {})
    ]
    assert [each["metrics"] for each in blocks.documents(["busy", "idle"])] == [BUSY, IDLE]
    short = await open_catalogs(fresh_seconds=0.0)
    faulty.behave = answer([{**IDLE, "instances": [{"latency": 60}]}])
    assert await slow_blocks(short) == (["idle"], [])
    assert short.documents(["busy"])[0]["metrics"] == {}


async def test_a_failing_service_yields_no_metrics_and_a_warning(faulty, open_catalogs):
    blocks = await open_catalogs(fresh_seconds=0.0)
    assert (await slow_blocks(blocks))[0] == ["busy"]
    faulty.behave = hang_up
    found, [warning] = await slow_blocks(blocks)
    assert found == []
    assert warning.startswith("Block metrics could not be read and are null. The block metrics")
    assert faulty.url in warning
    with pytest.raises(ServiceError) as refused:
        await blocks.get("block_metrics", "busy")
    assert refused.value.code is Code.UNAVAILABLE
    assert (await blocks.get("block", "busy"))["id"] == "busy"
    spent = Allowance()
    while spent.spend():
        pass
    [warning] = await blocks.fetch(spent)
    assert "null" in warning


async def test_one_invalid_document_of_a_service_does_not_affect_other_documents(
    faulty, open_catalogs
):
    nested = 1
    for _ in range(70):
        nested = [nested]
    faulty.behave = answer(
        [
            IDLE,
            {"instances": []},
            7,
            {**BUSY, "deep": nested},
            {"blockId": "vast", "n": 10**30},
            IDLE,
        ]
    )
    blocks = await open_catalogs()
    found, [warning] = await slow_blocks(blocks)
    assert found == []
    assert warning.startswith("5 documents of block metrics cannot be used and count as none (")
    assert await blocks.query("block_metrics", {}) == [IDLE]


async def test_metrics_are_read_by_get_if_the_service_has_no_post(faulty, open_catalogs):
    async def behave(request, writer):
        reply = answer({}, 405) if request.method == "POST" else answer([BUSY])
        await reply(request, writer)

    faulty.behave = behave
    blocks = await open_catalogs()
    assert await blocks.get("block_metrics", "busy") == BUSY
    faulty.behave = answer({}, 405)
    with pytest.raises(ServiceError, match="neither POST nor GET at /block/query"):
        await (await open_catalogs()).get("block_metrics", "busy")


async def test_the_catalog_refuses_changes_of_documents_of_a_service(faulty, open_catalogs):
    blocks = await open_catalogs()
    for refused in (
        blocks.put_metrics(BUSY),
        blocks.update("block_metrics", "busy", {"instances": []}),
        blocks.delete("block_metrics", "busy"),
    ):
        with pytest.raises(ServiceError, match="reads its block metrics from") as error:
            await refused
        assert error.value.code is Code.UNSUPPORTED
    assert faulty.requests == []
