"""Tests of the metrics documents that are made from samples of Prometheus, without a server."""

import pytest

from moorage.catalog.documents.metrics import read_metrics_document
from moorage.catalog.mirrored.samples import QUERIES, Labels, MetricSample, compose

NOW = 1_000_000.0
MIB = 1 << 20
LAB = {"lab": {"a", "b"}}


def dcgm(gpu, host="a", used=1000.0, free=3000.0, util=50.0, **labels):
    """Return Prometheus's answers about one GPU, with the labels of DCGM's exporter."""
    series = {"gpu": gpu, "Hostname": host, "modelName": "NVIDIA A100", "cluster": "lab"} | labels
    values = {
        "DCGM_FI_DEV_FB_USED": used,
        "DCGM_FI_DEV_FB_FREE": free,
        "DCGM_FI_DEV_GPU_UTIL": util,
        "DCGM_FI_DEV_POWER_USAGE": 200.5,
        "DCGM_FI_DEV_GPU_TEMP": 60.0,
    }
    return [(query, MetricSample(series, value)) for query, value in values.items()]


def host(instance="10.0.0.1:9100", **values):
    series = {"instance": instance, "cluster": "lab"}
    return [(query, MetricSample(series, value)) for query, value in values.items()]


MEMORY = {
    "node_memory_MemTotal_bytes": 1000.0 * MIB,
    "node_memory_MemAvailable_bytes": 750.0 * MIB,
    "node_memory_MemFree_bytes": 1.0 * MIB,
    "node_memory_SwapTotal_bytes": 10.0 * MIB,
    "node_memory_SwapFree_bytes": 4.0 * MIB,
    "node_load1": 0.5,
    "node_load5": 2.0,
    "node_load15": 1.0,
    "node_procs_running": 3.0,
}


def node_name(name, instance="10.0.0.1:9100"):
    labels = {"instance": instance, "nodename": name}
    return [("node_uname_info", MetricSample(labels, 1.0))]


def make_sample(half, at, node="a"):
    metric = {"gpu": "DCGM_FI_DEV_FB_USED", "host": "node_memory_MemTotal_bytes"}[half]
    labels = {"node": node, "cluster": "lab"}
    return [(f"timestamp({metric})", MetricSample(labels, at))]


def answers(*parts):
    found = {query: [] for query in QUERIES}
    for part in parts:
        for query, sample in part:
            found[query].append(sample)
    return found


def round_of(*parts, nodes=LAB, known=None, labels=None, now=NOW):
    return compose(
        answers(*parts), nodes, known or {}, labels or Labels(), now=now, stale_seconds=120
    )


def only(composed):
    (document,) = composed.documents
    return document


def store(document):
    """Return a stored document, as the next round gets it from the catalog."""
    cluster_id, stored = read_metrics_document(document)
    return {cluster_id: stored}


def test_each_query_to_prometheus_is_sent_once():
    assert len(set(QUERIES)) == len(QUERIES) == 17


def test_devices_have_the_documented_fields_and_numbers():
    document = only(round_of(dcgm("1"), dcgm("0", used=3000.0, free=1000.0, util=100.0)))
    (tree,) = document["nodes"]
    assert tree["gpus"][1] == {
        "gpu_id": 1,
        "usedMem": 1000,
        "freeMem": 3000,
        "totalMem": 4000,
        "memUtilization": 25.0,
        "cudaUtilization": 50,
        "powerUtilization": 200.5,
        "temperature": 60,
    }
    totals = {
        "count": 2,
        "totalUsedMem": 4000,
        "totalFreeMem": 4000,
        "totalMem": 8000,
        "avgMemUtilization": 50.0,
        "avgCudaUtilization": 75.0,
        "avgPowerUtilization": 200.5,
        "avgTemperature": 60.0,
    }
    assert tree["gpu"] == document["cluster"]["gpu"] == totals
    assert (tree["id"], tree["stale"], tree["timestamp"]) == ("a", False, NOW)
    assert (document["clusterId"], document["source"], document["stale"]) == (
        "lab",
        "prometheus",
        False,
    )


def test_the_memory_of_hosts_is_in_mib_and_a_host_name_names_the_node():
    document = only(round_of(host(**MEMORY), node_name("b")))
    (tree,) = document["nodes"]
    assert tree["id"] == "b"
    assert tree["memory"] == {
        "freeMem": 750,
        "usedMem": 250,
        "averageUtil": 25.0,
        "freeSwap": 4,
        "usedSwap": 6,
    }
    assert tree["vcpu"] == {"load1m": 0.5, "load5m": 2, "load15m": 1, "runningProcesses": 3}


def test_a_device_of_two_pods_counts_once_and_mig_instances_are_added_up():
    shared = [dcgm("0", pod=pod) for pod in ("x", "y")]
    instances = [dcgm("1", GPU_I_ID=each, used=100.0, free=400.0) for each in ("7", "8")]
    (tree,) = only(round_of(*shared, *instances))["nodes"]
    assert [each["totalMem"] for each in tree["gpus"]] == [4000, 1000]
    assert tree["gpus"][1]["powerUtilization"] == 200.5


