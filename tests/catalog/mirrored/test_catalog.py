"""Tests of a catalog that mirrors external services over sockets, and of the age of its data."""

import asyncio
import contextlib
import re

import msgspec
import pytest
from faulty_service import FaultyService, answer, hang_up, silence

from moorage.catalog.allowances import Allowance
from moorage.catalog.changes import (
    ClusterDeleted,
    ClusterPut,
    ClustersListed,
    MetricsDeleted,
    MetricsPut,
    PolicyDeleted,
    PolicyPut,
)
from moorage.catalog.opening import External, open_catalog
from moorage.model import Code
from moorage.protocol.faults import ServiceError
from moorage.storage.sqlite.records import SqliteRecords
from tests.waiting import async_until as until

POLICY = "class AIOSv1PolicyRule:\n    pass\n"
URI = "first:1.0-beta"


def cluster(name, gpus=2, **more):
    node = {"id": "n", "gpus": {"count": gpus}, "vcpus": {"count": 4}, "memory": 1024}
    return {"id": name, "nodes": {"nodeData": [node]}, **more}


def metrics(name, free=5):
    return {"clusterId": name, "nodes": [{"id": "n", "gpu": {"totalFreeMem": free}}]}


class Site(FaultyService):
    """All four services of a site, each with correct answers."""

    def __init__(self):
        super().__init__()
        self.clusters = {}
        self.metrics = {}
        self.policies = {}
        self.found = []
        self.by_path = {
            "/clusters/query": self.answer_clusters,
            "/cluster/query": self.answer_metrics,
            "/api/no-ir/filter": self.answer_search,
        }
        self.behave = self.answer_policy

    async def answer_clusters(self, request, writer):
        wanted = request.body["query"].get("id", {}).get("$in", list(self.clusters))
        await answer([self.clusters[n] for n in wanted if n in self.clusters])(request, writer)

    async def answer_metrics(self, request, writer):
        wanted = request.body["clusterId"]["$in"]
        found = [self.metrics[name] for name in wanted if name in self.metrics]
        await answer({"success": True, "data": found})(request, writer)

    async def answer_policy(self, request, writer):
        document = self.policies.get(request.path.removeprefix("/policy/"))
        known = answer({"success": True, "data": document}, etag=f'"{hash(str(document))}"')
        if document and request.headers.get("if-none-match") == f'"{hash(str(document))}"':
            known = answer("", 304)
        none = answer({"success": False, "message": "no such policy"}, 404)
        await (known if document else none)(request, writer)

    async def answer_search(self, request, writer):
        await answer({"success": True, "data": self.found})(request, writer)


@pytest.fixture
async def site():
    site = Site()
    site.clusters = {name: cluster(name) for name in ("a", "b")}
    site.metrics = {name: metrics(name) for name in ("a", "b")}
    site.policies = {URI: {"policy_rule_uri": URI, "code": POLICY}}
    await site.start()
    yield site
    await site.stop()


class Opened:
    """Opens mixed catalogs, closes them at the end, and collects their reports."""

    def __init__(self, path):
        self.path = path
        self.changes = []
        self.heard = asyncio.Event()
        self.catalogs = []
        self.tasks = []
        self.examined = []
        self.says = ""
        self.cells = asyncio.Semaphore(9)

    async def examine(self, record):
        await self.cells.acquire()
        self.examined.append(record)
        if isinstance(self.says, ServiceError):
            raise self.says
        return self.says

    def hear(self, change):
        self.changes.append(change)
        self.heard.set()

    async def until(self, kind):
        """Wait for the first change of a kind, and return it."""
        async with asyncio.timeout(60):
            while not (found := [each for each in self.changes if isinstance(each, kind)]):
                self.heard.clear()
                await self.heard.wait()
        return found[0]

    async def open(self, site, parts="clusters metrics policies search", follow=True, **more):
        external = External(
            **dict.fromkeys(parts.split(), site.url),
            **{"timeout_seconds": 1.0, "cluster_refresh_seconds": 3600.0, **more},
        )
        path = self.path / f"{len(self.catalogs)}.db"
        catalog = await open_catalog(SqliteRecords(path), external=external)
        self.catalogs.append(catalog)
        if follow:
            catalog.memory.listeners.insert(0, self.hear)
            keeping = catalog.freshness.keep_fresh(self.examine)
            self.tasks.append(asyncio.create_task(keeping))
            await asyncio.sleep(0)
        return catalog

    async def close(self):
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        for catalog in self.catalogs:
            await catalog.close()


