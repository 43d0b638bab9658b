"""What holds a GPU of this machine, whatever nodes call it: no workload starts beside that."""

import pytest

from moorage.backends.base import BackendError, Order
from moorage.backends.local.devices import Devices
from moorage.backends.local.gpus import Device, device_of
from moorage.backends.specs import ProcessResourceSpec
from moorage.model import ClusterId, NodeId, Share

SPEC = ProcessResourceSpec(command=["true"])


def order(name: str, node: str, *gpus: str, milli: int = 1000) -> Order:
    return Order(name, SPEC, (Share(ClusterId("c"), NodeId(node), gpus, milli),))


def test_a_machine_that_is_two_nodes_has_each_gpu_once():
    devices = Devices([], {})
    first = order("first", "one", "0")
    grant = devices.take(first)
    assert devices.take(first) == grant, "the same workload has it already"
    with pytest.raises(BackendError) as caught:
        devices.take(order("second", "two", "1", "0"))
    said = str(caught.value)
    assert said.startswith("GPU 0 of this machine is in use by the workload first, which has it as")
    assert "c/one, not of c/two: the same machine is registered twice" in said
    devices.take(order("third", "two", "1"))  # What was refused has nothing.
    devices.give("first")
    devices.take(order("second", "two", "0"))


def test_shares_of_one_gpu_are_one_gpu_at_most():
    devices = Devices([], {})
    for number in range(3):
        devices.take(order(f"share-{number}", f"node-{number}", "0", milli=300))
    with pytest.raises(BackendError, match="GPU 0 of this machine"):
        devices.take(order("whole", "node-0", "0"))
    with pytest.raises(BackendError, match="GPU 0 of this machine"):
        devices.take(order("share", "node-0", "0", milli=101))
    devices.take(order("rest", "node-9", "0", milli=100))


def test_ten_tenths_are_one_gpu():
    devices = Devices([], {})
    for number in range(10):
        devices.take(order(str(number), "node", "0", milli=100))
    with pytest.raises(BackendError, match="GPU 0"):
        devices.take(order("more", "node", "0", milli=1))


def test_an_instance_and_its_gpu_exclude_each_other_and_two_instances_do_not():
    devices = Devices([], {})
    devices.take(order("a", "one", "1:0"))
    devices.take(order("b", "two", "1:1"))
    for gpu in ("1", "1:0"):
        with pytest.raises(BackendError, match=f"GPU {gpu} of this machine"):
            devices.take(order("c", "three", gpu))
    for name in ("a", "b"):
        devices.give(name)
    devices.take(order("c", "three", "1"))
    with pytest.raises(BackendError, match="GPU 1:0 of this machine"):
        devices.take(order("a", "one", "1:0"))


def test_what_an_earlier_daemon_started_holds_its_gpus_too():
    before = Devices([], {})
    held = before.take(order("old", "one", "0", milli=600)).rows
    devices = Devices([], {"old": held})
    with pytest.raises(BackendError, match="in use by the workload old"):
        devices.take(order("new", "two", "0", milli=500))
    devices.give("old")
    devices.take(order("new", "two", "0", milli=500))


def test_what_needs_no_lease_and_what_has_one_do_not_meet_on_a_gpu():
    devices = Devices(["u0", "u1"], {})
    devices.take(order("leased", "one", "u0"))
    free = ProcessResourceSpec(command=["true"], gpus=1)
    with pytest.raises(BackendError, match=r"GPU u0 .* by the workload leased"):
        devices.take(Order("free", free))
    devices.give("leased")
    assert devices.take(Order("free", free)).gpus == ("u0",)
    with pytest.raises(BackendError, match="in use by the workload free"):
        devices.take(order("leased", "one", "u0"))


def test_without_nvml_an_id_is_a_device():
    assert device_of("3") == Device("3")
    assert device_of("3:1") == Device("3", "3:1")
    assert device_of("GPU-1") == Device("GPU-1")
