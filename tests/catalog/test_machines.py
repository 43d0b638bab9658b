"""One machine is registered once, under whichever name."""

import pytest

from moorage.catalog.documents.clusters import cluster_model
from moorage.catalog.opening import open_catalog
from moorage.model import Code, Gpu
from moorage.protocol.faults import ServiceError
from moorage.protocol.on_behalf import ON_BEHALF_OF
from moorage.records.rights import SERVER_ITSELF
from moorage.storage.sqlite.records import SqliteRecords


def node(name, *uuids, **more):
    devices = [{"modelName": "A100", "memory": 80, "uuid": uuid} for uuid in uuids]
    return {"id": name, "gpus": {"gpus": devices}, "vcpus": {"count": 4}, "memory": 1024, **more}


def cluster(name, *nodes):
    return {"id": name, "status": "live", "nodes": {"nodeData": list(nodes)}}


async def refusal(work, place="nodes.nodeData[0]"):
    with pytest.raises(ServiceError) as caught:
        await work
    assert caught.value.code is Code.CONFLICT
    assert caught.value.field == place
    return caught.value


def test_nodes_with_equal_devices_share_one_list_of_devices():
    one = node("a", "GPU-AB", machineId="m", providerId="aws:///eu/i-1")
    (first, second) = cluster_model(cluster("c", one, node("b", "GPU-CD"))).nodes
    assert first.identity == ("machine m", "provider aws:///eu/i-1", "device gpu-ab")
    assert second.identity == ("device gpu-cd",)
    assert first.gpus == (Gpu("0", "A100", 80),)
    assert first.gpus is second.gpus, "nodes of one kind share one record of devices"


@pytest.mark.parametrize(
    "same",
    [
        node("x", "GPU-1"),
        node("x", "gpu-1", machineId="other"),
        node("x", machineId="m"),
        node("x", machineId="m", providerId="p"),
        node("x", " GPU-1"),
        node("x", machineId="M "),
    ],
)
async def test_the_refusal_of_a_second_name_of_a_machine_has_the_registered_name(catalog, same):
    await catalog.clusters.create(cluster("lab", node("gpu1", "GPU-1", machineId="m")))
    error = await refusal(catalog.clusters.create(cluster("copy", node("own"), same)), NODE_1)
    assert "copy/x is the machine that is registered as lab/gpu1" in error.reason
    assert "take it out of lab first" in error.reason
    assert error.details == {"node": "copy/x", "registered_as": "lab/gpu1"}
    with pytest.raises(ServiceError):
        await catalog.clusters.get("copy")


NODE_1 = "nodes.nodeData[1]"


async def test_a_refusal_names_the_tenant_that_owns_the_machine(catalog):
    await catalog.clusters.create(cluster("lab", node("gpu1", "GPU-1")), "bob")
    await catalog.clusters.create(cluster("agents", node("gpu2", "GPU-2")), SERVER_ITSELF)
    await catalog.clusters.create(cluster("mine"), "mallory")
    ON_BEHALF_OF.set("mallory")
    taken = [node("own"), node("x", "GPU-9", "gpu-1")]
    change = {"$set": {"nodes.nodeData": taken}}
    for work in (
        catalog.clusters.create(cluster("copy", *taken), "mallory"),
        catalog.clusters.update("mine", change),
        catalog.clusters.add_nodes("mine", cluster("mine", *taken), "mallory"),
    ):
        reason = (await refusal(work, NODE_1)).reason
        assert "registered as lab/gpu1" in reason
        assert (
            "ask an operator to take it out of lab first, which belongs to the tenant “bob”"
            in reason
        )
    reason = (await refusal(catalog.clusters.create(cluster("copy", node("x", "GPU-2"))))).reason
    assert "take it out of agents first, which belongs to the server" in reason
    ON_BEHALF_OF.set("bob")
    reason = (await refusal(catalog.clusters.create(cluster("copy", node("x", "GPU-1"))))).reason
    assert "To move it, take it out of lab first;" in reason
    await catalog.clusters.update("lab", {"$set": {"nodes.nodeData": []}})
    await catalog.clusters.update("mine", change)


async def test_similar_but_different_machines_are_registered(catalog):
    await catalog.clusters.create(cluster("lab", node("gpu1", "GPU-1", machineId="m")))
    copy = node("gpu1", "GPU-2", machineId="m")
    nothing_known = {**node("plain"), "gpus": {"gpus": [{"id": "0"}, {"id": "1"}]}}
    await catalog.clusters.create(cluster("other", copy, nothing_known))
    await catalog.clusters.create(cluster("third", nothing_known))


async def test_two_nodes_of_one_document_with_one_identity_are_one_machine(catalog):
    document = cluster("lab", node("a", machineId="m"), node("b", machineId="m"))
    assert (
        "registered as lab/a" in (await refusal(catalog.clusters.create(document), NODE_1)).reason
    )


async def test_a_mig_instance_and_its_gpu_are_one_machine(catalog):
    await catalog.clusters.create(cluster("lab", node("a", "GPU-1")))
    part = node("b", "MIG-1")
    part["gpus"]["gpus"][0]["parentUuid"] = "GPU-1"
    await refusal(catalog.clusters.create(cluster("copy", part)))
    both = node("c", "GPU-5", "MIG-5")
    both["gpus"]["gpus"][1]["parentUuid"] = "GPU-5"
    with pytest.raises(ServiceError, match=r"gpus\.gpus\[1\]\.uuid") as caught:
        await catalog.clusters.create(cluster("copy", both))
    assert caught.value.code is Code.BAD_MESSAGE


async def test_a_machine_can_be_updated_renamed_and_moved(catalog):
    await catalog.clusters.create(cluster("lab", node("a", machineId="m"), node("b")))
    await catalog.clusters.update("lab", {"$set": {"region": "eu"}})
    renamed = cluster("lab", node("new-name", machineId="m"), node("b"))
    await catalog.clusters.update("lab", renamed)
    await catalog.clusters.create(cluster("hall", node("x")))
    moved = cluster("hall", node("new-name", machineId="m"))
    await refusal(catalog.clusters.update("hall", moved))
    await catalog.clusters.update("lab", cluster("lab", node("b")))
    await catalog.clusters.update("hall", moved)
    await refusal(catalog.clusters.update("lab", cluster("lab", node("b", machineId="m"))))
    await catalog.clusters.delete("hall")
    await catalog.clusters.create(cluster("third", node("c", machineId="m")))


async def test_machines_are_known_after_a_restart(tmp_path):
    path = tmp_path / "catalog.db"
    catalog = await open_catalog(SqliteRecords(path))
    await catalog.clusters.create(cluster("lab", node("a", machineId="m")))
    await catalog.close()
    catalog = await open_catalog(SqliteRecords(path))
    await refusal(catalog.clusters.create(cluster("copy", node("a", machineId="m"))))
    await catalog.close()
