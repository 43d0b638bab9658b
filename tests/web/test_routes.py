"""Tests of the documented endpoints: paths, statuses, envelopes and bodies of failures."""

import base64
import io
import tarfile

import pytest

POLICY = "class AIOSv1PolicyRule:\n    pass\n"
URI = "policies.first-fit:v0.0.01-beta"


def cluster(name="c1", **more):
    node = {"id": "node-0", "gpus": {"count": 2}, "vcpus": {"count": 4}, "memory": 1024}
    return {"id": name, "status": "live", "nodes": {"nodeData": [node]}, **more}


# Cluster database --------------------------------------------------------------------------


async def test_clusters_are_created_read_changed_and_deleted(client):
    created = await client.post("/clusters", json=cluster())
    assert created.status_code == 201
    document = created.json()
    assert (document["id"], document["gpus"]["count"]) == ("c1", 2)
    read = await client.get("/clusters/c1")
    assert (read.status_code, read.json()) == (200, document)
    changed = await client.put("/clusters/c1", json={"$set": {"status": "down"}})
    assert (changed.status_code, changed.json()["status"]) == (200, "down")
    replaced = await client.put("/clusters/c1", json=cluster(region="eu"))
    assert (replaced.json()["region"], replaced.json()["status"]) == ("eu", "live")
    more = {"nodes": {"nodeData": [{"id": "n9", "vcpus": {"count": 3}}]}}
    added = await client.post("/clusters/c1/nodes", json=more)
    assert (added.status_code, added.json()["region"]) == (200, "eu")
    assert added.json()["nodes"]["count"] == 2
    assert (await client.get("/clusters/c1")).json() == added.json()
    created = await client.post("/clusters/c2/nodes", json=more)
    assert (created.status_code, created.json()["id"]) == (201, "c2")
    deleted = await client.delete("/clusters/c1")
    assert (deleted.status_code, deleted.json()["id"]) == (200, "c1")
    assert (await client.get("/clusters/c1")).status_code == 404


MERGED = {
    "/clusters/x": "/clusters", "/blocks/x": "/blocks", "/cluster/x": "", "/block/x": "",
}  # fmt: skip


@pytest.mark.parametrize("path", MERGED)
async def test_a_put_of_a_document_changes_only_the_named_fields(client, path):
    """The databases of the original services do the same, and create missing metrics."""
    first = {"tags": ["a"], "config": {"urlMap": {"u": 1}}, "count": 1}
    made = await client.put(path, json=first)
    assert made.status_code == (404 if MERGED[path] else 201)
    if MERGED[path]:
        await client.post(MERGED[path], json={"id": "x", **first})

    async def put(change):
        answer = await client.put(path, json=change)
        assert answer.status_code == 200, answer.text
        read = (await client.get(path)).json()
        assert answer.json() == read
        found = read.get("data", read)
        return {name: found[name] for name in first}

    assert await put({"tags": ["new"]}) == {**first, "tags": ["new"]}
    named = {**first, "tags": ["new"], "config": {"urlMap": {"u": 1}, "publicHostname": "h"}}
    assert await put({"config.publicHostname": "h"}) == named
    changed = await put(
        {"$push": {"tags": "b"}, "$inc": {"count": 2}, "$unset": {"config.urlMap": 1}}
    )
    assert changed == {"tags": ["new", "b"], "count": 3, "config": {"publicHostname": "h"}}
    refused = await client.put(path, json={"id": "y", "clusterId": "y", "blockId": "y"})
    assert refused.status_code == 400
    assert await put({}) == changed


async def test_the_document_after_a_change_is_checked(client):
    await client.post("/clusters", json=cluster("c1"))
    refused = await client.put("/clusters/c1", json={"nodes.nodeData": [{"id": 7, "gpus": "x"}]})
    assert refused.status_code == 400
    assert "nodes.nodeData[0]" in refused.text
    assert (await client.get("/clusters/c1")).json()["gpus"]["count"] == 2


@pytest.mark.parametrize("kind", ["clusters", "blocks", "cluster", "block"])
async def test_a_query_is_answered_by_pages(client, kind):
    """The body has `options` beside the `query`, as documented for blocks."""
    key = {"cluster": "clusterId", "block": "blockId"}.get(kind, "id")
    for name in ("a", "b", "c"):
        made = await client.post(f"/{kind}", json={key: name, "tags": ["t"]})
        assert made.is_success, made.text
    body = {"query": {"tags": "t"}, "options": {"sort": {key: -1}, "skip": 1, "limit": 1}}
    found = (await client.post(f"/{kind}/query", json=body)).json()
    documents = found if kind == "clusters" else found["data"]
    assert [each[key] for each in documents] == ["b"]
    body["options"] = {"populate": "cluster"}
    refused = await client.post(f"/{kind}/query", json=body)
    assert refused.status_code == 400
    assert "options.populate" in refused.text
    # In a bare filter, this is a field's name.
    assert (await client.post(f"/{kind}/query", json={"options": {"sort": 1}})).is_success


