"""Tests of the client of each external service, over real sockets: it checks every answer."""

import asyncio

import pytest
from faulty_service import (
    FaultyService,
    answer,
    drip,
    fall_silent,
    flood,
    hang_up,
    nonsense,
    silence,
    stop_halfway,
)

from moorage.catalog.mirrored.envelopes import DEPTH_MAX, Denied
from moorage.catalog.mirrored.http import (
    ANSWER_BYTES_MAX,
    ATTEMPTS_MAX,
    FAILURES_MAX,
    ONE_BYTES_MAX,
    OPEN_SECONDS_FIRST,
    OPEN_SECONDS_MAX,
    Breaker,
    Service,
    ServiceRequest,
)
from moorage.catalog.mirrored.services import (
    LISTING_SECONDS_MAX,
    ClusterRegistry,
    MetricsService,
    PolicyStore,
    SearchService,
)
from moorage.model import Code
from moorage.protocol.faults import ServiceError

SECONDS = 0.5
"""Time limit of a request in seconds. Only the tests of this limit reach it."""


def cluster(name, gpus=2, **more):
    node = {"id": "n", "gpus": {"count": gpus}, "vcpus": {"count": 4}, "memory": 1024}
    return {"id": name, "nodes": {"nodeData": [node]}, **more}


def metrics(name, free=5):
    return {"clusterId": name, "nodes": [{"id": "n", "gpu": {"totalFreeMem": free}}]}


@pytest.fixture
async def faulty():
    faulty = await FaultyService().start()
    yield faulty
    await faulty.stop()


@pytest.fixture
async def service(faulty):
    service = Service("cluster registry", faulty.url + "/", SECONDS)
    yield service
    await service.close()


async def unavailable(asking):
    """Return the reason of the `unavailable` error that a call must raise in time."""
    async with asyncio.timeout(30):
        with pytest.raises(ServiceError) as caught:
            await asking
    assert caught.value.code is Code.UNAVAILABLE
    assert caught.value.details["service"] == "cluster registry"
    return caught.value.reason


# Servers that fail -------------------------------------------------------------------------------

FAILURES = {
    "silent": (silence, "did not answer in time", 1),
    "dripping": (drip, "did not answer in time", 1),
    "hanging up": (hang_up, "could not be reached", ATTEMPTS_MAX),
    "half closed": (stop_halfway, "could not be reached", ATTEMPTS_MAX),
    "no HTTP": (nonsense, "could not be reached", ATTEMPTS_MAX),
    "500": (answer({"error": "boom"}, 500), "answered 500", ATTEMPTS_MAX),
    "429": (answer("slow down", 429), "answered 429: 'slow down'", ATTEMPTS_MAX),
    "boasting": (answer("x", 200, content_length="999999999999"), "answered with more than", 1),
    "packed": (answer("x", 200, content_encoding="gzip"), "sent its answer as 'gzip'", 1),
    "403": (answer({}, 403), "refuses this server's credentials (403)", 1),
    "teapot": (answer("short and stout", 418), "answered 418: 'short and stout'", 1),
    "HTML": (answer("<html>hello</html>"), "without a JSON document: '<html>hello</html>'", 1),
    "HTML 404": (answer("<html>no</html>", 404), "answered 404 without a JSON", 1),
    "truncated JSON": (answer('[{"id": "a"'), "an unexpected form of JSON", 1),
    "empty": (answer(""), "without a JSON document", 1),
    "a number": (answer("7"), "without a JSON document", 1),
    "success without data": (answer({"success": True}), "`success` without `data`", 1),
    "Latin-1": (answer('{"\udce9":true,"data":[]}'), "an unexpected form of JSON", 1),
    "success false": (answer({"success": False, "message": "no"}), "failed: no", 1),
    "error text": (answer({"error": "db down"}), "failed: db down", 1),
    "success with an error in it": (
        answer({"success": True, "data": [False, "inner"]}),
        "failed: inner",
        1,
    ),
    "redirected away": (
        answer("", 302, location="http://169.254.169.254/latest"),
        "redirected to http://169.254.169.254, which is not followed",
        1,
    ),
    "redirected to a GET": (answer("", 303, location="/x"), "redirected a query with 303", 1),
    "redirected in circles": (answer("", 307, location="/clusters/query"), "more than 2 times", 3),
}


