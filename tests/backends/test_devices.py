"""No workload starts on a GPU of this machine that is in use, whatever name the order uses."""

import json
import sys

import pytest

from moorage.backends.base import BackendError, Order
from moorage.backends.local.devices import Devices
from moorage.backends.local.gpus import Device, device_of, look_again
from moorage.backends.specs import ProcessResourceSpec
from moorage.model import ClusterId, DeviceId, NodeId, Share

SPEC = ProcessResourceSpec(command=["true"])


def order(name: str, node: str, *gpus: str, milli: int = 1000) -> Order:
    return Order(name, SPEC, (Share(ClusterId("c"), NodeId(node), gpus, milli),))


def test_two_nodes_on_one_machine_share_its_gpus():
    devices = Devices([], {})
    first = order("first", "one", "0")
    grant = devices.take(first)
    assert devices.take(first) == grant, "the same workload already holds it"
    with pytest.raises(BackendError) as caught:
        devices.take(order("second", "two", "1", "0"))
    said = str(caught.value)
    assert said.startswith("GPU 0 of this machine is in use by the workload first, which has it as")
    assert "c/one, not of c/two: the same machine is registered twice" in said
    devices.take(order("third", "two", "1"))  # The refused workload holds nothing.
    devices.give("first")
    devices.take(order("second", "two", "0"))


def test_shares_of_one_gpu_add_up_to_at_most_one():
    devices = Devices([], {})
    for number in range(3):
        devices.take(order(f"share-{number}", f"node-{number}", "0", milli=300))
    with pytest.raises(BackendError, match="GPU 0 of this machine"):
        devices.take(order("whole", "node-0", "0"))
    with pytest.raises(BackendError, match="GPU 0 of this machine"):
        devices.take(order("share", "node-0", "0", milli=101))
    devices.take(order("rest", "node-9", "0", milli=100))


def test_ten_shares_of_a_tenth_fit_on_one_gpu():
    devices = Devices([], {})
    for number in range(10):
        devices.take(order(str(number), "node", "0", milli=100))
    with pytest.raises(BackendError, match="GPU 0"):
        devices.take(order("more", "node", "0", milli=1))


def test_a_mig_instance_and_its_gpu_exclude_each_other_and_two_instances_of_a_gpu_do_not():
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


def test_workloads_of_an_earlier_daemon_still_hold_their_gpus():
    before = Devices([], {})
    held = before.take(order("old", "one", "0", milli=600)).rows
    devices = Devices([], {"old": held})
    with pytest.raises(BackendError, match="in use by the workload old"):
        devices.take(order("new", "two", "0", milli=500))
    devices.give("old")
    devices.take(order("new", "two", "0", milli=500))


def test_workloads_with_and_without_a_lease_share_no_gpu():
    devices = Devices(["u0", "u1"], {})
    devices.take(order("leased", "one", "u0"))
    free = ProcessResourceSpec(command=["true"], gpus=1)
    with pytest.raises(BackendError, match=r"GPU u0 .* by the workload leased"):
        devices.take(Order("free", free))
    devices.give("leased")
    assert devices.take(Order("free", free)).gpus == ("u0",)
    with pytest.raises(BackendError, match="in use by the workload free"):
        devices.take(order("leased", "one", "u0"))


def test_without_nvml_each_id_counts_as_a_device():
    assert device_of("3") == Device("3")
    assert device_of("3:1") == Device("3", "3:1")
    assert device_of("GPU-1") == Device("GPU-1")


NVML = '''
"""What NVML says of the GPUs that a file names, one a line: `a`, or `a b c`, instances of a."""
import pathlib
class NVMLError(Exception): pass
class NVMLError_NotFound(NVMLError): pass
_seen = []
def nvmlInit():
    _seen[:] = pathlib.Path(__file__).with_name("gpus").read_text().split("\\n")
def nvmlShutdown(): _seen.clear()
def nvmlDeviceGetCount(): return len(_seen)
def nvmlDeviceGetHandleByIndex(index): return _seen[index].split()
def nvmlDeviceGetUUID(handle):
    return f"GPU-{handle[0]}" if isinstance(handle, list) else f"MIG-{handle}"
def nvmlDeviceGetMaxMigDeviceCount(handle): return len(handle) - 1
def nvmlDeviceGetMigDeviceHandleByIndex(handle, number): return handle[number + 1]
'''