@pytest.fixture
async def open_place(tmp_path):
    opened = Opened(tmp_path)
    yield opened
    await opened.close()


@contextlib.asynccontextmanager
async def expect_refusal(code):
    with pytest.raises(ServiceError) as caught:
        async with asyncio.timeout(20):
            yield caught
    assert caught.value.code is code


async def reply(catalog):
    """Wait for warnings in answers to a policy's requests, within the time limit; return them."""
    for _ in range(2_000):
        if warnings := await have(catalog, ()):
            return warnings
        await asyncio.sleep(0.01)  # As below.
    raise AssertionError("no warning came within the time limit")


def read(catalog, name):
    ((_, version, blob),) = catalog.memory.blobs([name])
    return version, msgspec.msgpack.decode(blob)


async def have(catalog, names=None, uri=URI):
    """Return the warnings of a request whose data can be read."""
    warnings = catalog.freshness.at_hand(uri, names)
    return await catalog.freshness.fetch(uri, names, Allowance()) if warnings is None else warnings


# An ask and its requests -------------------------------------------------------------------------


async def test_a_request_causes_two_queries_and_the_next_request_causes_no_query(site, open_place):
    names = [f"c{number:04}" for number in range(300)]
    site.clusters = {name: cluster(name) for name in names}
    site.metrics = {name: metrics(name) for name in names}
    catalog = await open_place.open(site)
    assert [each.path for each in site.requests] == ["/clusters/query"]  # The start reads the list.
    site.requests.clear()
    assert await have(catalog) == []
    assert [each.path for each in site.requests] == [f"/policy/{URI}", "/cluster/query"]
    assert catalog.memory.policy(URI).files == {"function.py": POLICY.encode()}
    assert read(catalog, "c0299")[1]["cluster_metrics"]["cluster"]["gpu"] == {"totalFreeMem": 5}
    for named in (None, names, names[:3]):
        assert catalog.freshness.at_hand(URI, named) == []
    assert len(site.requests) == 2


async def test_clusters_that_are_not_known_yet_are_looked_up_in_bulk(site, open_place):
    catalog = await open_place.open(site)
    await have(catalog)
    late = [f"late{number}" for number in range(50)]
    site.clusters |= {name: cluster(name) for name in late}
    site.requests.clear()
    assert await have(catalog, ["a", *late, "nowhere", "../../admin"]) == []
    assert [each.path for each in site.requests] == ["/clusters/query", "/cluster/query"]
    assert site.requests[0].body == {"query": {"id": {"$in": sorted([*late, "nowhere"])}}}
    assert catalog.memory.knows("late49")
    assert not catalog.memory.knows("nowhere")
    assert {each.cluster.id for each in open_place.changes if isinstance(each, ClusterPut)} == {
        *late
    }


async def test_simultaneous_requests_share_their_queries(site, open_place):
    catalog = await open_place.open(site)
    site.requests.clear()
    async with asyncio.timeout(20):
        assert await asyncio.gather(*(have(catalog) for _ in range(100))) == [[]] * 100
    # One query of each kind; a second one for requests that came during the first.
    assert site.count("/policy") <= 2
    assert site.count("/cluster/query") <= 2


async def test_a_cancelled_caller_does_not_disturb_callers_that_share_its_query(site, open_place):
    catalog = await open_place.open(site, "metrics clusters")
    first = asyncio.create_task(catalog.freshness.fetch(URI, None, Allowance()))
    second = asyncio.create_task(catalog.freshness.fetch(URI, None, Allowance()))
    await asyncio.sleep(0)
    first.cancel()
    assert await second == []
    assert read(catalog, "a")[1]["cluster_metrics"]


# Parts -------------------------------------------------------------------------------------------