@pytest.mark.parametrize(("behave", "what", "requests"), FAILURES.values(), ids=FAILURES)
async def test_each_failure_of_a_service_is_one_refusal_of_bounded_length(
    faulty, service, behave, what, requests
):
    faulty.behave = behave
    reason = await unavailable(ClusterRegistry(service).named(["a"]))
    assert reason.startswith(f"The cluster registry at {faulty.url} ")
    assert what in reason
    assert len(faulty.requests) == requests == service.requests


async def test_an_answer_that_cannot_be_decoded_is_a_wrong_answer(faulty, service):
    faulty.behave = answer('{"e":"\udce9"}')
    request = ServiceRequest("GET", "/")
    for _ in range(2):
        reason = await unavailable(service.ask(request, lambda reply: reply.body.decode()))
        assert "answered 200 with a body that cannot be read" in reason


async def test_an_endless_answer_is_not_read_to_its_end(faulty):
    faulty.behave = flood
    patient = Service("cluster registry", faulty.url, 60)
    assert "answered with more than" in await unavailable(ClusterRegistry(patient).named(["a"]))
    await patient.close()


async def test_a_missing_service_is_unavailable(faulty):
    await faulty.stop()
    patient = Service("cluster registry", faulty.url, 60)  # Longer than a busy machine needs.
    assert "could not be reached" in await unavailable(ClusterRegistry(patient).named(["a"]))
    await patient.close()


async def test_a_temporary_failure_is_retried(faulty, service):
    behaviours = [hang_up, answer("", 503), answer([cluster("a")])]

    async def worse_first(request, writer):
        await behaviours.pop(0)(request, writer)

    faulty.behave = worse_first
    read = await ClusterRegistry(service).named(["a"])
    assert list(read.found) == ["a"]


async def test_a_redirect_on_the_same_host_is_followed(faulty, service):
    faulty.by_path["/clusters/query"] = answer("", 308, location="/clusters/query/")
    faulty.by_path["/clusters/query/"] = answer([cluster("a")])
    read = await ClusterRegistry(service).named(["a"])
    assert list(read.found) == ["a"]
    assert faulty.requests[1].body == {"query": {"id": {"$in": ["a"]}}}


async def test_a_service_client_reuses_its_connection(faulty, service):
    ports = set()

    async def note(request, writer):
        ports.add(writer.get_extra_info("peername"))
        await answer([])(request, writer)

    faulty.behave = note
    for _ in range(5):
        await ClusterRegistry(service).named(["a"])
    assert len(ports) == 1


@pytest.mark.parametrize(
    ("user", "header"),
    [("ann:s3cret", "Basic YW5uOnMzY3JldA=="), ("bearer:s3cret", "Bearer s3cret")],
)
async def test_credentials_of_a_url_are_sent_and_never_shown(faulty, user, header):
    service = Service("cluster registry", faulty.url.replace("//", f"//{user}@"), SECONDS)
    await ClusterRegistry(service).named(["a"])
    assert faulty.requests[0].headers["authorization"] == header
    faulty.behave = answer("", 401)
    reason = await unavailable(ClusterRegistry(service).named(["a"]))
    assert "s3cret" not in reason
    assert faulty.url in reason
    await service.close()


async def test_a_closed_service_client_refuses_requests(service):
    await service.close()
    with pytest.raises(ServiceError) as caught:
        await service.ask(ServiceRequest("GET", "/"), lambda reply: reply)
    assert caught.value.code is Code.SHUTTING_DOWN