@pytest.fixture
def set_gpus(tmp_path, monkeypatch):
    """Set the GPUs that NVML reports of this machine."""
    (tmp_path / "pynvml.py").write_text(NVML)
    monkeypatch.syspath_prepend(tmp_path)
    look_again()

    def have(*names: str) -> None:
        (tmp_path / "gpus").write_text("\n".join(names))

    yield have
    sys.modules.pop("pynvml", None)
    look_again()


def order_by_uuid(name: str, *gpus: tuple[str, str], milli: int = 1000) -> Order:
    """Make an order for devices by name and UUID; `a/b` is the MIG instance b of the GPU a."""
    ids = []
    for _, uuid in gpus:
        parent, _, own = uuid.rpartition("/")
        ids.append(DeviceId(f"MIG-{own}", f"GPU-{parent}") if parent else DeviceId(f"GPU-{own}"))
    share = Share(ClusterId("c"), NodeId("n"), tuple(gpu for gpu, _ in gpus), milli)
    return Order(name, SPEC, (share,), devices=(tuple(ids),))


def devices_after_restart(**held) -> Devices:
    """Return the devices as the next daemon finds them in its workload store."""
    return Devices([], json.loads(json.dumps({name: each.rows for name, each in held.items()})))


@pytest.mark.parametrize("nvml", [True, False])
def test_a_gpu_with_another_uuid_runs_no_workload(set_gpus, nvml):
    """The test runs once with NVML, which maps names to GPUs, and once with documents alone."""
    if nvml:
        set_gpus("aaa", "bbb", "ccc", "ddd")
    devices = devices_after_restart(old=Devices([], {}).take(order_by_uuid("old", ("2", "ccc"))))
    if nvml:
        set_gpus("aaa", "ccc", "ddd")
    with pytest.raises(BackendError, match="GPU 1 of this machine is in use by the workload old"):
        devices.take(order_by_uuid("new", ("1", "ccc")))
    devices.take(order_by_uuid("beside", ("2", "ddd")))
    devices.give("old")
    devices.take(order_by_uuid("new", ("1", "ccc")))


def test_a_start_order_without_gpu_uuids_cannot_use_a_busy_gpu(set_gpus):
    set_gpus("aaa", "bbb", "ccc")
    devices = devices_after_restart(old=Devices([], {}).take(order("old", "n", "2")))
    set_gpus("ccc", "aaa", "bbb")
    with pytest.raises(BackendError, match="GPU 0 of this machine is in use by the workload old"):
        devices.take(order("new", "n", "0"))
    devices.take(order("new", "n", "2"))


def test_a_workload_gets_the_current_index_of_its_gpu(set_gpus):
    set_gpus("bbb", "aaa")
    devices = Devices([], {})
    binding = devices.take(order_by_uuid("stale", ("0", "aaa")))
    assert binding.environment["CUDA_VISIBLE_DEVICES"] == "1"
    assert devices.environment("stale") == {}
    set_gpus("aaa", "bbb")
    assert devices.environment("stale")["CUDA_VISIBLE_DEVICES"] == "0", "the current index"
    set_gpus("bbb")
    assert devices.environment("stale") == {}, "the GPU is gone, so no GPU is named"
    with pytest.raises(BackendError, match="GPU 0 of c/n is GPU-aaa, which this machine does not"):
        devices.take(order_by_uuid("other", ("0", "aaa")))


def test_a_mig_instance_is_identified_by_its_uuid(set_gpus):
    set_gpus("xxx a b", "yyy")
    devices = Devices([], {})
    binding = devices.take(order_by_uuid("old", ("0:1", "xxx/b")))
    assert binding.environment["CUDA_VISIBLE_DEVICES"] == "MIG-b"
    assert binding.environment["NVIDIA_VISIBLE_DEVICES"] == "0:1"
    set_gpus("yyy", "xxx b a")
    devices = devices_after_restart(old=binding)
    for name, uuid in (("1:0", "xxx/b"), ("1", "xxx")):
        with pytest.raises(BackendError, match="is in use by the workload old"):
            devices.take(order_by_uuid("new", (name, uuid)))
    devices.take(order_by_uuid("new", ("1:1", "xxx/a")))


def test_shares_of_a_gpu_are_counted_under_all_names_of_the_gpu(set_gpus):
    set_gpus("aaa", "bbb")
    devices = Devices([], {})
    devices.take(order_by_uuid("one", ("0", "aaa"), milli=600))
    set_gpus("bbb", "aaa")
    with pytest.raises(BackendError, match="in use by the workload one"):
        devices.take(order_by_uuid("two", ("1", "aaa"), milli=500))
    devices.take(order_by_uuid("two", ("1", "aaa"), milli=400))
