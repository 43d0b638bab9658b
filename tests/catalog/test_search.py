"""Searches in the embedded catalog: filters, similarity, and results that follow every change."""

import asyncio

import pytest

from moorage.catalog.opening import open_catalog
from moorage.catalog.search import CHANGED_MAX, FEW, WAITING_MAX
from moorage.model import Code
from moorage.protocol.faults import ServiceError
from moorage.query import parse_filter
from moorage.storage.sqlite.records import SqliteRecords


def cluster(name, gpus=2, **more):
    return {"id": name, "gpus": {"count": gpus}, "nodes": {"nodeData": []}, **more}


def metrics(name, free):
    return {"clusterId": name, "nodes": [{"id": "n", "gpu": {"totalFreeMem": free}}]}


def gpus(least):
    return {"variable": "gpus.count", "operator": ">=", "value": least}


def free(least):
    return {"variable": "cluster.gpu.totalFreeMem", "operator": ">=", "value": str(least)}


def filter_of(**queries):
    return parse_filter({"matchType": "cluster", "filter": queries})


@pytest.fixture
async def catalog(tmp_path):
    catalog = await open_catalog(SqliteRecords(tmp_path / "catalog.db"))
    for name, count in (("c1", 1), ("c2", 2), ("c4", 4), ("c8", 8)):
        await catalog.clusters.create(
            cluster(name, count, status="draining" if count == 8 else "live")
        )
    for name, amount in (("c1", 10), ("c4", 40), ("nobody", 99)):
        await catalog.metrics.put(metrics(name, amount))
    yield catalog
    await catalog.close()


async def test_a_filter_finds_clusters_in_the_order_of_their_ids_live_or_not(catalog):
    assert await catalog.search.matching(filter_of(clusterQuery=gpus(2))) == ["c2", "c4", "c8"]
    assert await catalog.search.matching(filter_of()) == ["c1", "c2", "c4", "c8"]
    assert await catalog.search.matching(filter_of(clusterQuery=gpus(9))) == []
    assert [name for name in ("c1", "c8", "none") if catalog.memory.is_live(name)] == ["c1"]


async def test_a_search_finds_clusters_that_meet_both_conditions(catalog):
    both = filter_of(clusterQuery=gpus(2), clusterMetricsQuery=free(10))
    assert await catalog.search.matching(both) == ["c4"]
    assert await catalog.search.matching(filter_of(clusterMetricsQuery=free(10))) == ["c1", "c4"]
    # Metrics of unknown clusters find nothing, nor does a condition that no document meets.
    assert await catalog.search.matching(filter_of(clusterMetricsQuery=free(99))) == []
    assert (
        await catalog.search.matching(
            filter_of(clusterQuery=gpus(1), clusterMetricsQuery=free(100))
        )
        == []
    )


@pytest.mark.parametrize("least", [0, FEW - 1, FEW, FEW + 5])
async def test_clusters_and_metrics_are_intersected_for_any_number_of_hits(catalog, least):
    names = [f"n{number:04d}" for number in range(FEW + 10)]
    await asyncio.gather(*(catalog.clusters.create(cluster(n, int(n[1:]))) for n in names))
    await asyncio.gather(*(catalog.metrics.put(metrics(n, int(n[1:]) % 7)) for n in names))
    both = filter_of(clusterQuery=gpus(least), clusterMetricsQuery=free(6))
    expected = [n for n in names if int(n[1:]) >= least and int(n[1:]) % 7 == 6]
    expected = [n for n, least_free in (("c1", 1), ("c4", 4)) if least_free >= least] + expected
    assert await catalog.search.matching(both) == expected


async def test_a_search_sees_every_change_that_was_made_before_it(catalog):
    two = filter_of(clusterQuery=gpus(2))
    busy = filter_of(clusterMetricsQuery=free(10))
    assert await catalog.search.matching(two) == ["c2", "c4", "c8"]
    assert await catalog.search.matching(busy) == ["c1", "c4"]
    await catalog.clusters.create(cluster("c3", 3))
    await catalog.clusters.update("c2", {"$set": {"gpus.count": 1}})
    await catalog.clusters.delete("c4")
    assert await catalog.search.matching(two) == ["c3", "c8"]
    await catalog.metrics.update("c1", {"$set": {"cluster.gpu.totalFreeMem": 1}})
    await catalog.metrics.put(metrics("c2", 10))
    assert await catalog.search.matching(busy) == ["c2"]
    await catalog.metrics.delete("c2")
    assert await catalog.search.matching(busy) == []
    found = await catalog.clusters.query({"gpus.count": {"$gt": 1}})
    assert [document["id"] for document in found] == ["c3", "c8"]
    found = await catalog.metrics.query({"clusterId": {"$regex": "^c"}})
    assert [document["clusterId"] for document in found] == ["c1", "c4"]