@pytest.mark.parametrize(
    "path", ["createCluster", "addNode", "createBlock", "createvDAG", "executeMgmtCommand"]
)
async def test_other_actions_of_the_original_parser_are_unsupported(client, path):
    refused = await client.post(f"/api/{path}", json={"header": {}, "body": {}})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "unsupported")
    assert "`/clusters`" in refused.json()["message"]


async def test_failures_of_the_cluster_database_have_documented_statuses(client):
    await client.post("/clusters", json=cluster())
    for answer, status, code, field in (
        (await client.get("/clusters/c9"), 404, "not_found", "id"),
        (await client.post("/clusters", json=cluster()), 409, "already_exists", "id"),
        (await client.post("/clusters", json={"id": "a/b"}), 400, "bad_message", "id"),
        (await client.post("/clusters", json=[1]), 400, "bad_message", "body"),
        (await client.post("/clusters/query", json={"$where": 1}), 400, "unsupported", "$where"),
        (await client.post("/clusters/query", json={"query": 3}), 400, "bad_message", "query"),
        (await client.put("/clusters/c9", json=cluster("c9")), 404, "not_found", "id"),
    ):
        body = answer.json()
        assert (answer.status_code, body["success"]) == (status, False)
        assert body["error"] == body["message"] != ""
        assert (body["details"]["code"], body["details"]["field"]) == (code, field)


# Cluster metrics ---------------------------------------------------------------------------


async def test_metrics_are_stored_read_changed_and_deleted(client):
    report = {"clusterId": "c1", "nodes": [{"id": "n", "vcpu": {"load5m": 2}}]}
    first = await client.post("/cluster", json=report)
    assert (first.status_code, first.json()["success"]) == (201, True)
    data = first.json()["data"]
    assert data["cluster"]["vcpu"] == {"load5m": 2, "load_5m": 2}
    assert data["node"] == data["nodes"]
    assert (await client.post("/cluster", json=report)).status_code == 200
    assert (await client.put("/cluster", json=report)).status_code == 200
    assert (await client.put("/cluster/c2", json={"nodes": []})).status_code == 201
    changed = await client.put("/cluster/c1", json={"$set": {"nodes.0.vcpu.load5m": 3}})
    assert changed.json()["data"]["cluster"]["vcpu"]["load_5m"] == 3
    read = await client.get("/cluster/c1")
    assert (read.status_code, read.json()) == (200, changed.json())
    for found in (
        await client.post("/cluster/query", json={"clusterId": {"$in": ["c1"]}}),
        await client.post("/cluster/query", json={"query": {"cluster.vcpu.load5m": 3}}),
        await client.get("/cluster/query", params={"clusterId": "c1"}),
        await client.get("/cluster/query", params={"cluster.vcpu.load_5m": "3"}),
        await client.get("/cluster/query", params={"clusterId": ["c1", "c9"]}),
    ):
        assert [entry["clusterId"] for entry in found.json()["data"]] == ["c1"]
    assert len((await client.get("/cluster/query")).json()["data"]) == 2
    for operators in ("$in", ["$gte", "$lt"]):  # As HTTP libraries send keys of objects.
        refused = await client.get("/cluster/query", params={"clusterId": operators})
        assert refused.status_code == 400
        assert refused.json()["message"] == (
            "clusterId: expected a value, not an operator of a filter: POST the filter here as JSON"
            " instead"
        )
    assert (await client.get("/cluster/query", params={"cost": "$5"})).json()["data"] == []
    deleted = await client.delete("/cluster/c1")
    assert deleted.json() == {"success": True, "data": changed.json()["data"]}


async def test_failures_of_metrics_have_documented_statuses(client):
    other = {"clusterId": "c2"}
    for answer, status, code, field in (
        (await client.get("/cluster/c9"), 404, "not_found", "id"),
        (await client.post("/cluster", json={}), 400, "bad_message", "clusterId"),
        (await client.put("/cluster/c1", json=other), 400, "bad_message", "clusterId"),
        (await client.get("/cluster/query", params={"$where": "1"}), 400, "unsupported", "$where"),
    ):
        body = answer.json()
        assert (answer.status_code, body["success"]) == (status, False)
        assert body["message"] == body["error"]["reason"]
        assert (body["error"]["code"], body["error"]["field"]) == (code, field)


# Policies ----------------------------------------------------------------------------------


def archive(*names):
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for name in names:
            info = tarfile.TarInfo(name)
            info.size = len(POLICY)
            tar.addfile(info, io.BytesIO(POLICY.encode()))
    return base64.b64encode(packed.getvalue()).decode()


