"""Tests of the reader of traces, and of the arithmetic of the published protocol."""

import csv
import json
from collections import Counter
from pathlib import Path

import pytest

from moorage.lab.trace import (
    TraceError,
    TraceNode,
    TracePod,
    arrivals,
    capacity_milli,
    cluster_document,
    permute_names,
    read_nodes,
    read_pods,
    typical_classes,
)
from moorage.model import Demand

DATA = Path(__file__).parents[3] / "shared" / "data" / "openb"
NODE_HEADER = "sn,cpu_milli,memory_mib,gpu,model"
POD_HEADER = "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec"


def write(tmp_path, *lines):
    path = tmp_path / "trace.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


# Reading ---------------------------------------------------------------------------------------


def test_nodes_are_read_by_the_names_of_their_columns(tmp_path):
    path = write(tmp_path, "model,gpu,extra,memory_mib,cpu_milli,sn", "T4,2,?,2048,64000,a")
    assert read_nodes(path) == [TraceNode("a", 64_000, 2048, 2, "T4")]


def test_pods_are_read_with_and_without_gpu_spec(tmp_path):
    path = write(tmp_path, POD_HEADER, "p,1000,512,1,250,V100M16|V100M32", "q,1000,512,0,0,")
    assert read_pods(path) == [
        TracePod("p", 1000, 512, 1, 250, ("V100M16", "V100M32")),
        TracePod("q", 1000, 512, 0, 0),
    ]
    path = write(tmp_path, POD_HEADER.removesuffix(",gpu_spec"), "p,1000,512,8,1000")
    assert read_pods(path) == [TracePod("p", 1000, 512, 8, 1000)]


@pytest.mark.parametrize(
    ("read", "lines", "line", "column"),
    [
        (read_nodes, [""], 1, "sn, cpu_milli, memory_mib, gpu, model"),
        (read_nodes, ["sn,cpu_milli,memory_mib,model", "a,1,1,T4"], 1, "gpu"),
        (read_nodes, [NODE_HEADER, "a,1,1,1,T4", "b,1,x,1,T4"], 3, "memory_mib"),
        (read_nodes, [NODE_HEADER, ",1,1,1,T4"], 2, "sn"),
        (read_nodes, [NODE_HEADER, "a,1,1,1,T4", "a,1,1,1,T4"], 3, "sn"),
        (read_nodes, [NODE_HEADER, "a,-1,1,1,T4"], 2, "cpu_milli"),
        (read_nodes, [NODE_HEADER, "a,1.5,1,1,T4"], 2, "cpu_milli"),
        (read_nodes, [NODE_HEADER, "a,١,1,1,T4"], 2, "cpu_milli"),
        (read_nodes, [NODE_HEADER, "a,1,1,1"], 2, ""),
        (read_nodes, [NODE_HEADER, "a,1,1,1,T4,more"], 2, ""),
        (read_nodes, [NODE_HEADER, 'a,1,1,1,"T4'], 2, ""),
        (read_pods, ["name,cpu_milli,memory_mib,num_gpu", "p,1,1,1"], 1, "gpu_milli"),
        (read_pods, [POD_HEADER, "p,1,1,1,1001,"], 2, "gpu_milli"),
        (read_pods, [POD_HEADER, "p,1,1,1,0,"], 2, "gpu_milli"),
        (read_pods, [POD_HEADER, "p,1,1,0,500,"], 2, "gpu_milli"),
        (read_pods, [POD_HEADER, "p,1,1,,500,"], 2, "num_gpu"),
    ],
)
def test_a_malformed_file_is_refused_with_its_line_and_column(tmp_path, read, lines, line, column):
    path = write(tmp_path, *lines)
    with pytest.raises(TraceError) as caught:
        read(path)
    assert (caught.value.line, caught.value.column) == (line, column)
    assert str(path) in str(caught.value)
    assert f"line {line}" in str(caught.value)
    assert column in str(caught.value)


