"""Files of each accepted form become cluster documents, and errors name faults of files."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from moorage.lab import trace
from moorage.launch import command
from moorage_client.inventory import InventoryError, TableError, collect, merge_documents, read
from moorage_client.inventory.documents import machine_key
from moorage_client.inventory.kubernetes_live import PROGRAM, cluster_id_of

HERE = Path(__file__).parent
NODES = HERE / "kubernetes_nodes.json"
OPENB = HERE.parents[2] / "shared" / "data" / "openb" / "nodes.csv"
HEADER = "sn,cpu_milli,memory_mib,gpu,model\n"
CORDONED = {"unschedulable": True}


@pytest.fixture
def put(tmp_path):
    def put(name, content):
        path = tmp_path / name
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return str(path)

    return put


def node(name, **more):
    return {"id": name, "vcpus": {"count": 4}, "memory": 1024, **more}


def cluster(name, *nodes, **more):
    return {"id": name, "nodes": {"count": len(nodes), "nodeData": list(nodes)}, **more}


def ids(document):
    return [each["id"] for each in document["nodes"]["nodeData"]]


# Tables ------------------------------------------------------------------------------------------


@pytest.mark.trace
@pytest.mark.skipif(not OPENB.is_file(), reason=f"the production traces are not at {OPENB}")
def test_collect_and_the_trace_reader_make_the_same_document_of_openb():
    (document,) = collect([str(OPENB)], "openb").documents
    assert document == trace.cluster_document(trace.read_nodes(OPENB))
    assert (document["nodes"]["count"], document["gpus"]["count"]) == (1213, 6212)
    assert document["vcpus"]["count"] == 107_018


def test_a_table_written_by_a_spreadsheet_is_read(put):
    source = put("nodes.csv", "\ufeff" + HEADER + 'a,4500,1024,2,"T4"\r\nb,1000,512,0,\r\n')
    (document,) = collect([source], "lab").documents
    first, second = document["nodes"]["nodeData"]
    assert first["gpus"]["gpus"] == [{"modelName": "T4", "memory": 0}] * 2
    assert (first["vcpus"], first["memory"], second["gpus"]["count"]) == ({"count": 4.5}, 1024, 0)
    assert document["id"] == "lab"
    assert document["clusterMetadata"]["name"] == "lab"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        *(("site", "site"), ("größe", "grosse"), ("Flotte – Süd (2)", "Flotte-Sud-2")),
        *(("日本", ""), ("日本-1", "1")),
    ],
)
def test_a_cluster_id_is_made_from_the_file_name(put, name, expected):
    table = put(f"{name}.csv", HEADER + "a,1,1,0,\n")
    item = {"kind": "Node", "metadata": {"name": "b"}, "status": {"capacity": {"cpu": "1"}}}
    kubectl = put("prod.json", {"kind": "List", "items": [item]})
    if expected:
        documents = collect([table, kubectl]).documents
        assert [each["id"] for each in documents] == [expected, "prod"]
        assert documents[0]["clusterMetadata"]["name"] == expected
    else:
        with pytest.raises(InventoryError, match="give --cluster-id NAME"):
            collect([table])


@pytest.mark.parametrize("separator", [",", ";", "\t", ", "])
@pytest.mark.parametrize("above", ["", "sep=;\r\n"])
def test_a_table_of_machines_may_have_the_separator_of_the_locale(put, separator, above):
    above = above.replace(";", separator[0])
    whole = put("a.csv", above + (HEADER + "a,4500,1024,2,T4\n").replace(",", separator))
    (document,) = collect([whole]).documents
    assert document["gpus"]["count"] == 2
    bad = put("b.csv", above + (HEADER + "a,x,1,0,\n").replace(",", separator))
    with pytest.raises(TableError, match=f"line {3 if above else 2}, column cpu_milli"):
        collect([bad])


def test_a_table_with_other_columns_or_without_machines_is_refused(put):
    table = put("nodes.csv", "sn;cpu;memory_mib;model\na;1;1;T4\n")
    expected = "column cpu_milli, gpu: expected this in the header; it has sn, cpu, memory_mib"
    with pytest.raises(TableError, match=expected):
        collect([table])
    with pytest.raises(InventoryError, match="at least one machine"):
        collect([put("nodes.csv", HEADER)], "lab")


def test_stdin_is_read_like_a_file_without_a_name(monkeypatch):
    def put(rows):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO((HEADER + rows).encode())))

    put("a,1,1,0,\n")
    with pytest.raises(InventoryError, match=r"-: .*give --cluster-id NAME"):
        collect(["-"])
    put("a,1,x,0,\n")
    with pytest.raises(TableError, match=r"^stdin, line 2, column memory_mib"):
        read("-")


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"config": "current-context: kind-lab\n"}, "kind-lab"),
        ({"config": "kind: Config\n", "more": "current-context: prod\n"}, "prod"),
        ({"config": "current-context: ''\n"}, ""),
        ({"config": "[1, 2"}, ""),
        ({"config": "- a\n"}, ""),
    ],
)
def test_a_live_cluster_has_the_name_of_its_context(put, monkeypatch, files, expected):
    paths = [put(name, text) for name, text in files.items()]
    monkeypatch.setenv("KUBECONFIG", os.pathsep.join(["/nowhere/config", *paths]))
    assert cluster_id_of("kubernetes", "mine") == "mine"
    assert cluster_id_of("kubernetes:other", "") == "other"
    if expected:
        assert cluster_id_of("kubernetes", "") == expected
    else:
        with pytest.raises(InventoryError, match="--cluster-id"):
            cluster_id_of("kubernetes", "")


# Cluster documents -------------------------------------------------------------------------------


@pytest.mark.parametrize("wrap", [lambda d: d, lambda d: [d], lambda d: {"clusters": [d]}])
def test_cluster_documents_are_imported_unchanged(put, wrap):
    document = cluster("lab", node("a"), reputation=7)
    assert collect([put("lab.json", wrap(document))]).documents == (document,)


def test_a_single_cluster_can_be_renamed_and_a_node_is_listed_once(put):
    one, two = put("one.json", cluster("a", node("n"))), put("two.json", [cluster("a", node("n"))])
    assert [each["id"] for each in collect([one], "b").documents] == ["b"]
    with pytest.raises(InventoryError, match=r"two\.json: expected each node of cluster a once"):
        collect([one, two])
    several = put("several.json", [cluster("a"), cluster("b")])
    with pytest.raises(InventoryError, match=r"several\.json: expected one cluster to be called c"):
        collect([several], "c")


def test_sources_of_one_cluster_are_put_together(put):
    first = put("1.json", cluster("lab", node("a"), memory=1024, tags=["x"]))
    second = put("2.json", cluster("lab", node("b"), node("c"), memory=2048))
    other = put("3.json", cluster("bay", node("a")))
    lab, bay = collect([first, other, second]).documents
    assert (lab["id"], ids(lab), lab["nodes"]["count"]) == ("lab", ["a", "b", "c"], 3)
    assert lab["tags"] == ["x"]
    assert "memory" not in lab  # The server computes the total again.
    assert ids(bay) == ["a"]


@pytest.mark.parametrize(
    ("content", "place"),
    [
        ('{"id": "a",\n "nodes": }', "line 2"),
        ("[", "line 1"),
        ([], "expected cluster documents"),
        ([cluster("a"), 7], r"\[1\]: expected an object"),
        ([cluster("a"), {"clusterId": "b"}], r"\[1\].id: expected the id of a cluster"),
        ({"clusters": [{"id": ""}]}, r"clusters\[0\].id"),
        ({"name": "a"}, ", id: expected the id of a cluster"),
        ("[" * 100_000, "valid JSON"),
        ('{"id": "a", "memory": NaN}', "NaN is not JSON"),
        ('{"id": "a", "memory": -Infinity}', "-Infinity is not JSON"),
    ],
)
def test_errors_name_the_fault_in_a_document(put, content, place):
    with pytest.raises(InventoryError, match=place) as caught:
        collect([put("fleet.json", content)])
    assert "fleet.json" in str(caught.value)


def test_unreadable_files_are_errors(put, tmp_path):
    with pytest.raises(InventoryError, match=r"No such file.*") as caught:
        read(str(tmp_path / "none.csv"))
    assert "`local`, `kubernetes`, `ray`" in str(caught.value)
    with pytest.raises(InventoryError, match="Is a directory"):
        read(str(tmp_path))
    (tmp_path / "latin.csv").write_bytes(b"sn\n\xff")
    with pytest.raises(InventoryError, match=r"latin\.csv, line 2: expected text in UTF-8"):
        read(str(tmp_path / "latin.csv"))


def test_merging_replaces_nodes_by_id_and_keeps_everything_else():
    old = cluster("lab", node("a"), node("b", memory=1), tags=["x"], vcpus={"count": 8}, memory=9)
    new = cluster("lab", node("b", memory=2), node("c"), tags=["y"])
    both = merge_documents(old, new)
    assert both == {
        "id": "lab",
        "tags": ["x"],
        "nodes": {"count": 3, "nodeData": [node("a"), node("b", memory=2), node("c")]},
    }
    assert old["vcpus"] == {"count": 8}


# Kubernetes --------------------------------------------------------------------------------------


def by_name(document):
    return {each["id"]: each for each in document["nodes"]["nodeData"]}


def test_output_of_kubectl_becomes_a_cluster():
    found = collect([str(NODES)], "k8s")
    (document,) = found.documents
    assert (document["id"], document["regionId"]) == ("k8s", "eu-west-1")
    nodes = by_name(document)
    assert list(nodes) == ["gpu-a", "mig-a", "shared-a", "cpu-a"]
    whole = nodes["gpu-a"]
    assert whole["vcpus"] == {"count": 127.92}  # The allocatable amount, not the capacity.
    assert whole["memory"] == 1_031_664
    assert whole["rack"] == "r12"
    gpu = {"modelName": "NVIDIA-A100-SXM4-80GB", "memory": 81_920}
    assert whole["gpus"]["gpus"] == [gpu] * 8
    assert whole["gpus"]["memory"] == 8 * 81_920
    assert whole["labels"]["topology.kubernetes.io/zone"] == "eu-west-1a"
    assert not any(label.startswith(("feature.", "beta.")) for label in whole["labels"])
    assert nodes["cpu-a"]["gpus"] == {"count": 0, "memory": 0, "gpus": [], "modelNames": []}
    assert sorted(note.partition(": ")[2] for note in found.notes) == [
        "left out, since cordoned: cordoned",
        "left out, since not ready: lost",
    ]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"kind": "NodeList", "items": []}, r"none\.json: expected at least one node to import"),
        (
            {"kind": "NodeList", "items": [{"metadata": {"name": "a"}, "spec": CORDONED}]},
            "left out, since cordoned: a",
        ),
        ([{"node_id": "d", "state": "DEAD", "resources_total": {}}], "one node that is alive"),
        ({"kind": "List", "items": [{"kind": "Pod"}]}, "kubectl get nodes -o json"),
        ({"kind": "NodeList"}, r"items: expected a list of nodes"),
    ],
)
def test_the_import_of_nodes_none_of_which_can_be_used_is_refused(put, content, said):
    """With --replace, such a file would empty the registered cluster."""
    with pytest.raises(InventoryError, match=said):
        collect([put("none.json", content)], "lab")


def test_mig_instances_are_separate_devices_and_replicas_of_a_gpu_count_as_one_device():
    (document,) = collect([str(NODES)], "k8s").documents
    nodes = by_name(document)
    devices = nodes["mig-a"]["gpus"]["gpus"]
    instances = [f"mig-1g.10gb-{n}" for n in range(7)]
    assert [each.get("id", "") for each in devices] == ["", *instances, "mig-3g.40gb-0"]
    model = "NVIDIA-A100-SXM4-80GB-MIG-1g.10gb"
    own = {"modelName": model, "memory": 9728, "id": "mig-1g.10gb-0", "exclusive": True}
    assert devices[1] == own  # The memory is from the label …
    assert devices[8]["memory"] == 40 * 1024  # … or from the name.
    assert nodes["shared-a"]["gpus"]["gpus"] == [{"modelName": "Tesla-T4", "memory": 15_360}] * 2


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"status": {"capacity": {"cpu": "many"}}}, r"items\[0\].status.capacity.cpu: .*'many'"),
        ({"status": {"capacity": {"memory": "5Zi"}}}, r"items\[0\].status.capacity.memory"),
        ({"status": {"capacity": {"cpu": True}}}, r"items\[0\].status.capacity.cpu"),
        ({"status": {"capacity": {"x/gpu": "0.5"}}}, r"capacity.x/gpu: .*whole number"),
        ({"status": {"capacity": []}}, r"status.capacity: expected an object"),
        ({"metadata": {}}, r"items\[0\].metadata.name: expected the name"),
        ({"metadata": {"name": 7}}, r"items\[0\].metadata.name"),
        ({"metadata": {"name": "n", "labels": []}}, r"metadata.labels: expected an object"),
        (
            {"metadata": {"name": "n", "labels": {"nvidia.com/gpu.memory": "80GB"}}},
            r"metadata.labels.nvidia.com/gpu.memory: .*'80GB'",
        ),
        ({"kind": "Pod"}, r"items\[0\].kind: expected a Node"),
    ],
)
def test_errors_name_the_fault_in_a_node(put, change, said):
    item = {"kind": "Node", "metadata": {"name": "n"}, "status": {"capacity": {}}, **change}
    source = put("nodes.json", {"kind": "List", "items": [item]})
    with pytest.raises(InventoryError, match=said) as caught:
        collect([source], "k")
    assert str(caught.value).startswith(source)


@pytest.mark.parametrize(
    ("kind", "given", "count"),
    [
        *(("cpu", *each) for each in (("4", 4), ("63920m", 63.92), ("1.5", 1.5), ("2k", 2000))),
        *(("cpu", *each) for each in (("1e1", 10), (3, 3))),
        *(("memory", *each) for each in (("2Gi", 2048), ("1048576", 1), ("1073741824000m", 1024))),
        *(("memory", *each) for each in (("1M", 0), ("2100M", 2002))),
    ],
)
def test_quantities_are_read_as_the_kubernetes_api_writes_them(put, kind, given, count):
    item = {"kind": "Node", "metadata": {"name": "n"}, "status": {"capacity": {kind: given}}}
    (document,) = collect([put("node.json", item)], "k").documents
    assert (document["vcpus"]["count"] if kind == "cpu" else document["memory"]) == count


def node_list(*nodes):
    return {"kind": "NodeList", "items": list(nodes)}


def kubernetes_node(name, machine, provider):
    capacity = {"cpu": "4", "memory": "8Gi"}
    status = {"capacity": capacity, "nodeInfo": {"machineID": machine}}
    return {"metadata": {"name": name}, "spec": {"providerID": provider}, "status": status}


def test_nodes_of_kubernetes_identify_their_machines(put):
    one, two = "ec2a" * 8, "ec2b" * 8
    nodes = [kubernetes_node("a", one, "aws:///eu/i-1"), kubernetes_node("b", two, "aws:///eu/i-2")]
    (document,) = collect([put("nodes.json", node_list(*nodes))], "lab").documents
    first, second = document["nodes"]["nodeData"]
    assert first["machineId"] == machine_key(one) != machine_key(two) == second["machineId"]
    assert one not in str(document), "the document must not reveal the machine id"
    assert (first["providerId"], second["providerId"]) == ("aws:///eu/i-1", "aws:///eu/i-2")
    for wrong in ("", "uninitialized", "0" * 32, "ab", "zz" * 16):
        assert machine_key(wrong) == ""


def test_nodes_with_copies_of_one_disk_have_no_machine_id(put):
    same = "ec2a" * 8
    nodes = [kubernetes_node(name, same, f"p://{name}") for name in "ab"]
    found = collect([put("nodes.json", node_list(*nodes))], "lab")
    rows = found.documents[0]["nodes"]["nodeData"]
    assert [row.get("machineId") for row in rows] == [None, None]
    assert "2 nodes share a machine id" in found.notes[-1]


@pytest.mark.heavy
def test_the_program_that_reads_a_cluster_ends_although_stdin_is_open(tmp_path):
    job = {"cluster_id": "a", "context": "", "watch": False}
    environment = os.environ | {"KUBECONFIG": str(tmp_path / "absent")}
    reader, writer = os.pipe()
    try:
        done = subprocess.run(
            command(PROGRAM, json.dumps(job)),
            stdin=reader,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
    finally:
        os.close(reader)
        os.close(writer)
    assert "there is no kubeconfig" in done.stdout
    assert (done.returncode, done.stderr) == (0, "")
