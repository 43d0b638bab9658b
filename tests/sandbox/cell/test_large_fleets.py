"""Policies can read a fleet of 10,000 clusters within the default memory and bounds."""

import msgspec
import pytest
import pytest_asyncio

from moorage.sandbox.host.sandbox import Document, Limits

CLUSTERS = 10_000
IN_ONE_LOOP = pytest.mark.asyncio(loop_scope="module")
SUM = 'sum(gpu["free"] for node in entry["cluster_metrics"]["nodes"] for gpu in node["gpus"])'
FREE = CLUSTERS * 4 * 8 * 7
LOOP = f"""
import random
clusters, metrics = self.settings["cluster_client"], self.settings["cluster_metrics_client"]
cluster_data = input_data["cluster_data"]
names, free, read = list(cluster_data), 0, 0
if input_data["inputs"].get("shuffle"):
    random.Random(1).shuffle(names)
for name in names:
    entry = cluster_data[name]
    free += {SUM}
    read += CALL == name
return [free, read]
"""
CALLS = {
    "read_cluster": 'clusters.read_cluster(name)[1]["id"]',
    "get_cluster": 'metrics.get_cluster(name)["clusterId"]',
    "execute_query": 'clusters.execute_query({"id": name})[1][0]["id"]',
    "query_clusters": 'metrics.query_clusters({"clusterId": name})[0]["clusterId"]',
}


def _document(name):
    gpus = [{"id": str(gpu), "model": "NVIDIA H100 80GB", "memory": 81920} for gpu in range(8)]
    nodes = [{"id": f"n{node}", "memory": 512_000, "gpus": gpus} for node in range(4)]
    return {"id": name, "nodes": nodes, "tags": ["a", "b"], "region": "eu"}


def _metrics(name):
    gpus = [{"id": gpu, "free": 7, "total": 81920.5, "utilization": 3.5} for gpu in range(8)]
    load = {"load_1m": 1.5, "load_5m": 2.5, "load_15m": 3.5}
    nodes = [{"id": f"n{node}", "vcpu": load, "gpus": gpus} for node in range(4)]
    return {"clusterId": name, "nodes": nodes}


class LargeFleet:
    """Services with documents of 4 nodes with 8 GPUs each."""

    def __init__(self, names):
        pack = msgspec.msgpack.encode
        self._packed = {
            "read_cluster": {name: pack(_document(name)) for name in names},
            "get_cluster": {name: pack(_metrics(name)) for name in names},
        }

    async def call(self, client, method, arguments):
        (query,) = arguments
        return [_document(query["id"]) if client == "cluster_client" else _metrics(*query.values())]

    def at_hand(self, client, method, ids):
        del client
        known = self._packed.get(method, {})
        return {name: known[name] for name in ids if name in known}

    def documents(self, cluster_ids):
        documents, metrics = self._packed.values()
        return [
            Document(
                name, 1, b"\x82\xa4data" + documents[name] + b"\xafcluster_metrics" + metrics[name]
            )
            for name in cluster_ids
        ]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def large(make_common):
    bench = await make_common(clusters=CLUSTERS, limits=Limits(evaluation_seconds=60.0))
    bench.registry.__dict__["fleet"] = fleet = LargeFleet(bench.fleet.cluster_ids)
    for name in ("call", "at_hand", "documents"):
        setattr(bench.registry, name, getattr(fleet, name))
    return bench


@IN_ONE_LOOP
@pytest.mark.parametrize(
    ("shuffle", "named"), [(False, True), pytest.param(True, False, marks=pytest.mark.heavy)]
)
async def test_a_policy_reads_each_candidate_in_any_order(large, shuffle, named):
    names = large.fleet.cluster_ids
    code = large.policy(LOOP.replace("CALL", CALLS["read_cluster"]), "reads")
    candidates = (*names[5000:], *names[:5000]) if named else None
    value = await large.value(code, {"shuffle": shuffle}, candidates=candidates)
    assert value == [FREE, CLUSTERS]


@IN_ONE_LOOP
@pytest.mark.heavy
@pytest.mark.parametrize("method", ["get_cluster", "execute_query", "query_clusters"])
async def test_a_policy_calls_each_method_for_each_candidate(large, method):
    code = large.policy(LOOP.replace("CALL", CALLS[method]), method)
    assert await large.value(code, {"shuffle": True}) == [FREE, CLUSTERS]


@IN_ONE_LOOP
@pytest.mark.parametrize(
    "body",
    [
        f"return sum({SUM} for entry in input_data['cluster_data'].values())",
        f"return sum({SUM} for _, entry in input_data['cluster_data'].items())",
    ],
)
async def test_loops_over_cluster_data_fit_in_the_default_memory(large, body):
    assert await large.value(large.policy(body, "loops")) == FREE


@IN_ONE_LOOP
@pytest.mark.heavy
async def test_large_input_can_be_written_as_json(large):
    body = "import json\nreturn json.dumps(input_data).count('NVIDIA')"
    assert await large.value(large.policy(body, "dumps")) == CLUSTERS * 4 * 8


@IN_ONE_LOOP
async def test_the_refusal_of_a_policy_that_holds_too_much_names_the_setting_to_raise(large):
    body = "return len([dict(entry) for entry in input_data['cluster_data'].values()])"
    refusal = await large.refusal(large.policy(body, "holds"))
    assert refusal.code == "policy_memory"
    assert "policy_memory_mib" in refusal.reason
    assert refusal.expected == "a policy that needs less memory, or a higher policy_memory_mib"


@IN_ONE_LOOP
async def test_documents_that_a_policy_changes_or_holds_are_not_dropped(large):
    value = await large.value(
        large.policy(
            """
cluster_data = input_data["cluster_data"]
first, second, third, fourth, fifth, sixth = names = list(cluster_data)[:6]
cluster_data[first]["data"]["nodes"][0]["memory"] = 1
cluster_data[second]["score"] = 2
held = cluster_data[third]["data"]["nodes"][3]
cluster_data[fourth]["capacity"]["n0"]["cpu_milli"] = 4
del cluster_data[fifth]["metrics"]
entry = cluster_data[sixth]
before = entry["data"]
same = id(before)
del before
assert all(each["data"]["id"] == name for name, each in cluster_data.items())
held["memory"] = 3
assert cluster_data[sixth] is entry
return [
    cluster_data[first]["data"]["nodes"][0]["memory"],
    cluster_data[second]["score"],
    cluster_data[third]["data"]["nodes"][3]["memory"],
    cluster_data[fourth]["capacity"]["n0"]["cpu_milli"],
    list(cluster_data[fifth]),
    [name for name in names if dict.__getitem__(cluster_data[name], "data").__class__ is dict],
    entry["capacity"]["n1"]["cpu_milli"],
]
""",
            "changes",
        )
    )
    names = large.fleet.cluster_ids
    assert value == [1, 2, 3, 4, ["data", "cluster_metrics"], list(names[:5]), 64_000]