def test_binary_files_are_refused(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_bytes(NODE_HEADER.encode() + b"\n\xff\xfe,1,1,1,T4\n")
    with pytest.raises(TraceError, match="UTF-8"):
        read_nodes(path)


# The protocol ----------------------------------------------------------------------------------

WHOLE = TracePod("w", 4000, 1024, 1, 1000)
HALF = TracePod("h", 2000, 1024, 1, 500)
EIGHT = TracePod("e", 8000, 1024, 8, 1000)
CPU = TracePod("c", 1000, 1024, 0, 0)


def pods_of(*pods):
    return [
        TracePod(f"p{n:03}", p.cpu_milli, p.memory_mib, p.gpus, p.gpu_milli, p.models)
        for n, p in enumerate(pods)
    ]


def test_typical_classes_of_requests_cover_the_requested_share():
    pods = [WHOLE] * 60 + [HALF] * 30 + [CPU] * 6 + [EIGHT] * 4
    classes = typical_classes(pods)
    assert [(kind["gpus"], kind["gpu_milli"], kind["weight"]) for kind in classes] == [
        (1, 1000, 60),
        (1, 500, 30),
        (0, 1000, 6),
    ]
    assert len(typical_classes(pods, share=1.0)) == 4
    assert typical_classes([]) == []


def test_the_sum_of_arrivals_reaches_the_limit_and_does_not_exceed_the_limit():
    pods = pods_of(*[WHOLE] * 10, *[HALF] * 10, *[CPU] * 5)
    order = arrivals(pods, 20_000, arrive=1.3, seed=7)
    assert Counter(order[:25]) == Counter(pods)  # The trace itself, shuffled, comes first …
    assert order[:25] != pods
    assert set(order[25:]) <= set(pods)  # … and then draws from it,
    total = sum(pod.demand_milli for pod in order)
    assert 26_000 - 1000 <= total <= 26_000  # … until the next pod would exceed the limit.


def test_arrivals_depend_on_the_seed_and_not_on_the_order_of_the_file():
    pods = pods_of(*[WHOLE] * 20, *[HALF] * 20)
    once = arrivals(pods, 50_000, seed=1)
    assert arrivals(pods[::-1], 50_000, seed=1) == once
    assert arrivals(pods, 50_000, seed=2) != once


def test_a_trace_above_the_limit_loses_gpu_requests_at_random():
    pods = pods_of(*[WHOLE] * 30, *[CPU] * 10)
    drawn = arrivals(pods, 10_000, arrive=1.0, seed=3)
    assert sum(pod.demand_milli for pod in drawn) == 10_000
    assert sum(not pod.gpus for pod in drawn) == 10
    assert set(drawn) != set(arrivals(pods, 10_000, arrive=1.0, seed=4))


def test_no_requests_are_added_to_a_trace_without_gpu_requests():
    assert len(arrivals(pods_of(*[CPU] * 7), 10_000)) == 7


def test_permuted_names_order_the_nodes_at_random_and_stay_distinct():
    nodes = [TraceNode(f"n{n}", 1000, 1024, 1, "T4") for n in range(40)]
    names = permute_names(nodes, 42)
    assert names == permute_names(nodes[::-1], 42)
    assert names != permute_names(nodes, 43)
    assert len(set(names.values())) == 40
    assert all(new.endswith(f"-{old}") for old, new in names.items())
    assert sorted(names, key=names.get) != sorted(names)


def test_the_cluster_document_describes_the_nodes():
    nodes = [TraceNode("a", 64_500, 2048, 2, "T4"), TraceNode("b", 1000, 1024, 0, "")]
    document = cluster_document(nodes, "openb", {"a": "1-a", "b": "0-b"})
    assert json.loads(json.dumps(document)) == document
    assert document["id"] == "openb"
    assert document["gpus"]["count"] == 2
    assert document["vcpus"]["count"] == 65.5
    assert document["memory"] == 3072
    first, second = document["nodes"]["nodeData"]
    assert (first["id"], second["id"]) == ("1-a", "0-b")
    assert first["vcpus"] == {"count": 64.5}
    assert [gpu["modelName"] for gpu in first["gpus"]["gpus"]] == ["T4", "T4"]
    assert second["gpus"] == {"count": 0, "memory": 0, "gpus": [], "modelNames": []}
    assert cluster_document(nodes)["nodes"]["nodeData"][0]["id"] == "a"


def test_a_pod_has_the_resources_of_a_request():
    assert TracePod("p", 1000, 512, 2, 1000, ("A",)).resources() == {
        "cpu_milli": 1000,
        "memory_mib": 512,
        "gpus": 2,
        "gpu_milli": 1000,
        "models": ["A"],
    }
    assert Demand(**CPU.resources()) == Demand(cpu_milli=1000, memory_mib=1024)


# The real files --------------------------------------------------------------------------------


@pytest.mark.trace
@pytest.mark.skipif(not DATA.is_dir(), reason=f"the production traces are not at {DATA}")
@pytest.mark.parametrize(
    ("trace", "pods", "typical"),
    [
        ("default", 8152, 35),
        ("cpu200", 8832, 34),
        ("gpushare40", 8152, 36),
        ("gpuspec33", 8152, 127),
        ("multigpu20", 8324, 38),
    ],
)
def test_the_published_traces_have_their_published_sizes(trace, pods, typical):
    nodes, requests = read_nodes(DATA / "nodes.csv"), read_pods(DATA / f"pods_{trace}.csv")
    assert (len(nodes), capacity_milli(nodes)) == (1213, 6_212_000)
    assert (len(requests), len(typical_classes(requests))) == (pods, typical)
    with (DATA / f"pods_{trace}.csv").open(newline="") as file:
        assert requests[-1].name == list(csv.DictReader(file))[-1]["name"]
    order = arrivals(requests, capacity_milli(nodes))
    assert 1.298 < sum(pod.demand_milli for pod in order) / 6_212_000 <= 1.3