@pytest.mark.parametrize("stall", [silence, fall_silent])
async def test_a_request_for_the_registry_that_stalls_once_is_repeated_soon(faulty, stall):
    behaviours = [stall, answer([cluster("a")])]

    async def worse_first(request, writer):
        await behaviours.pop(0)(request, writer)

    faulty.behave = worse_first
    service = Service("cluster registry", faulty.url, 2.0)
    async with asyncio.timeout(LISTING_SECONDS_MAX / 2):
        assert (await ClusterRegistry(service).everything({}, "")).found
    assert len(faulty.requests) == 2
    await service.close()


# The circuit breaker -----------------------------------------------------------------------------


async def test_a_failing_service_gets_no_requests_and_then_a_probe(faulty, service):
    faulty.behave = answer("", 500)
    registry = ClusterRegistry(service)
    await unavailable(registry.named(["a"]))
    await unavailable(registry.named(["a"]))
    before = len(faulty.requests)
    assert before == FAILURES_MAX  # The circuit breaker opened between two attempts.
    assert "5 times in a row (the last time it answered 500)" in await unavailable(
        registry.named(["a"])
    )
    assert len(faulty.requests) == before
    faulty.behave = answer([cluster("a")])
    async with asyncio.timeout(20):
        while True:  # Until the circuit breaker lets a request through, which closes it.
            try:
                assert (await registry.named(["a"])).found
                break
            except ServiceError:
                await asyncio.sleep(0.02)  # No event reports the end of the pause.
    assert len(faulty.requests) == before + 1


def test_the_breaker_of_a_service_opens_after_failures_and_allows_a_probe_after_a_pause():
    breaker = Breaker()
    for _ in range(FAILURES_MAX):
        assert breaker.wait_seconds(0) == 0
        breaker.note_failure(0, 1.0)
    assert breaker.wait_seconds(0) == pytest.approx(OPEN_SECONDS_FIRST)
    assert breaker.wait_seconds(OPEN_SECONDS_FIRST) == 0  # The only probe.
    assert breaker.wait_seconds(OPEN_SECONDS_FIRST) > 0  # Others wait for its outcome.
    breaker.abandoned()
    assert breaker.wait_seconds(OPEN_SECONDS_FIRST) == 0
    breaker.note_failure(10, 1.0)
    assert breaker.wait_seconds(10) == pytest.approx(2 * OPEN_SECONDS_FIRST)
    for _ in range(100):
        breaker.note_failure(10, 1.0)
    assert breaker.wait_seconds(10) == pytest.approx(OPEN_SECONDS_MAX)
    breaker.succeeded()
    assert breaker.wait_seconds(10) == 0


# The registry ------------------------------------------------------------------------------------


async def test_the_registry_is_read_in_bulk(faulty, service):
    names = [f"c{number:04}" for number in range(500)]
    faulty.behave = answer([cluster(name) for name in names])
    read = await ClusterRegistry(service).named(names)
    assert sorted(read.found) == names
    assert [(each.method, each.path, each.body) for each in faulty.requests] == [
        ("POST", "/clusters/query", {"query": {"id": {"$in": names}}})
    ]


@pytest.mark.parametrize(
    "found",
    [
        [cluster("a")],
        cluster("a"),
        {"success": True, "data": [cluster("a")]},
        [cluster("a"), cluster("stranger"), cluster("a")],
    ],
    ids=["list", "one document", "envelope", "with strangers and twins"],
)
async def test_every_form_of_a_successful_answer_is_read(faulty, service, found):
    faulty.behave = answer(found)
    assert list((await ClusterRegistry(service).named(["a"])).found) == ["a"]


@pytest.mark.parametrize(
    "behave",
    [
        answer([]),
        answer("null"),
        answer({"error": "not found"}, 404),
        answer({"success": False, "message": "none", "error": {"code": "not_found"}}, 404),
        answer({"success": False, "message": "none"}, 400),
        answer({"success": True, "data": None}),
    ],
)
async def test_every_form_of_the_answer_not_found_is_read(faulty, service, behave):
    faulty.behave = behave
    assert (await ClusterRegistry(service).named(["a"])).found == {}