PARTS = ["clusters", "metrics", "policies", "clusters metrics", "metrics policies search"]


@pytest.mark.parametrize("parts", PARTS)
async def test_each_part_of_the_catalog_may_be_external_or_embedded(site, open_place, parts):
    catalog = await open_place.open(site, parts)
    document = {"policy_rule_uri": URI, "code": POLICY}
    writes = {
        "clusters": lambda: catalog.clusters.create(cluster("a")),
        "metrics": lambda: catalog.metrics.put(metrics("a")),
        "policies": lambda: store(catalog, document),
    }
    for part, write in writes.items():
        if part in parts:
            async with expect_refusal(Code.UNSUPPORTED) as caught:
                await write()
            assert site.url in caught.value.reason
        else:
            await write()
    assert await have(catalog, ["a"]) == []
    _, found = read(catalog, "a")
    assert found["data"]["id"] == "a"
    assert found["cluster_metrics"]["clusterId"] == "a"
    assert catalog.memory.policy(URI).ref.uri == URI
    assert (await catalog.clusters.get("a"))["id"] == "a"
    # Only the source knows whether a mirrored document is current.
    assert (not catalog.memory.packed("cluster", ["a"])) is ("clusters" in parts)
    assert (not catalog.memory.packed("metrics", ["a"])) is ("metrics" in parts)
    assert (await catalog.metrics.get("a"))["clusterId"] == "a"
    assert (await catalog.policies.get(URI))["policy_rule_uri"] == URI
    assert [each["id"] for each in await catalog.clusters.query({"id": "a"})] == ["a"]
    assert (await catalog.search.ask("filter", {"x": 1}, Allowance()) is None) is (
        "search" not in parts
    )


async def store(catalog, document):
    return await catalog.policies.register(await catalog.policies.prepare(document))


async def test_mirrored_parts_refuse_every_write(site, open_place):
    catalog = await open_place.open(site)
    for writing in (
        catalog.clusters.update("a", {}),
        catalog.clusters.delete("a"),
        catalog.metrics.update("a", {}),
        catalog.metrics.delete("a"),
        catalog.policies.update(URI, {}),
        catalog.policies.delete(URI),
    ):
        async with expect_refusal(Code.UNSUPPORTED):
            await writing


async def test_an_external_service_hides_embedded_documents(site, open_place, tmp_path):
    catalog = await open_place.open(site, "search")
    await catalog.clusters.create(cluster("old"))
    await catalog.close()
    open_place.catalogs.clear()
    catalog = await open_place.open(site, "clusters")
    assert catalog.memory.live_ids() == ("a", "b")


# The registry ------------------------------------------------------------------------------------


async def test_changes_of_the_registry_are_followed(site, open_place):
    site.clusters["asleep"] = cluster("asleep", status="maintenance")
    catalog = await open_place.open(site, "clusters", cluster_refresh_seconds=0.05)
    assert open_place.changes == []  # Documents found at the start are no changes.
    assert catalog.memory.live_ids() == ("a", "b")
    version, _ = read(catalog, "a")
    site.clusters = {"a": cluster("a", gpus=3), "c": cluster("c")}
    gone = await open_place.until(ClusterDeleted)
    put = {each.cluster.id: each for each in open_place.changes if isinstance(each, ClusterPut)}
    assert put.keys() == {"a", "c"}
    assert len(put["a"].cluster.nodes[0].gpus) == 3
    assert gone.cluster_id in {"b", "asleep"}
    assert catalog.memory.live_ids() == ("a", "c")
    assert read(catalog, "a")[0] > version
    assert {each.id for each in catalog.memory.models()} == {"a", "c"}


async def test_memory_answers_with_a_warning_while_the_registry_fails(site, open_place):
    catalog = await open_place.open(
        site, "clusters", cluster_refresh_seconds=0.05, stale_seconds_max=3600.0
    )
    site.by_path["/clusters/query"] = answer("", 500)
    warnings = await until(lambda: catalog.freshness.at_hand(URI, None))
    assert warnings[0].startswith(f"The cluster registry at {site.url} ")
    assert re.search(r" as of \d+ seconds before this request", warnings[0])
    assert catalog.memory.live_ids() == ("a", "b")
    late = await have(catalog, ["a", "late"])
    assert late[1].startswith("Clusters could not be looked up and were left out: late.")
    async with expect_refusal(Code.UNAVAILABLE):
        await have(catalog, ["late"])
    site.by_path["/clusters/query"] = site.answer_clusters
    await until(lambda: catalog.freshness.at_hand(URI, None) == [])


