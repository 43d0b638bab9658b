"""Tests of metrics documents: both spellings of fields, and correct totals over nodes."""

import pytest

from moorage.catalog.documents.metrics import aggregate, read_metrics_document
from moorage.protocol.faults import ServiceError


def tree(name, *, free, gpus, util, load, disk):
    return {
        "id": name,
        "memory": {"freeMem": free, "usedMem": 10, "averageUtil": util},
        "vcpu": {"load1m": load, "load5m": load, "runningThreads": 3},
        "storage": {
            "freeMem": 1,
            "disks": {
                "memory": {"maxDisk": disk, "minDisk": disk},
                "iops": {"total": 5, "active": True},
            },
        },
        "network": {"txBytesTotal": 7, "ifaces": {"eth0": {"tx": 1}}},
        "gpu": {"totalFreeMem": 100 * gpus, "avgCudaUtilization": util, "count": gpus},
        "gpus": [{"gpu_id": number, "freeMem": 100} for number in range(gpus)],
    }


NODES = [
    tree("a", free=100, gpus=2, util=40, load=1.0, disk=50),
    tree("b", free=300, gpus=1, util=60, load=3.0, disk=20),
]


def test_totals_of_a_cluster_are_computed_from_its_nodes():
    totals = aggregate(NODES)
    assert totals["memory"] == {"freeMem": 400, "usedMem": 20, "averageUtil": 50}
    assert totals["vcpu"] == {"load1m": 2.0, "load5m": 2.0, "runningThreads": 6}
    assert totals["gpu"] == {"totalFreeMem": 300, "avgCudaUtilization": 50, "count": 3}
    assert totals["storage"]["disks"] == {
        "memory": {"maxDisk": 50, "minDisk": 20},
        "iops": {"total": 10},
    }
    assert totals["network"] == {"txBytesTotal": 14, "ifaces": {"eth0": {"tx": 2}}}
    assert "gpus" not in totals
    assert "id" not in totals


def test_nodes_without_devices_do_not_lower_the_averages_of_devices():
    idle = tree("c", free=0, gpus=0, util=0, load=2.0, disk=30)
    totals = aggregate([*NODES, idle])
    assert totals["gpu"] == {"totalFreeMem": 300, "avgCudaUtilization": 50, "count": 3}
    assert aggregate([idle])["gpu"]["avgCudaUtilization"] == 0


@pytest.mark.parametrize("name", ["node", "nodes"])
def test_both_spellings_of_the_node_list_are_accepted(name):
    cluster_id, document = read_metrics_document({"clusterId": "c", name: NODES})
    assert cluster_id == "c"
    assert document["node"] is document["nodes"]
    assert [entry["id"] for entry in document["nodes"]] == ["a", "b"]


@pytest.mark.parametrize("spelling", ["load5m", "load_5m"])
def test_a_metrics_document_has_both_spellings_of_the_load(spelling):
    given = {
        "clusterId": "c",
        "cluster": {"vcpu": {spelling: 4}},
        "nodes": [{"id": "a", "vcpu": {spelling: 2}}],
    }
    _, document = read_metrics_document(given)
    assert document["cluster"]["vcpu"] == {"load5m": 4, "load_5m": 4}
    assert document["nodes"][0]["vcpu"] == {"load5m": 2, "load_5m": 2}
    assert given["cluster"]["vcpu"] == {spelling: 4}


def test_totals_are_computed_only_if_the_document_lacks_them():
    _, added = read_metrics_document({"clusterId": "c", "nodes": NODES})
    assert added["cluster"]["memory"]["freeMem"] == 400
    assert added["cluster"]["vcpu"]["load_1m"] == 2.0
    _, given = read_metrics_document({"clusterId": "c", "nodes": NODES, "cluster": {"own": 1}})
    assert given["cluster"] == {"own": 1}


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ([], "body"),
        ({}, "clusterId"),
        ({"clusterId": "a/b"}, "clusterId"),
        ({"clusterId": "c", "nodes": {}}, "nodes"),
        ({"clusterId": "c", "node": [1]}, "node[0]"),
        ({"clusterId": "c", "cluster": 3}, "cluster"),
    ],
)
def test_the_refusal_of_a_metrics_document_names_each_wrong_field(given, field):
    with pytest.raises(ServiceError) as caught:
        read_metrics_document(given)
    assert caught.value.field == field
