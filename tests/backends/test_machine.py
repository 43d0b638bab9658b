"""A machine is identified by its data folder and its machine id, since host names change."""

import platform

import pytest
from msgspec.structs import replace

from moorage.backends.base import Order, Phase, UnsupportedSpecError
from moorage.backends.local import machine
from moorage.backends.local.backend import LocalBackend
from moorage.backends.local.machine import NAMES_MAX, RegisteredNode
from moorage.backends.specs import ProcessResourceSpec
from moorage.model import Cluster, ClusterId, Node, NodeId, Share
from moorage.protocol.cluster_documents import machine_key


@pytest.fixture
def set_hostname(monkeypatch):
    """Give this machine another host name."""
    return lambda name: monkeypatch.setattr(platform, "node", lambda: name)


def test_a_renamed_machine_keeps_its_nodes(tmp_path, set_hostname):
    for name, known in (
        ("", ("localhost",)),
        ("cloud-image", ("localhost", "cloud-image")),
        ("dhcp-7", ("localhost", "cloud-image", "dhcp-7")),
        ("cloud-image", ("localhost", "cloud-image", "dhcp-7")),
    ):
        set_hostname(name)
        assert machine.names_of(tmp_path, ()) == known


def test_a_container_with_a_new_host_name_keeps_its_node(tmp_path, set_hostname):
    set_hostname("first")
    machine.names_of(tmp_path, ())
    machine.write_registration(tmp_path, RegisteredNode("lab", "second"))
    for number in range(40):
        set_hostname(f"container-{number}")
        names = machine.names_of(tmp_path, ())
        assert names[0] == "first"
        assert {f"container-{number}", "second", "localhost"} <= set(names)
        assert len(names) <= NAMES_MAX + 2
    assert machine.read_registration(tmp_path) == RegisteredNode("lab", "second")


@pytest.mark.parametrize("remembers", [True, False])
def test_the_machine_id_is_used_only_without_a_stored_node(
    tmp_path, set_hostname, monkeypatch, remembers
):
    """Copies of one disk share their machine id, and so do containers of one image."""
    file = tmp_path / "machine-id"
    file.write_text("0123456789abcdef0123456789abcdef\n")
    monkeypatch.setattr(machine, "_MACHINE_ID", file)
    key = machine_key(file.read_text().strip())
    node = Node(NodeId("before"), 1000, 1024, identity=(f"machine {key}",))
    other = replace(node, id=NodeId("other"), identity=("machine 77",))
    set_hostname("now")
    if remembers:
        machine.names_of(tmp_path, ())
    names = machine.names_of(tmp_path, [Cluster(ClusterId("c"), (node, other))])
    assert names == (("now",) if remembers else ("before", "now")) + ("localhost",)


async def test_workloads_keep_running_when_nodes_are_renamed(tmp_path):
    """A change of the setting `local_nodes` renames nodes."""
    spec = ProcessResourceSpec(command=["sleep", "1000"])
    there = (Share(ClusterId("c"), NodeId("old")),)
    before = LocalBackend(tmp_path, ["old"])
    await before.start(Order("a", spec, there))
    await before.close()
    after = LocalBackend(tmp_path, ["new"])
    try:
        assert (await after.start(Order("a", spec, there))).phase is Phase.READY
        with pytest.raises(UnsupportedSpecError, match="starts on new, not on c/old"):
            await after.start(Order("b", spec, there))
    finally:
        await after.stop("a")
    with pytest.raises(UnsupportedSpecError, match="starts on new, not on c/old"):
        await after.start(Order("a", spec, there))
    await after.close()
