"""Tests of cluster documents: the fields that placement reads, the defaults, the refusals."""

import copy

import pytest

from moorage.catalog.documents.clusters import (
    check_names,
    cluster_model,
    is_live,
    read_cluster_document,
)
from moorage.model import Code, Gpu
from moorage.protocol.faults import ServiceError


def node(name, gpus=None, **more):
    return {
        "id": name,
        "gpus": gpus or {},
        "vcpus": {"count": 8},
        "memory": 32768,
        "swap": 0,
        "storage": {"disks": 2, "size": 1000},
        "network": {"interfaces": 1, "txBandwidth": 100, "rxBandwidth": 200},
        **more,
    }


def document(*nodes, **more):
    return {"id": "cluster-1", "nodes": {"nodeData": list(nodes)}, **more}


L4S = {"count": 2, "memory": 48, "gpus": [{"modelName": "L4", "memory": 24}] * 2}


def test_placement_reads_a_documented_cluster():
    cluster = cluster_model(document(node("node-0", L4S, vcpus={"count": 7.5})))
    (found,) = cluster.nodes
    assert cluster.id == "cluster-1"
    assert (found.id, found.cpu_milli, found.memory_mib) == ("node-0", 7500, 32768)
    assert found.gpus == (Gpu("0", "L4", 24), Gpu("1", "L4", 24))


def test_placement_reads_the_optional_fields_of_devices_and_nodes():
    devices = [
        {"id": "gpu-a", "linkGroup": "x", "numa": 1, "exclusive": True},
        {"gpu_id": 7, "nvlinkGroup": 2},
    ]
    entry = node("n", {"count": 2, "gpus": devices}, rack="r1", labels={"zone": "a", "tier": 3})
    (found,) = cluster_model(document(entry)).nodes
    assert found.gpus == (
        Gpu("gpu-a", link_group="x", numa=1, exclusive=True),
        Gpu("7", link_group="2"),
    )
    assert found.rack == "r1"
    assert found.labels == {"zone": "a", "tier": "3"}


@pytest.mark.parametrize(
    ("group", "expected"),
    [
        ({"count": 2, "memory": 48, "modelNames": ["L4"]}, ("L4", 24)),
        ({"count": 2, "memory": 48, "gpus": [], "modelNames": ["L4"]}, ("L4", 24)),
        ({"count": "2", "memory": "48"}, ("", 24)),
    ],
)
def test_devices_given_only_by_their_number_get_ids(group, expected):
    (found,) = cluster_model(document(node("n", group))).nodes
    assert [(gpu.id, gpu.model, gpu.memory_mib) for gpu in found.gpus] == [
        ("0", *expected),
        ("1", *expected),
    ]


def test_devices_given_only_by_their_number_may_have_several_models():
    group = {"count": 2, "modelNames": ["L4", "T4"]}
    (found,) = cluster_model(document(node("n", group))).nodes
    assert [gpu.model for gpu in found.gpus] == ["L4", "T4"]


def test_a_cluster_without_nodes_is_valid():
    assert cluster_model({"id": "c"}).nodes == ()
    assert read_cluster_document({"id": "c", "regionId": "eu"}).document == {
        "id": "c",
        "regionId": "eu",
    }


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"id": ""}, "id"),
        ({"id": "../../admin"}, "id"),
        ({"id": "query"}, "id"),
        ({"id": 7}, "id"),
        ({"status": 1}, "status"),
        ({"nodes": []}, "nodes"),
        ({"nodes": {"nodeData": {}}}, "nodes.nodeData"),
    ],
)
def test_the_error_names_a_wrong_field_of_the_document(change, field):
    with pytest.raises(ServiceError) as caught:
        read_cluster_document({**document(node("n")), **change})
    assert (caught.value.code, caught.value.field) == (Code.BAD_MESSAGE, field)
    assert caught.value.reason.startswith(f"{field}: expected ")


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"id": None}, "id"),
        ({"id": "node-0"}, "id"),
        ({"gpus": {"count": -1}}, "gpus.count"),
        ({"gpus": {"count": 1.5}}, "gpus.count"),
        ({"gpus": {"count": 3, "gpus": [{}, {}]}}, "gpus.count"),
        ({"gpus": {"count": 129}}, "gpus.count"),
        ({"gpus": {"count": 1, "gpus": {}}}, "gpus.gpus"),
        ({"gpus": {"gpus": [{"memory": "much"}]}}, "gpus.gpus[0].memory"),
        ({"gpus": {"gpus": [{}, {"id": 0}, {"id": "0"}]}}, "gpus.gpus[1].id"),
        ({"gpus": {"gpus": ["L4"]}}, "gpus.gpus[0]"),
        ({"gpus": {"gpus": [{"numa": "left"}]}}, "gpus.gpus[0].numa"),
        ({"gpus": {"gpus": [{"exclusive": 1}]}}, "gpus.gpus[0].exclusive"),
        ({"vcpus": 8}, "vcpus"),
        ({"vcpus": {"count": True}}, "vcpus.count"),
        ({"memory": float("inf")}, "memory"),
        ({"memory": 274877906944}, "memory"),
        ({"labels": {"a": []}}, "labels.a"),
    ],
)
def test_the_error_names_a_wrong_field_of_a_node_and_the_nodes_position(change, path):
    with pytest.raises(ServiceError) as caught:
        cluster_model(document(node("node-0"), {**node("node-1"), **change}))
    assert caught.value.field == f"nodes.nodeData[1].{path}"


