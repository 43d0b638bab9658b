"""Tests of the document cache of a cell: stored and prefetched documents, and changes."""

import asyncio

import msgspec
import pytest

from moorage.model import Tenant
from moorage.sandbox.cell.document_cache import DocumentCache
from moorage.sandbox.host.sandbox import Limits
from moorage.sandbox.wire import frames
from moorage.sandbox.wire.limits import (
    AHEAD_BYTES_MIN,
    KEPT_BYTES_MAX,
    KEPT_ENTRY_BYTES,
    NEWS_MAX,
    STALE_MAX,
)

READ = """
client = self.settings["cluster_client"]
return [client.read_cluster(each)[1] for each in input_data["inputs"]["read"]]
"""
LOOP = """
data = input_data["cluster_data"]
return [data[each]["data"]["version"] for each in data]
"""


class Site:
    """A sandbox over a registry that has all documents in memory."""

    def __init__(self, bench):
        self.bench = bench
        self.ids = bench.fleet.cluster_ids
        for name in self.ids:
            self.bench.registry.packed[name] = _document(name, 1)

    def change(self, name, version, size=0):
        self.bench.registry.packed[name] = _document(name, version, size)
        self.bench.registry.versions[name] = version
        self.bench.sandbox.drop_documents(name)

    def delete(self, name):
        del self.bench.registry.packed[name]
        self.bench.registry.gone.append(name)
        self.bench.sandbox.drop_documents(name)

    async def read(self, names, **fields):
        """Return the versions that a policy read, and the number of calls."""
        before = self.calls
        value = await self.bench.value(self.bench.policy(READ), {"read": list(names)}, **fields)
        found = [each["version"] if isinstance(each, dict) else each for each in value]
        return found, self.calls - before

    @property
    def calls(self):
        return self.bench.sandbox.report().counters.get("calls", 0)


def _document(name, version, size=0):
    return msgspec.msgpack.encode({"id": name, "version": version, "filler": "x" * size})


@pytest.fixture
def make_site(make_bench):
    async def make(clusters=40, **options):
        return Site(await make_bench(clusters=clusters, **options))

    return make


async def test_the_host_sends_the_next_documents_before_they_are_requested(make_site):
    site = await make_site()
    assert await site.read(site.ids) == ([1] * 40, 2)  # Calls for 1 + 16, then for 32.
    assert await site.read(reversed(site.ids)) == ([1] * 40, 0)


async def test_all_documents_are_sent_soon_whatever_the_order_of_reading(make_site):
    site = await make_site()
    assert await site.read([site.ids[20]]) == ([1], 1)
    assert await site.read([site.ids[36], site.ids[21], site.ids[30]]) == ([1] * 3, 0)
    assert await site.read([site.ids[37], site.ids[39]]) == ([1] * 2, 1)
    assert await site.read([site.ids[13]]) == ([1], 0)  # The host continued at the first document.
    assert await site.read([site.ids[14], site.ids[19]]) == ([1] * 2, 1)


async def test_the_second_of_two_evaluations_sees_a_change_between_them(make_site):
    site = await make_site()
    first, second, third = site.ids[:3]
    assert await site.read([first]) == ([1], 1)
    site.change(first, 2)  # The policy has read it.
    site.change(second, 2)  # The host sent it ahead.
    site.delete(third)  # The host sent it ahead.
    found, calls = await site.read([first, second])
    assert (found, calls) == ([2, 2], 0)  # The request carries the changes.
    assert await site.read([third, third]) == (["HTTP error occurred: 404 Not Found"] * 2, 2)
    site.bench.registry.gone.clear()
    site.change(third, 3)
    assert await site.read([third]) == ([3], 1)


async def test_an_unknown_cluster_is_fetched_each_time_until_it_exists(make_site):
    site = await make_site()
    site.bench.registry.gone.append("later")
    assert await site.read(["later", "later"]) == (["HTTP error occurred: 404 Not Found"] * 2, 2)
    site.bench.registry.gone.clear()
    site.change("later", 7)
    assert await site.read(["later", "later"]) == ([7, 7], 1)