@pytest.mark.parametrize(
    ("labels", "node"),
    [
        ({"node": "a"}, "a"),
        ({"instance": "a:9400"}, "a"),
        ({"instance": "a"}, "a"),
        ({"Hostname": "pod-x7", "instance": "b:9400"}, "b"),  # The first label with a known node.
        ({"node": "b", "Hostname": "a"}, "b"),
    ],
)
def test_the_first_label_that_names_a_known_node_decides(labels, node):
    series = {"gpu": "0", "cluster": "lab"} | labels
    sample = ("DCGM_FI_DEV_FB_USED", MetricSample(series, 1.0))
    assert only(round_of([sample]))["nodes"][0]["id"] == node


def test_the_labels_of_nodes_can_be_configured():
    series = {"gpu": "0", "site": "lab", "machine": "b", "node": "a"}
    sample = [("DCGM_FI_DEV_FB_USED", MetricSample(series, 1.0))]
    labels = Labels(cluster_label="site", node_labels=("machine",))
    assert only(round_of(sample, labels=labels))["nodes"][0]["id"] == "b"
    del series["site"]
    labels = Labels(cluster="lab")
    assert only(round_of(sample, labels=labels))["nodes"][0]["id"] == "a"


def test_the_first_label_names_the_node_if_the_cluster_lists_no_nodes():
    assert only(round_of(dcgm("0", host="x"), nodes={"lab": ()}))["nodes"][0]["id"] == "x"


def test_samples_without_a_cluster_are_reported():
    composed = round_of(
        dcgm("0", host="stranger"),
        dcgm("0", cluster="elsewhere"),
        dcgm("0", cluster=""),
        dcgm("first"),
        dcgm("9" * 5000),
    )
    assert composed.documents == []
    assert composed.findings.keys() == {
        "unknown node",
        "unknown cluster",
        "no cluster",
        "no device",
    }
    assert composed.findings["unknown node"].startswith("5 samples have no node of their cluster:")
    assert "'Hostname': 'stranger'" in composed.findings["unknown node"]


# Ages --------------------------------------------------------------------------------------------


def test_old_samples_are_marked_as_stale_and_have_no_part_in_the_totals():
    composed = round_of(
        dcgm("0"),
        make_sample("gpu", NOW - 121),
        dcgm("0", host="b", util=10.0),
        make_sample("gpu", NOW - 119, "b"),
    )
    document = only(composed)
    old, new = document["nodes"]
    assert (old["stale"], old["timestamp"]) == (True, NOW - 121)
    assert (new["stale"], new["timestamp"]) == (False, NOW - 119)
    assert document["cluster"]["gpu"]["avgCudaUtilization"] == 10
    assert document["stale"] is False
    assert (composed.fresh, composed.stale) == (1, 1)


def test_a_node_that_vanished_keeps_its_values_until_they_are_marked_as_stale():
    known = store(only(round_of(dcgm("0"), dcgm("0", host="b"))))
    soon = round_of(known=known, now=NOW + 60)
    assert (soon.documents, soon.fresh) == ([], 2)  # Nothing changed, so nothing is written.
    document = only(round_of(dcgm("0", host="b"), make_sample("gpu", NOW + 200, "b"), known=known))
    assert [tree["stale"] for tree in document["nodes"]] == [False, False]
    late = only(round_of(known=known, now=NOW + 121))
    assert [tree["stale"] for tree in late["nodes"]] == [True, True]
    assert late["stale"] is True
    assert late["cluster"]["gpu"]["count"] == 2  # Old totals are better than none.
    assert late["nodes"][0]["gpus"][0]["usedMem"] == 1000
    assert round_of(known=store(late), now=NOW + 500).documents == []


def test_a_node_without_the_values_of_one_exporter_is_stale():
    known = store(only(round_of(dcgm("0"), host("a:9100", **MEMORY))))
    later = NOW + 300
    fresh = make_sample("host", later)
    document = only(round_of(host("a:9100", **MEMORY), fresh, known=known, now=later))
    (tree,) = document["nodes"]
    assert (tree["timestamp"], tree["stale"]) == (NOW, True)
    assert tree["gpus"][0]["usedMem"] == 1000
    assert tree["memory"]["freeMem"] == 750


def test_a_node_that_left_its_cluster_is_forgotten():
    known = store(only(round_of(dcgm("0"), dcgm("0", host="b"))))
    document = only(round_of(dcgm("0", host="b"), nodes={"lab": {"b"}}, known=known))
    assert [tree["id"] for tree in document["nodes"]] == ["b"]


def test_the_catalog_accepts_documents_made_from_samples():
    document = only(round_of(dcgm("0"), host("a:9100", **MEMORY)))
    _, stored = read_metrics_document(document)
    assert stored["nodes"][0]["vcpu"]["load_5m"] == 2
    assert stored["node"] == stored["nodes"]
    assert stored["cluster"]["vcpu"]["load_5m"] == 2
    assert "timestamp" not in stored["cluster"]