async def test_requests_are_refused_once_the_registry_has_failed_too_long(site, open_place):
    catalog = await open_place.open(site, "clusters", follow=False, stale_seconds_max=0.0)
    site.by_path["/clusters/query"] = hang_up
    async with expect_refusal(Code.UNAVAILABLE) as caught:
        await have(catalog)
    assert caught.value.details["url"] == site.url
    async with expect_refusal(Code.UNAVAILABLE):
        await catalog.clusters.get("a")
    async with expect_refusal(Code.UNAVAILABLE):
        await catalog.clusters.query({})


async def test_a_server_starts_without_its_registry_and_finds_it_later(site, open_place):
    port = int(site.url.rpartition(":")[2])
    await site.stop()
    catalog = await open_place.open(site)
    assert not catalog.freshness.registry_known
    async with expect_refusal(Code.UNAVAILABLE):
        await have(catalog, uri="not a uri")
    await site.start(port)
    listed = await open_place.until(ClustersListed)
    assert listed.cluster_ids == {"a", "b"}
    assert catalog.freshness.registry_known


async def test_unusable_documents_are_reported_and_the_usable_document_stays(site, open_place):
    site.clusters["bad"] = {**cluster("bad"), "nodes": 7}
    catalog = await open_place.open(site, "clusters", cluster_refresh_seconds=0.05)
    (warning,) = await have(catalog, ["a", "bad"])
    assert "left out: bad (bad: nodes: expected an object" in warning
    assert await have(catalog, ["a"]) == []
    site.clusters |= {"a": {**cluster("a"), "nodes": 8}, "c": cluster("c")}
    await open_place.until(ClusterPut)
    (warning,) = await have(catalog, ["a"])
    assert "left out: a (a: nodes" in warning
    assert read(catalog, "a")[1]["data"]["nodes"]["count"] == 1


# Metrics -----------------------------------------------------------------------------------------


async def test_metrics_older_than_the_limit_are_read_again(site, open_place):
    catalog = await open_place.open(site, "clusters metrics", metrics_fresh_seconds=0.0)
    await have(catalog)
    version, _ = read(catalog, "a")
    await have(catalog)
    assert read(catalog, "a")[0] == version  # Read again, but unchanged.
    site.metrics = {"a": metrics("a", 9)}
    await have(catalog)
    later, found = read(catalog, "a")
    assert later > version
    assert found["cluster_metrics"]["cluster"]["gpu"] == {"totalFreeMem": 9}
    assert read(catalog, "b")[1]["cluster_metrics"] is None
    kinds = [type(each) for each in open_place.changes]
    assert kinds.count(MetricsPut) == 3
    assert kinds.count(MetricsDeleted) == 1


async def test_metrics_that_cannot_be_read_are_null_and_no_request_waits_for_them_twice(
    site, open_place
):
    catalog = await open_place.open(
        site, "clusters metrics", metrics_fresh_seconds=0.0, timeout_seconds=0.2
    )
    await have(catalog)
    site.by_path["/cluster/query"] = silence
    (warning,) = await have(catalog)
    assert warning.startswith("The metrics of 2 clusters could not be read and are null: a, b.")
    assert "did not answer in time" in warning
    assert read(catalog, "a")[1]["cluster_metrics"] is None
    # From here on, requests do not wait for the service, which is only probed.
    assert catalog.freshness.at_hand(URI, None) == [warning]
    async with expect_refusal(Code.UNAVAILABLE):
        await catalog.metrics.get("a")
    site.by_path["/cluster/query"] = site.answer_metrics
    await until(lambda: catalog.freshness.at_hand(URI, None) in (None, []))
    assert await have(catalog) == []
    assert read(catalog, "a")[1]["cluster_metrics"]


