"""Files of every form become cluster documents, and what is wrong in them is named."""

import io
import json
import os
import sys
from pathlib import Path

import pytest

from moorage.lab import trace
from moorage_client.inventory import InventoryError, TableError, collect, merged, read
from moorage_client.inventory.documents import machine_key
from moorage_client.inventory.kubernetes_live import cluster_id_of

HERE = Path(__file__).parent
NODES = HERE / "kubernetes_nodes.json"
OPENB = HERE.parents[2] / "shared" / "data" / "openb" / "nodes.csv"
HEADER = "sn,cpu_milli,memory_mib,gpu,model\n"


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
def test_openb_is_the_document_that_the_commands_register():
    (document,) = collect([str(OPENB)], "openb").documents
    assert document == trace.cluster_document(trace.read_nodes(OPENB))
    assert (document["nodes"]["count"], document["gpus"]["count"]) == (1213, 6212)
    assert document["vcpus"]["count"] == 107_018


def test_a_table_as_a_spreadsheet_writes_it(put):
    source = put("nodes.csv", "\ufeff" + HEADER + 'a,4500,1024,2,"T4"\r\nb,1000,512,0,\r\n')
    (document,) = collect([source], "lab").documents
    first, second = document["nodes"]["nodeData"]
    assert first["gpus"]["gpus"] == [{"modelName": "T4", "memory": 0}] * 2
    assert (first["vcpus"], first["memory"], second["gpus"]["count"]) == ({"count": 4.5}, 1024, 0)
    assert document["id"] == "lab"
    assert document["clusterMetadata"]["name"] == "lab"


def test_a_file_that_names_no_cluster_is_one_of_its_own_name(put):
    table = put("site.csv", HEADER + "a,1,1,0,\n")
    node = {"kind": "Node", "metadata": {"name": "b"}, "status": {"capacity": {"cpu": "1"}}}
    kubectl = put("prod.json", json.dumps({"kind": "List", "items": [node]}))
    documents = collect([table, kubectl]).documents
    assert [each["id"] for each in documents] == ["site", "prod"]
    assert documents[0]["clusterMetadata"]["name"] == "site"


@pytest.mark.parametrize(
    ("name", "expected"),
    [("größe", "grosse"), ("Flotte – Süd (2)", "Flotte-Sud-2"), ("日本", ""), ("日本-1", "1")],
)
def test_a_cluster_is_called_as_its_file_in_the_letters_of_ids(put, name, expected):
    table = put(f"{name}.csv", HEADER + "a,1,1,0,\n")
    if expected:
        assert collect([table]).documents[0]["id"] == expected
    else:
        with pytest.raises(InventoryError, match="give --cluster-id NAME"):
            collect([table])


@pytest.mark.parametrize("separator", [",", ";", "\t", ", "])
@pytest.mark.parametrize("above", ["", "sep=;\r\n"])
def test_a_table_may_have_the_separator_of_the_locale(put, separator, above):
    above = above.replace(";", separator[0])
    whole = put("a.csv", above + (HEADER + "a,4500,1024,2,T4\n").replace(",", separator))
    (document,) = collect([whole]).documents
    assert document["gpus"]["count"] == 2
    bad = put("b.csv", above + (HEADER + "a,x,1,0,\n").replace(",", separator))
    with pytest.raises(TableError, match=f"line {3 if above else 2}, column cpu_milli"):
        collect([bad])


def test_a_table_with_other_columns_is_refused_with_those_it_has(put):
    table = put("nodes.csv", "sn;cpu;memory_mib;model\na;1;1;T4\n")
    expected = "column cpu_milli, gpu: expected this in the header; it has sn, cpu, memory_mib"
    with pytest.raises(TableError, match=expected):
        collect([table])


def test_stdin_has_no_name_for_its_cluster(monkeypatch):
    stdin = io.TextIOWrapper(io.BytesIO((HEADER + "a,1,1,0,\n").encode()))
    monkeypatch.setattr(sys, "stdin", stdin)
    with pytest.raises(InventoryError, match=r"-: .*give --cluster-id NAME"):
        collect(["-"])


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
def test_a_live_cluster_is_called_as_its_context(put, monkeypatch, files, expected):
    paths = [put(name, text) for name, text in files.items()]
    monkeypatch.setenv("KUBECONFIG", os.pathsep.join(["/nowhere/config", *paths]))
    assert cluster_id_of("kubernetes", "mine") == "mine"
    assert cluster_id_of("kubernetes:other", "") == "other"
    if expected:
        assert cluster_id_of("kubernetes", "") == expected
    else:
        with pytest.raises(InventoryError, match="--cluster-id"):
            cluster_id_of("kubernetes", "")