async def test_a_search_sees_more_changes_than_the_buffer_holds(catalog):
    assert await catalog.search.matching(filter_of(clusterQuery=gpus(8))) == ["c8"]
    await catalog.clusters.delete("c8")
    for number in range(CHANGED_MAX + 1):  # As if so many clusters had changed.
        catalog.memory.index.note_change(f"gone-{number}")
    await catalog.clusters.create(cluster("c9", 9))
    assert await catalog.search.matching(filter_of(clusterQuery=gpus(4))) == ["c4", "c9"]


async def test_documents_are_found_after_a_restart(catalog, tmp_path):
    await catalog.close()
    again = await open_catalog(SqliteRecords(tmp_path / "catalog.db"))
    assert await again.search.matching(filter_of(clusterMetricsQuery=free(40))) == ["c4"]
    await again.close()


async def test_similarity_ranks_all_clusters_except_the_reference(catalog):
    assert await catalog.search.alike({"gpus": {"count": 3}}, None) == ["c2", "c4", "c1", "c8"]
    assert await catalog.search.alike("c4", {"gpus.count": 1}) == ["c2", "c1", "c8"]
    with pytest.raises(ServiceError) as refused:
        await catalog.search.alike("none", None)
    assert refused.value.field == "like"


async def test_a_search_returns_documents_as_stored_and_in_the_requested_order(catalog):
    found = catalog.memory.documents(["c4", "none", "c1"])
    assert [document["id"] for document in found] == ["c4", "c1"]
    assert found[0] is (await catalog.clusters.get("c4"))


async def test_too_many_searches_at_one_time_are_refused(catalog):
    results = await asyncio.gather(
        *(catalog.search.matching(filter_of(clusterQuery=gpus(2))) for _ in range(WAITING_MAX + 3)),
        return_exceptions=True,
    )
    refused = [each for each in results if isinstance(each, ServiceError)]
    assert [each.code for each in refused] == [Code.BUSY] * 3
    assert results.count(["c2", "c4", "c8"]) == WAITING_MAX
    assert await catalog.search.matching(filter_of(clusterQuery=gpus(8))) == ["c8"]


async def test_a_cancelled_search_loses_no_change(catalog):
    two = filter_of(clusterQuery=gpus(8))
    assert await catalog.search.matching(two) == ["c8"]
    await catalog.clusters.delete("c8")
    given_up = [asyncio.ensure_future(catalog.search.matching(two)) for _ in range(8)]
    await asyncio.sleep(0)
    for each in given_up:
        each.cancel()
    await asyncio.gather(*given_up, return_exceptions=True)
    assert await catalog.search.matching(two) == []


async def test_a_pattern_that_would_read_too_much_is_refused_with_its_place(catalog):
    for number in range(300):
        await catalog.metrics.put({"clusterId": f"m{number}", "text": "x" * (3_500 + number)})
    pattern = {"text": {"$regex": "[a-w][0-9]"}}
    with pytest.raises(ServiceError) as refused:
        await catalog.search.matching(filter_of(clusterMetricsQuery=pattern))
    assert refused.value.code is Code.TOO_LARGE
    assert refused.value.field == "filter.clusterMetricsQuery.text.$regex"


async def test_a_closed_catalog_refuses_searches(catalog):
    await catalog.close()
    with pytest.raises(ServiceError) as refused:
        await catalog.search.matching(filter_of())
    assert refused.value.code is Code.SHUTTING_DOWN


async def test_queries_of_one_id_are_answered_like_all_other_queries(catalog):
    await catalog.clusters.create(cluster("12"))
    for name, found in (("c2", ["c2"]), ("12", ["12"]), ("nobody", []), ("", [])):
        for query in ({"id": name}, {"id": {"$in": [name]}}, {"id": {"$eq": name}}):
            assert [each["id"] for each in await catalog.clusters.query(query)] == found
            both = {"$and": [query, {"gpus.count": 2}]}
            assert [each["id"] for each in await catalog.clusters.query(both)] == found
    measured = await catalog.metrics.query({"clusterId": "nobody"})
    assert [each["clusterId"] for each in measured] == ["nobody"]
    assert await catalog.metrics.query({"id": "nobody"}) == []
    await catalog.clusters.delete("c2")
    assert await catalog.clusters.query({"id": "c2"}) == []