async def test_a_cluster_with_unusable_metrics_has_no_metrics(site, open_place):
    site.metrics["a"] = {"clusterId": "a", "nodes": 7}
    catalog = await open_place.open(site, "clusters metrics")
    (warning,) = await have(catalog)
    assert "count as none: a (a: nodes: expected a list" in warning
    assert read(catalog, "a")[1]["cluster_metrics"] is None


@pytest.mark.parametrize("data", [5, [None, {"clusterId": 5}], [{"clusterId": "a b"}]])
async def test_metrics_that_name_no_cluster_are_reported(site, open_place, data):
    catalog = await open_place.open(site, "clusters metrics", metrics_fresh_seconds=0.0)
    site.by_path["/cluster/query"] = answer({"success": True, "data": data})
    (warning,) = await have(catalog)
    assert warning.startswith(f"The cluster metrics service at {site.url} answered with documents")
    assert read(catalog, "a")[1]["cluster_metrics"] is None
    site.by_path["/cluster/query"] = site.answer_metrics
    assert await have(catalog) == []
    assert read(catalog, "a")[1]["cluster_metrics"]


async def test_filters_on_metrics_are_checked_before_they_are_passed_on(site, open_place):
    catalog = await open_place.open(site, "clusters metrics")
    site.by_path["/cluster/query"] = answer({"success": True, "data": [metrics("a")]})
    assert [each["clusterId"] for each in await catalog.metrics.query({"clusterId": "a"})] == ["a"]
    async with expect_refusal(Code.UNSUPPORTED):
        await catalog.metrics.query({"$where": "1"})
    with pytest.raises(ServiceError):
        await catalog.metrics.get("../../admin")
    assert all(each.path != "/cluster/../../admin" for each in site.requests)


async def test_a_metrics_query_for_one_cluster_uses_its_fresh_metrics(site, open_place):
    catalog = await open_place.open(site, "clusters metrics")
    site.requests.clear()
    for query in ({"clusterId": "a"}, {"clusterId": {"$in": ["a"]}}):
        assert [each["clusterId"] for each in await catalog.metrics.query(query)] == ["a"]
    assert site.count("/cluster/query") == 1
    del site.metrics["b"]
    assert await catalog.metrics.query({"clusterId": "b"}) == []


async def test_metrics_of_unknown_clusters_are_not_remembered(site, open_place):
    catalog = await open_place.open(site, "clusters metrics")
    site.metrics["x"] = metrics("x")
    site.requests.clear()
    for _ in range(2):
        assert (await catalog.metrics.get("x"))["clusterId"] == "x"
    assert len(site.requests) == 2
    async with expect_refusal(Code.NOT_FOUND):
        await catalog.metrics.get("y")


# Policies ----------------------------------------------------------------------------------------


async def test_policies_are_read_again_and_their_changes_are_applied(site, open_place):
    catalog = await open_place.open(site, "policies", policy_fresh_seconds=0.0)
    assert await have(catalog, ()) == []
    first = catalog.memory.policy(URI)
    await have(catalog, ())
    assert catalog.memory.policy(URI) is first
    assert site.requests[-1].headers["if-none-match"]
    site.policies[URI] = {"policy_rule_uri": URI, "code": POLICY + "# other\n"}
    await have(catalog, ())
    assert catalog.memory.policy(URI).ref.digest != first.ref.digest
    del site.policies[URI]
    async with expect_refusal(Code.UNKNOWN_POLICY) as caught:
        await have(catalog, ())
    assert "no such policy" in caught.value.reason
    assert catalog.memory.policy(URI) is None
    assert [type(each) for each in open_place.changes] == [PolicyPut, PolicyPut, PolicyDeleted]