@pytest.mark.parametrize("status", [400, 404])
async def test_a_registry_without_a_list_is_not_an_empty_registry(faulty, service, status):
    faulty.behave = answer({"error": "Not Found"}, status)
    reason = await unavailable(ClusterRegistry(service).everything({}, ""))
    assert f"answered {status} to the list of all" in reason
    assert "Not Found" in reason
    faulty.behave = answer([])
    assert (await ClusterRegistry(service).everything({}, "")).found == {}


def nest(depth):
    value = {}
    for _ in range(depth):
        value = {"x": value}
    return value


async def test_one_invalid_document_of_a_service_does_not_affect_other_documents(faulty, service):
    bad = {
        "shape": {**cluster("shape"), "nodes": 7},
        "../x": cluster("../x"),
        "deep": {**cluster("deep"), "more": nest(DEPTH_MAX)},
        "twin": cluster("twin", gpus=1),
    }
    faulty.behave = answer([cluster("a"), cluster("twin"), *bad.values(), "text", cluster("z")])
    read = await ClusterRegistry(service).everything({}, "")
    assert sorted(read.found) == ["a", "twin", "z"]
    assert read.left_out.keys() == {*bad, "document 6"}
    assert "nodes" in read.left_out["shape"]
    assert f"more than {DEPTH_MAX} levels" in read.left_out["deep"]
    assert "twice" in read.left_out["twin"]


async def test_json_too_deep_to_be_read_is_not_a_valid_answer(faulty, service):
    faulty.behave = answer("[" * 100_000 + "]" * 100_000)
    assert "an unexpected form of JSON" in await unavailable(
        ClusterRegistry(service).everything({}, "")
    )


async def test_only_changed_documents_are_decoded(faulty, service):
    registry = ClusterRegistry(service)
    faulty.behave = answer([cluster("a"), cluster("b")], etag='"1"')
    first = await registry.everything({}, "")
    seen = {found.digest: name for name, found in first.found.items()}
    faulty.behave = answer([cluster("a"), cluster("b", gpus=3)], etag='"2"')
    second = await registry.everything(seen, first.etag)
    assert (list(second.found), second.same) == (["b"], {"a"})
    faulty.behave = answer("", 304)
    assert await registry.everything(seen, second.etag) is None
    assert [each.headers.get("if-none-match") for each in faulty.requests] == [None, '"1"', '"2"']


# Metrics -----------------------------------------------------------------------------------------


async def test_metrics_are_requested_by_post_with_a_bare_filter(faulty, service):
    found = [metrics("a"), metrics("stranger"), {"clusterId": "b", "nodes": 7}, metrics("a", 6)]
    faulty.behave = answer({"success": True, "data": found})
    read = await MetricsService(service).named(["a", "b", "c"], {})
    assert list(read.found) == ["a"]
    assert read.found["a"][0].document["cluster"] == {"gpu": {"totalFreeMem": 5}}
    assert read.left_out.keys() == {"a", "b"}
    assert faulty.requests[0].body == {"clusterId": {"$in": ["a", "b", "c"]}}


async def test_metrics_are_requested_by_get_if_the_service_refuses_post(faulty, service):
    async def only_get(request, writer):
        found = {"success": True, "data": [metrics("a"), metrics("b")]}
        behave = answer(found) if request.method == "GET" else answer({"error": "no"}, 405)
        await behave(request, writer)

    faulty.behave = only_get
    source = MetricsService(service)
    for _ in range(2):
        assert list((await source.named(["a"], {})).found) == ["a"]
    assert [each.method for each in faulty.requests] == ["POST", "GET", "GET"]
    assert [each["clusterId"] for each in await source.matching({"clusterId": "b"})] == ["b"]