def test_an_error_names_the_expected_value():
    nodes = [node(f"node-{number}") for number in range(3)]
    with pytest.raises(ServiceError) as caught:
        cluster_model(document(*nodes, node("node-3", {"count": "two"})))
    expected = "nodes.nodeData[3].gpus.count: expected a whole number, 0 or more"
    assert caught.value.reason == expected


def test_aggregates_are_filled_in_where_the_document_omits_them():
    given = document(node("a", L4S), node("b", {"gpus": [{"memory": 80}]}), vcpus={"count": 99})
    before = copy.deepcopy(given)
    filled = read_cluster_document(given).document
    assert given == before
    assert filled["gpus"] == {"count": 3, "memory": 128}
    assert filled["vcpus"] == {"count": 99}
    assert (filled["memory"], filled["swap"]) == (65536, 0)
    assert filled["storage"] == {"disks": 4, "size": 2000}
    assert filled["network"] == {"interfaces": 2, "txBandwidth": 200, "rxBandwidth": 400}
    assert filled["nodes"]["count"] == 2
    assert filled["nodes"]["nodeData"] == given["nodes"]["nodeData"]


@pytest.mark.parametrize("status", [None, "live", "LIVE", "Active", "ready", "online"])
def test_clusters_with_a_live_status_are_candidates(status):
    assert is_live({"status": status})
    assert is_live({})


@pytest.mark.parametrize("status", ["", "down", "draining", "maintenance", 1])
def test_clusters_with_other_statuses_are_not_candidates(status):
    assert not is_live({"status": status})


@pytest.mark.parametrize(
    "text",
    [
        *("a\x00b", "a\nb", "\x1b[2J", "\x85", "a\u202eb", "a\u200bb", "a\u200f", "\ufeffa"),
        *("../../x", "a/..", "..\\x"),
    ],
)
@pytest.mark.parametrize(
    "field",
    [
        *("id", "rack", "zone", "unavailable", "machineId", "providerId", "labels.x"),
        *("gpus.gpus[0].modelName", "gpus.gpus[0].uuid"),
    ],
)
def test_names_with_unsafe_characters_are_refused(text: str, field: str) -> None:
    gpu = {field.rpartition(".")[2]: text} if "gpus" in field else {"modelName": "A100"}
    node = {"id": "n", "gpus": {"count": 1, "gpus": [gpu]}, "labels": {"x": "y"}}
    if field == "labels.x":
        node["labels"] = {"x": text}
    elif "gpus" not in field:
        node[field] = text
    document = {"id": "c", "nodes": {"nodeData": [{"id": "m"}, node]}}
    read = read_cluster_document(document)  # As a stored document is read.
    with pytest.raises(ServiceError) as refused:
        check_names(read.cluster)
    assert refused.value.field == f"nodes.nodeData[1].{field}"
    assert "control characters" in refused.value.reason


def test_names_with_dots_and_slashes_are_accepted() -> None:
    node = {"id": "rack1/n..1", "rack": "a.b", "labels": {"example.com/x": "v1...", "é": "ü"}}
    check_names(read_cluster_document({"id": "c", "nodes": {"nodeData": [node]}}).cluster)
    node = {"id": "n", "labels": {"a/../b": "x"}}
    read = read_cluster_document({"id": "c", "nodes": {"nodeData": [node]}})
    with pytest.raises(ServiceError, match="labels"):
        check_names(read.cluster)