async def test_documents_in_the_cache_of_a_cell_are_as_new_as_the_hosts_last_answer(make_site):
    site = await make_site(3)
    first, second, third = site.ids
    code = site.bench.policy(f"""
client = self.settings["cluster_client"]
out = [client.read_cluster({first!r})[1]["version"]]
client.execute_query({{}})
for name in ({first!r}, {second!r}, {third!r}):
    ok, said = client.read_cluster(name)
    out.append(said["version"] if ok else said)
return out
""")
    site.bench.registry.hold = asyncio.Event()
    running = site.bench.ask(code)
    await asyncio.wait_for(site.bench.registry.called.wait(), 60)
    site.change(first, 2)  # This evaluation has read it.
    site.change(second, 2)  # The host sent it ahead.
    in_pipe = site.bench.ask(code)
    await site.read([first])  # In another cell; the earlier request is in the pipe now.
    site.change(first, 3)
    site.delete(third)
    site.bench.registry.hold.set()
    gone = "HTTP error occurred: 404 Not Found"
    assert (await running).value == [1, 3, 2, gone]
    assert (await in_pipe).value == [3, 3, 2, gone]


async def test_many_changes_clear_the_cells_cache(make_site):
    site = await make_site(STALE_MAX + 10)
    await site.read(site.ids)
    for name in site.ids:
        site.change(name, 2)
    found, calls = await site.read(site.ids[: STALE_MAX // 2])
    assert found == [2] * (STALE_MAX // 2)
    assert calls == 4
    for name in site.ids[:NEWS_MAX]:
        site.change(name, 3)
    assert await site.read(site.ids[:NEWS_MAX]) == ([3] * NEWS_MAX, 0)


async def test_only_tenants_that_share_a_cell_share_cached_documents(make_site):
    site = await make_site()
    await site.read(site.ids[:1], tenant=Tenant("a"))
    site.change(site.ids[1], 2)
    assert await site.read(site.ids[:3], tenant=Tenant("b")) == ([1, 2, 1], 0)
    apart = await make_site(isolation="per_tenant")
    await apart.read(apart.ids[:1], tenant=Tenant("a"))
    apart.change(apart.ids[1], 2)
    assert await apart.read(apart.ids[:3], tenant=Tenant("b")) == ([1, 2, 1], 1)
    assert await apart.read(apart.ids[:3], tenant=Tenant("a")) == ([1, 2, 1], 0)


async def test_the_host_sends_documents_of_candidates_in_order_and_no_other_documents(make_site):
    site = await make_site()
    chosen = (site.ids[30], site.ids[5], site.ids[7])
    assert await site.read(chosen, candidates=chosen) == ([1] * 3, 1)
    assert await site.read([site.ids[6]], candidates=chosen) == ([1], 1)  # It is no candidate.
    assert await site.read([site.ids[31]], candidates=chosen) == ([1], 1)


async def test_large_documents_are_not_sent_ahead(make_site):
    site = await make_site(4)
    for name in site.ids:
        site.change(name, 1, AHEAD_BYTES_MIN * 8)
    assert await site.read(site.ids) == ([1] * 4, 4)
    site.change(site.ids[0], 2, AHEAD_BYTES_MIN * 8)
    assert await site.read(site.ids) == ([2, 1, 1, 1], 1)


async def test_a_loop_over_cluster_data_makes_few_calls(make_site):
    site = await make_site()
    code = site.bench.policy(LOOP)
    assert await site.bench.value(code) == [1] * 40
    assert site.calls == 2
    assert sorted(site.bench.registry.fetched) == sorted(site.ids)
    site.change(site.ids[7], 2)
    assert await site.bench.value(code) == [2 if name == site.ids[7] else 1 for name in site.ids]
    assert site.calls == 2
    site.bench.registry.packed.clear()
    three = site.ids[:3]
    assert await site.bench.value(code, candidates=three) == [1] * 3


async def test_the_host_prefetches_documents_only_for_consultations(make_site):
    limits = Limits(calls_max=2, calls_per_candidate_max=0, evaluation_seconds=20.0)
    site = await make_site(limits=limits)
    given = {"inputs": {"read": site.ids[:3]}}
    code = site.bench.policy(READ)
    for _ in range(2):
        value = await site.bench.sandbox.evaluate(
            code, Tenant("t"), given, parameters={}, settings={}
        )
        assert [isinstance(each, dict) for each in value] == [True, True, False]
        assert await site.read(site.ids[:3]) in (([1] * 3, 1), ([1] * 3, 0))


# The cache in the cell ---------------------------------------------------------------------------


def test_the_cache_of_a_cell_is_bounded_in_bytes_and_drops_old_documents_for_new_documents():
    cache = DocumentCache()
    size = 1 << 20
    many = {f"c{number}": bytes(size) for number in range(KEPT_BYTES_MAX // size + 3)}
    room = KEPT_BYTES_MAX // (size + KEPT_ENTRY_BYTES)
    assert list(cache.keep("documents", many)) == list(many)[room:]  # The first fit.
    assert cache.find("documents", "c0") == many["c0"]
    cache.forget(tuple(many))
    assert cache.find("documents", "c0") is None
    assert len(cache.keep("documents", many)) == len(many) - room
    cache.forget(None)
    assert len(cache.keep("read_cluster", many)) == len(many) - room
    small = DocumentCache(10 * KEPT_ENTRY_BYTES)
    assert len(small.keep("get_cluster", {str(number): b"" for number in range(16)})) == 6


def test_a_document_too_large_for_the_cache_can_be_read_once():
    cache = DocumentCache(0)
    ids = tuple(f"c{number:02}" for number in range(100))
    cache.begin(lambda: ids)
    ahead = cache.ahead("read_cluster", ids[0])
    assert ahead == ids[1:17]
    cache.obey(frames.KeepDocuments((), "read_cluster", dict.fromkeys(ahead, b"1")))
    assert [cache.find("read_cluster", name) for name in ahead] == [b"1"] * 16
    assert cache.find("read_cluster", ahead[0]) is None
    further = cache.ahead("read_cluster", ids[17])
    assert further == ids[18:50]
    cache.obey(frames.KeepDocuments((), "read_cluster", dict.fromkeys(further, b"1")))
    cache.forget(further[:1])
    assert cache.find("read_cluster", further[0]) is None
    # The policy reads in another order, and does not need it.
    assert cache.ahead("read_cluster", ids[90]) == ()
    assert cache.ahead("documents", ids[98]) == (ids[99], *ids[:15])


def test_documents_are_requested_ahead_in_growing_batches():
    cache = DocumentCache()
    ids = tuple(f"c{number:03}" for number in range(1000))
    cache.begin(lambda: ids)
    counts = []
    for name in ids[:6]:
        ahead = cache.ahead("get_cluster", name)
        cache.came("get_cluster", ahead)
        counts.append(len(ahead))
    assert counts == [16, 32, 64, 128, 256, 0]
    cache.begin(lambda: ids)
    assert len(cache.ahead("get_cluster", ids[0])) == 16


def test_a_cell_drops_stale_documents_before_it_stores_new_documents():
    cache = DocumentCache()
    cache.keep("read_cluster", {"a": b"1", "b": b"1"})
    cache.keep("documents", {"a": b"1"})
    cache.obey(frames.KeepDocuments(("a",), "read_cluster", {"a": b"2", "c": b"2"}))
    assert [cache.find("read_cluster", name) for name in "abc"] == [b"2", b"1", b"2"]
    assert cache.find("documents", "a") is None
    cache.obey(frames.KeepDocuments(None, "", {}))
    assert cache.find("read_cluster", "b") is None