async def test_examples_of_a_new_policy_run_and_failures_are_reported(site, open_place):
    open_place.says, open_place.cells = "its first example fails", asyncio.Semaphore(0)
    catalog = await open_place.open(site, "policies", policy_fresh_seconds=0.0)
    assert await have(catalog, ()) == [], "no request waits for the examples"
    open_place.cells.release()
    warnings = await reply(catalog)
    place = f"The policy store at {site.url} has “{URI}”"
    assert warnings == [f"{place}, which fails its own examples: its first example fails"]
    assert await have(catalog, ()) == warnings, "unchanged after reading again"
    site.behave = hang_up
    (old, doubt) = await have(catalog, ())
    assert ("The policy is as of" in old, doubt) == (True, warnings[0])
    assert [each.ref.uri for each in open_place.examined] == [URI], "once"
    site.behave, open_place.says = site.answer_policy, ""
    site.policies[URI] = {"policy_rule_uri": URI, "code": POLICY + "# mended\n"}
    assert await have(catalog, ()) == []
    assert catalog.memory.policy(URI).ref.digest != open_place.examined[0].ref.digest
    # If no cell is free, the examples run later.
    open_place.says = ServiceError(Code.BUSY, "no cell")
    for _ in range(9):
        open_place.cells.release()
    site.policies[URI] = {"policy_rule_uri": URI, "code": POLICY + "# again\n"}
    await have(catalog, ())
    await until(lambda: len(open_place.examined) > 3)
    open_place.says = "now it is known"
    assert "now it is known" in (await reply(catalog))[0]


async def test_a_policy_that_was_read_is_used_while_its_store_is_away(site, open_place):
    catalog = await open_place.open(site, "policies", policy_fresh_seconds=0.0)
    await have(catalog, ())
    site.behave = hang_up
    (warning,) = await have(catalog, ())
    assert warning.startswith(f"The policy store at {site.url} could not be reached")
    assert re.search(r"The policy is as of \d+ seconds before this request", warning)
    async with expect_refusal(Code.UNAVAILABLE):
        await have(catalog, (), "other:1.0-beta")
    strict = await open_place.open(
        site, "policies", policy_fresh_seconds=0.0, stale_seconds_max=0.0
    )
    site.behave = site.answer_policy
    await have(strict, ())
    site.behave = hang_up
    async with expect_refusal(Code.UNAVAILABLE):
        await have(strict, ())


@pytest.mark.parametrize(
    ("document", "code", "what"),
    [
        ({"code": 7}, Code.BAD_POLICY, "code: expected"),
        ({"code": "/etc/passwd"}, Code.BAD_POLICY, "has no `policy_code_root`"),
        ({"code": POLICY, "policy_settings": 7}, Code.BAD_POLICY, "policy_settings: expected"),
        ({"code": "http://127.0.0.1:1/x"}, Code.BAD_POLICY, "is not public"),
        ({"code": POLICY, "policy_rule_uri": "x:1-y"}, Code.UNAVAILABLE, "another policy than"),
    ],
)
async def test_unusable_policies_of_a_store_are_refused_as_uploads_are(
    site, open_place, document, code, what
):
    catalog = await open_place.open(site, "policies")
    site.policies[URI] = document
    async with expect_refusal(code) as caught:
        await have(catalog, ())
    assert what in caught.value.reason
    assert catalog.memory.policy(URI) is None


async def test_the_answer_not_modified_for_an_unread_policy_is_an_error(site, open_place):
    catalog = await open_place.open(site, "policies")
    site.behave = answer("", 304)
    async with expect_refusal(Code.UNAVAILABLE):
        await have(catalog, ())


@pytest.mark.parametrize("uri", ["nothing", "../x:1-y", "a:1-b/../../c", "a:1-b?x", ""])
async def test_an_invalid_uri_causes_no_request(site, open_place, uri):
    catalog = await open_place.open(site, "policies")
    assert await have(catalog, (), uri) == []
    async with expect_refusal(Code.UNKNOWN_POLICY):
        await catalog.policies.get(uri)
    assert site.requests == []


# The end -----------------------------------------------------------------------------------------


async def test_closing_the_catalog_cancels_running_requests(site, open_place):
    catalog = await open_place.open(site, timeout_seconds=60.0)
    site.behave = silence
    waiting = asyncio.create_task(catalog.freshness.fetch(URI, None, Allowance()))
    await until(lambda: site.count("/policy"))
    await catalog.close()
    open_place.catalogs.clear()
    async with expect_refusal(Code.SHUTTING_DOWN):
        await waiting