@pytest.mark.parametrize("status", [400, 404])
async def test_400_and_404_of_the_metrics_service_both_mean_unknown(faulty, service, status):
    faulty.behave = answer({"success": False, "message": "not found"}, status)
    assert (await MetricsService(service).named(["a"], {})).found == {}


# Policies ----------------------------------------------------------------------------------------

URI = "first:1.0-a+b"


@pytest.mark.parametrize("wrapped", [True, False])
async def test_a_policy_is_read_with_its_etag(faulty, service, wrapped):
    document = {"policy_rule_uri": URI, "code": "x"}
    faulty.behave = answer({"success": True, "data": document} if wrapped else document, etag='"7"')
    store = PolicyStore(service)
    assert await store.get(URI, "") == (document, '"7"')
    assert faulty.requests[0].path == "/policy/first:1.0-a%2Bb"
    faulty.behave = answer("", 304)
    assert await store.get(URI, '"7"') is None


@pytest.mark.parametrize("status", [200, 400, 404])
async def test_the_answer_policy_not_found_may_have_any_status(faulty, service, status):
    faulty.behave = answer({"success": False, "error": "Policy not found"}, status)
    assert await PolicyStore(service).get(URI, "") == Denied(status, "Policy not found")


async def test_an_answer_with_another_policy_than_the_requested_policy_is_refused(faulty, service):
    faulty.behave = answer({"success": True, "data": {"policy_rule_uri": "other:1.0-a"}})
    assert "another policy than" in await unavailable(PolicyStore(service).get(URI, ""))


async def test_an_answer_about_one_policy_has_its_own_size_limit(faulty, service):
    faulty.behave = answer("x", 200, content_length=str(ONE_BYTES_MAX + 1))
    refusal = await unavailable(PolicyStore(service).get(URI, ""))
    assert f"answered with more than {ONE_BYTES_MAX} bytes" in refusal
    assert ONE_BYTES_MAX < ANSWER_BYTES_MAX


# Search ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("action", "body", "path"),
    [
        ("filter", {"body": {"values": {}}}, "/api/filter-data"),
        ("filter", {"matchType": "cluster"}, "/api/no-ir/filter"),
        ("search", {"header": {}, "body": {"values": {}}}, "/api/similarity-search"),
        ("search", {"matchType": "cluster"}, "/api/no-ir/similarity-search"),
    ],
)
async def test_a_search_goes_to_the_route_for_its_kind_and_envelope(
    faulty, service, action, body, path
):
    faulty.behave = answer({"success": True, "data": [{"id": "b"}, {"id": "a"}, {"id": "b"}]})
    assert await SearchService(service).find(action, body) == ["b", "a"]
    assert (faulty.requests[0].path, faulty.requests[0].body) == (path, body)


async def test_a_search_may_find_one_cluster_or_nothing(faulty, service):
    search = SearchService(service)
    for data, found in (({"id": "a"}, ["a"]), (None, []), ([], [])):
        faulty.behave = answer({"success": True, "data": data})
        assert await search.find("filter", {}) == found


@pytest.mark.parametrize(
    "behave",
    [
        answer({"success": True, "data": [False, "bad operator"]}),
        answer({"success": False, "message": "bad operator"}, 400),
    ],
)
async def test_an_error_of_the_search_service_is_passed_on(faulty, service, behave):
    faulty.behave = behave
    with pytest.raises(ServiceError) as caught:
        await SearchService(service).find("filter", {})
    assert (caught.value.code, caught.value.field) == (Code.BAD_MESSAGE, "filter")
    assert "bad operator" in caught.value.reason


@pytest.mark.parametrize("data", [[{"id": "../../admin"}], [7], {"id": None}])
async def test_a_search_answer_with_invalid_ids_is_an_error(faulty, service, data):
    faulty.behave = answer({"success": True, "data": data})
    assert "found an invalid cluster" in await unavailable(
        SearchService(service).find("search", {})
    )