@pytest.mark.parametrize("code", [POLICY, archive("code/function.py")], ids=["source", "archive"])
async def test_policies_are_registered_read_changed_and_deleted(client, site, code):
    document = {"policy_rule_uri": URI, "code": code, "policy_parameters": {"spread": True}}
    for _ in range(2):
        published = await client.post("/policy", json=document)
        assert published.status_code == 200
        assert published.json() == {"success": True, "data": {"policy_rule_uri": URI}}
    assert site.house.catalog.memory.policy(URI).files == {"function.py": POLICY.encode()}
    read = await client.get(f"/policy/{URI}")
    assert (read.status_code, read.json()["data"]["name"]) == (200, "policies.first-fit")
    assert (await client.get("/policy/" + URI.replace(":", "%3A"))).json() == read.json()
    assert (await client.get("/policy")).json()["data"] == [read.json()["data"]]
    found = await client.post("/policy/query", json={"policy_parameters.spread": True})
    assert found.json()["data"] == [read.json()["data"]]
    described = await client.put(f"/policy/{URI}", json={"$set": {"description": "spreads"}})
    assert described.json()["data"]["description"] == "spreads"
    assert (await client.delete(f"/policy/{URI}")).json()["success"] is True
    missing = await client.get(f"/policy/{URI}")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "unknown_policy")
    changes = (await client.get(f"/policy/{URI}/history")).json()["data"]
    assert [(each["who"], each["what"]) for each in changes] == [
        ("local", "registered"),
        ("local", "described"),
        ("local", "removed"),
    ]


async def test_failures_of_policies_have_documented_statuses(client):
    await client.post("/policy", json={"policy_rule_uri": URI, "code": POLICY})
    evil, other = archive("code/function.py", "../evil"), "a:1-b"
    for document, status, code, field in (
        ({"policy_rule_uri": URI, "code": POLICY + "#"}, 409, "already_exists", "policy_rule_uri"),
        ({"code": POLICY}, 400, "missing_fields", "name"),
        ({"policy_rule_uri": "x", "code": POLICY}, 400, "bad_message", "policy_rule_uri"),
        ({"policy_rule_uri": other}, 400, "bad_message", "code"),
        ({"policy_rule_uri": other, "code": "/etc/passwd"}, 400, "bad_policy", "code"),
        ({"policy_rule_uri": other, "code": evil}, 400, "bad_policy", "code"),
    ):
        answer = await client.post("/policy", json=document)
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
        assert answer.json()["error"]["field"] == field
    changed = await client.put(f"/policy/{URI}", json={"$set": {"code": POLICY + "#"}})
    assert (changed.status_code, changed.json()["error"]["differing"]) == (409, ["code"])


# Allocation over HTTP ----------------------------------------------------------------------


async def test_the_path_allocate_passes_on_the_body_and_the_tenant(client):
    answer = await client.post("/allocate", content=b'{"policy_rule_uri": "x"}')
    assert (answer.status_code, answer.json()) == (200, {"success": True, "data": ["local", 24]})
    traced = await client.post("/allocate", content=b"{}", headers={"traceparent": "00-a-b-01"})
    assert traced.json()["data"] == ["local", 2, "00-a-b-01"]
    busy = await client.post("/allocate", content=b"busy")
    error = {"code": "busy", "reason": "later", "waiting": 3}
    assert busy.status_code == 429
    assert busy.json() == {"success": False, "message": "later", "error": error}


# Search ------------------------------------------------------------------------------------

SEARCHES = {
    "/api/filter-data": "filter",
    "/api/no-ir/filter": "filter",
    "/api/similarity-search": "search",
    "/api/no-ir/similarity-search": "search",
}


@pytest.mark.parametrize("path", SEARCHES)
async def test_searches_pass_on_the_body_results_and_warnings(client, path):
    body = {"matchType": "cluster"}
    found = await client.post(path, json=body)
    document = {"id": "c1", "action": SEARCHES[path], "tenant": "local", "body": body}
    assert (found.status_code, found.json()) == (200, {"success": True, "data": [document]})
    warned = (await client.post(path, json={"warnings": ["metrics are old"]})).json()
    assert (warned["success"], warned["warnings"]) == (True, ["metrics are old"])


@pytest.mark.parametrize("path", SEARCHES)
async def test_a_failed_search_is_not_answered_as_a_success(client, path):
    statuses = dict.fromkeys(("bad_message", "unknown_policy", "too_large", "policy_timeout"), 400)
    for code, status in {**statuses, "busy": 429, "unavailable": 503}.items():
        answer = await client.post(path, json={"fault": code})
        said = answer.json()
        assert (answer.status_code, said["success"], said["message"]) == (status, False, "no")
        assert (said["error"]["code"], said["error"]["field"]) == (code, "fault")
        assert "data" not in said