def test_a_bad_line_of_a_table_is_named(put):
    source = put("nodes.csv", HEADER + "a,1,1,0,\nb,1,many,0,\n")
    with pytest.raises(TableError, match=r"nodes\.csv, line 3, column memory_mib: .*'many'"):
        collect([source], "lab")


def test_a_table_without_machines_empties_no_cluster(put):
    table = put("nodes.csv", "sn,cpu_milli,memory_mib,gpu,model\n")
    with pytest.raises(InventoryError, match="at least one machine"):
        collect([table], "lab")


@pytest.mark.parametrize("name", ["NaN", "Infinity", "-Infinity"])
def test_what_python_reads_and_json_does_not_have_is_refused(put, name):
    source = put("clusters.json", f'{{"id": "a", "memory": {name}}}')
    with pytest.raises(InventoryError, match=f"{name} is not JSON"):
        collect([source])


def test_stdin_is_read_like_a_file(monkeypatch):
    text = io.TextIOWrapper(io.BytesIO((HEADER + "a,1,x,0,\n").encode()))
    monkeypatch.setattr("sys.stdin", text)
    with pytest.raises(TableError, match=r"^stdin, line 2, column memory_mib"):
        read("-")


# Cluster documents -------------------------------------------------------------------------------


@pytest.mark.parametrize("wrap", [lambda d: d, lambda d: [d], lambda d: {"clusters": [d]}])
def test_cluster_documents_stay_as_they_are(put, wrap):
    document = cluster("lab", node("a"), reputation=7)
    assert collect([put("lab.json", wrap(document))]).documents == (document,)


def test_a_single_cluster_can_be_renamed_and_several_cannot(put):
    one = put("one.json", cluster("a"))
    assert [each["id"] for each in collect([one], "b").documents] == ["b"]
    two = put("two.json", [cluster("a"), cluster("b")])
    with pytest.raises(InventoryError, match=r"two\.json: expected one cluster to be called c"):
        collect([two], "c")


def test_sources_of_one_cluster_are_put_together(put):
    first = put("1.json", cluster("lab", node("a"), memory=1024, tags=["x"]))
    second = put("2.json", cluster("lab", node("b"), node("c"), memory=2048))
    other = put("3.json", cluster("bay", node("a")))
    lab, bay = collect([first, other, second]).documents
    assert (lab["id"], ids(lab), lab["nodes"]["count"]) == ("lab", ["a", "b", "c"], 3)
    assert lab["tags"] == ["x"]
    assert "memory" not in lab  # The server adds it up again.
    assert ids(bay) == ["a"]


def test_a_node_that_two_sources_list_is_an_error(put):
    first, second = (put(f"{n}.json", cluster("lab", node("a"))) for n in (1, 2))
    with pytest.raises(InventoryError, match=r"2\.json: expected each node of cluster lab once"):
        collect([first, second])


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
    ],
)
def test_what_is_wrong_in_a_document_is_named(put, content, place):
    with pytest.raises(InventoryError, match=place) as caught:
        collect([put("fleet.json", content)])
    assert "fleet.json" in str(caught.value)


def test_files_that_cannot_be_read(put, tmp_path):
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
    both = merged(old, new)
    assert both == {
        "id": "lab",
        "tags": ["x"],
        "nodes": {"count": 3, "nodeData": [node("a"), node("b", memory=2), node("c")]},
    }
    assert old["vcpus"] == {"count": 8}


# Kubernetes --------------------------------------------------------------------------------------


@pytest.fixture
def kubernetes():
    return json.loads(NODES.read_text())


def by_name(document):
    return {each["id"]: each for each in document["nodes"]["nodeData"]}


def test_what_kubectl_prints_becomes_a_cluster():
    found = collect([str(NODES)], "k8s")
    (document,) = found.documents
    assert (document["id"], document["regionId"]) == ("k8s", "eu-west-1")
    nodes = by_name(document)
    assert list(nodes) == ["gpu-a", "mig-a", "shared-a", "cpu-a"]
    whole = nodes["gpu-a"]
    assert whole["vcpus"] == {"count": 127.92}  # What pods can have, not what there is.
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


def test_nodes_none_of_which_can_be_used_are_refused(tmp_path):
    """With --replace, they would empty the cluster that is registered."""
    empty = tmp_path / "empty.json"
    empty.write_text('{"kind": "NodeList", "items": []}')
    with pytest.raises(InventoryError, match=r"empty\.json: expected at least one node to import"):
        collect([str(empty)], "lab")
    node = {"metadata": {"name": "asleep"}, "spec": {"unschedulable": True}}
    empty.write_text(json.dumps({"kind": "NodeList", "items": [node]}))
    with pytest.raises(InventoryError, match="left out, since cordoned: asleep"):
        collect([str(empty)], "lab")
    dead = [{"node_id": "d", "state": "DEAD", "resources_total": {}}]
    empty.write_text(json.dumps(dead))
    with pytest.raises(InventoryError, match="one node that is alive"):
        collect([str(empty)], "lab")


def test_mig_instances_are_devices_that_are_not_shared(kubernetes):
    (document,) = collect([str(NODES)], "k8s").documents
    devices = by_name(document)["mig-a"]["gpus"]["gpus"]
    assert [each.get("id", "") for each in devices] == [
        "",
        *(f"mig-1g.10gb-{n}" for n in range(7)),
        "mig-3g.40gb-0",
    ]
    assert devices[1] == {
        "modelName": "NVIDIA-A100-SXM4-80GB-MIG-1g.10gb",
        "memory": 9728,  # As its label says …
        "id": "mig-1g.10gb-0",
        "exclusive": True,
    }
    assert devices[8]["memory"] == 40 * 1024  # … or as its name does.


def test_time_sliced_replicas_are_one_device(kubernetes):
    (document,) = collect([str(NODES)], "k8s").documents
    shared = by_name(document)["shared-a"]["gpus"]
    assert shared["gpus"] == [{"modelName": "Tesla-T4", "memory": 15_360}] * 2


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
def test_what_is_wrong_in_a_node_is_named(put, kubernetes, change, said):
    item = {"kind": "Node", "metadata": {"name": "n"}, "status": {"capacity": {}}, **change}
    source = put("nodes.json", {"kind": "List", "items": [item]})
    with pytest.raises(InventoryError, match=said) as caught:
        collect([source], "k")
    assert str(caught.value).startswith(source)


@pytest.mark.parametrize(
    ("given", "milli"),
    [("4", 4000), ("63920m", 63_920), ("1.5", 1500), ("2k", 2_000_000), ("1e1", 10_000), (3, 3000)],
)
def test_quantities_are_those_of_the_api(put, given, milli):
    item = {"kind": "Node", "metadata": {"name": "n"}, "status": {"capacity": {"cpu": given}}}
    (document,) = collect([put("node.json", item)], "k").documents
    assert document["vcpus"]["count"] * 1000 == milli


@pytest.mark.parametrize(
    ("given", "mib"),
    [("2Gi", 2048), ("1048576", 1), ("1073741824000m", 1024), ("1M", 0), ("2100M", 2002)],
)
def test_memory_is_counted_in_mib(put, given, mib):
    item = {"kind": "Node", "metadata": {"name": "n"}, "status": {"capacity": {"memory": given}}}
    (document,) = collect([put("node.json", item)], "k").documents
    assert document["memory"] == mib


def test_a_list_of_anything_else_is_refused(put):
    pods = put("pods.json", {"kind": "List", "items": [{"kind": "Pod"}]})
    with pytest.raises(InventoryError, match="kubectl get nodes -o json"):
        collect([pods], "k")
    with pytest.raises(InventoryError, match=r"items: expected a list of nodes"):
        collect([put("none.json", {"kind": "NodeList"})], "k")


def listed(*nodes):
    return {"kind": "NodeList", "items": list(nodes)}


def kubernetes_node(name, machine, provider):
    return {
        "metadata": {"name": name},
        "spec": {"providerID": provider},
        "status": {
            "capacity": {"cpu": "4", "memory": "8Gi"},
            "nodeInfo": {"machineID": machine},
        },
    }


def test_nodes_of_kubernetes_say_which_machines_they_are(put):
    one, two = "ec2a" * 8, "ec2b" * 8
    nodes = [kubernetes_node("a", one, "aws:///eu/i-1"), kubernetes_node("b", two, "aws:///eu/i-2")]
    (document,) = collect([put("nodes.json", listed(*nodes))], "lab").documents
    first, second = document["nodes"]["nodeData"]
    assert first["machineId"] == machine_key(one) != machine_key(two) == second["machineId"]
    assert one not in str(document), "others are not to know it"
    assert (first["providerId"], second["providerId"]) == ("aws:///eu/i-1", "aws:///eu/i-2")


def test_copies_of_one_disk_have_no_machine_id(put):
    same = "ec2a" * 8
    nodes = [kubernetes_node(name, same, f"p://{name}") for name in "ab"]
    found = collect([put("nodes.json", listed(*nodes))], "lab")
    rows = found.documents[0]["nodes"]["nodeData"]
    assert [row.get("machineId") for row in rows] == [None, None]
    assert "2 nodes share their machine id" in found.notes[-1]


@pytest.mark.parametrize("given", ["", "uninitialized", "0" * 32, "ab", "zz" * 16])
def test_what_is_no_machine_id_tells_nothing(given):
    assert machine_key(given) == ""
