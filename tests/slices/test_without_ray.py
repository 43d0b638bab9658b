"""Tests of parts of slices that need no cluster: settings, shapes, devices, and imports."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from moorage.extras import install_command
from moorage.slices import (
    ComputeResourceConfig,
    CpuAcceleratorConfig,
    GpuAcceleratorConfig,
    GpuSlices,
    HardwareType,
    RayResources,
    ResourcePoolManager,
    SlicePoolManager,
    SliceSettings,
    TpuAcceleratorConfig,
    TpuSlices,
    available_cpu_cores,
)
from moorage.slices.cluster import RayNode
from moorage.slices.devices import is_reclaimed, release_devices
from moorage.slices.shapes import find_degraded

WITHOUT = """
import sys
sys.modules["ray"] = None
import moorage.slices as slices
manager = slices.SlicePoolManager(tpu_type="v4-8")
assert manager.get_actor_pool_name() == "SlicePool(v4-8)"
assert manager.get_all_actors_in_pool() == [] == manager.get_all_pool_members()
manager.drain_actor_pool()
slices.TpuAcceleratorConfig("v4-8")
job = lambda: 1
for use in (
    lambda: manager.scale_multislice(1),
    manager.create_actor,
    slices.SliceActor.remote,
    slices.DeviceHostActor.options,
    lambda: slices.RayExecutor.execute(job, slices.CpuAcceleratorConfig(1)),
    lambda: slices.device_remote(accelerator_config=slices.TpuAcceleratorConfig("v4-8"))(job)(),
    lambda: slices.RayExecutor.execute_multislice(job, slices.TpuAcceleratorConfig("v4-8")),
):
    try:
        use()
    except slices.RayMissingError as error:
        assert isinstance(error, ImportError) and isinstance(error, RuntimeError)
        print(error)
"""


def test_without_ray_the_package_names_the_extra():
    command = [sys.executable, "-c", WITHOUT]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    line = f"slices need Ray, which is not installed: {install_command('ray')}\n"
    assert done.stdout == line * 7


def test_settings_of_slices_come_from_the_environment():
    names = {
        "EFORMER_SCALE_POLL_S": "2.5",
        "MOORAGE_SCALE_POLL_S": "1",
        "EFORMER_SCALE_ADD_TIMEOUT_S": "7",
        "EFORMER_KILL_VFIO": "yes",
        "MOORAGE_SAFE_GATHER": "0",
        "COORD_PORT": "8192",
    }
    found = SliceSettings.from_environment(names)
    assert found == SliceSettings(
        scale_poll_seconds=1,
        scale_add_seconds_max=7,
        kill_vfio=True,
        safe_gather=False,
        coordinator_port=8192,
    )
    documented = SliceSettings.from_environment({})
    assert documented == SliceSettings()
    assert (documented.scale_poll_seconds, documented.scale_add_seconds_max) == (30, 604800)
    assert (documented.kill_vfio, documented.coordinator_port) == (False, 8081)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("EFORMER_SCALE_POLL_S", "soon", "EFORMER_SCALE_POLL_S is 'soon'; expected seconds above"),
        ("MOORAGE_SCALE_POLL_S", "0", "expected seconds above 0"),
        ("EFORMER_SCALE_ADD_TIMEOUT_S", "inf", "expected seconds above 0"),
        ("EFORMER_KILL_VFIO", "perhaps", "EFORMER_KILL_VFIO is 'perhaps'; expected 1 or 0"),
        ("COORD_PORT", "80.5", "COORD_PORT is '80.5'; expected a port"),
        ("COORD_PORT", "70000", "expected 1 to 65535"),
    ],
)
def test_invalid_settings_are_refused(name, value, message):
    with pytest.raises(ValueError, match=message):
        SliceSettings.from_environment({name: value})
    with pytest.raises(ValueError, match="scale_poll_seconds is -1"):
        SliceSettings(scale_poll_seconds=-1)


def test_an_empty_pool_is_refused():
    with pytest.raises(ValueError, match="give tpu_type or shape, not both"):
        SlicePoolManager("v4-8", shape=GpuSlices(gpus_per_host=1))
    with pytest.raises(ValueError, match="a pool needs a tpu_type"):
        SlicePoolManager(None).create_actor()
    assert SlicePoolManager(None).get_actor_pool_name() == "SlicePool(None)"
    pool = ResourcePoolManager()
    assert pool.get_actor_pool_name() == "ResourcePoolManager"
    assert pool.get_actor_name_from_actor_info(7) == "7"
    with pytest.raises(NotImplementedError, match="ResourcePoolManager does not say how"):
        pool.create_actor()


def nodes(*described):
    return [
        RayNode(str(index), "127.0.0.1", dict(resources), dict(labels))
        for index, (resources, labels) in enumerate(described)
    ]


@pytest.mark.parametrize(
    ("gpus", "hosts", "counts", "possible"),
    [
        (2, 1, [2, 2], 2),
        (1, 1, [2, 2], 4),
        (1, 2, [4, 1], 1),
        (1, 2, [2, 1, 1], 2),
        (4, 1, [2, 2], 0),
        (1, 3, [9, 9], 0),
        (1, 2, [3, 3, 3], 4),
    ],
)
def test_the_number_of_slices_is_computed_from_the_hosts(gpus, hosts, counts, possible):
    shape = GpuSlices(gpus_per_host=gpus, hosts=hosts)
    assert shape.possible(nodes(*(({"GPU": count}, {}) for count in counts))) == possible


def test_hosts_of_a_slice_share_their_label():
    shape = GpuSlices(gpus_per_host=1, hosts=2, label="rack")
    gpu = {"GPU": 1}
    found = nodes((gpu, {"rack": "a"}), (gpu, {"rack": "b"}), (gpu, {}), (gpu, {"rack": "a"}))
    assert shape.possible(found) == 1
    assert TpuSlices("v4-8").possible(nodes(({"TPU-v4-8-head": 1}, {}), (gpu, {}))) == 1
    with pytest.raises(ValueError, match="at least 1 host and some GPUs"):
        GpuSlices(gpus_per_host=0)
    made = GpuAcceleratorConfig(4, "H100", worker_count=2, slice_label="rack").slices()
    assert (made.gpus_per_host, made.hosts, made.gpu_model) == (4, 2, "H100")


def test_without_the_metadata_server_a_host_does_not_count_as_preempted(monkeypatch):
    monkeypatch.setenv("GCE_METADATA_HOST", "127.0.0.1:1")
    assert not is_reclaimed()


def test_only_processes_that_hold_the_device_are_killed():
    """This machine has no /dev/vfio, so a process with that name in its arguments is not killed."""
    with subprocess.Popen([sys.executable, "-c", "input()", "/dev/vfio/1"], stdin=-1) as other:
        if not Path("/dev/vfio").exists():
            assert release_devices() == []
        assert other.poll() is None
        other.communicate(b"\n")


@pytest.mark.parametrize(
    ("name", "chips", "hosts"),
    [
        ("v4-8", 4, 1),
        ("v4-16", 4, 2),
        ("v4-32", 0, 4),
        ("v5p-128", 4, 16),
        ("v5litepod-16", 4, 4),
        ("v5e-8", 8, 1),
        ("v6e-256", 4, 64),
        ("v2-8", 4, 1),
        ("mine", 4, 0),
        ("v4-", 4, 0),
    ],
)
def test_the_number_of_hosts_follows_from_the_type_of_a_tpu_slice(name, chips, hosts):
    assert TpuSlices(name).hosts_expected(chips) == hosts


def test_slices_that_lack_hosts_are_found():
    def host(name, **resources):
        return {"TPU": 4, **resources}, {"ray.io/tpu-slice-name": name}

    whole = [host("a", **{"TPU-v4-16-head": 1}), host("a")]
    found = nodes(*whole, host("b", **{"TPU-v4-16-head": 1}), ({"GPU": 1}, {}), host("c"))
    (degraded,) = find_degraded(TpuSlices("v4-16"), found)
    assert str(degraded) == "slice b has 1 of its 2 hosts (127.0.0.1)"
    assert find_degraded(TpuSlices("mine"), found) == []
    assert find_degraded(GpuSlices(gpus_per_host=1, hosts=9), found) == []


def test_resources_of_a_task_are_translated_to_rays_options(monkeypatch):
    config = GpuAcceleratorConfig(2, HardwareType.NVIDIA_A100, cpu_count=4)
    resources = config.to_ray_resources()
    assert resources == RayResources(4, 2, accelerator_type="A100")
    assert resources.to_resource_dict() == {"CPU": 4, "GPU": 2, "accelerator_type:A100": 0.001}
    assert RayResources.from_resource_dict(resources.to_resource_dict()) == resources
    assert config.get_remote_options() == {
        "num_cpus": 4,
        "num_gpus": 2,
        "resources": {},
        "runtime_env": {},
        "accelerator_type": "A100",
    }
    assert RayResources().to_kwargs()["num_cpus"] == 1
    kinds = [config, TpuAcceleratorConfig("v4-8"), CpuAcceleratorConfig(1)]
    assert [each.hardware_identifier() for each in kinds] == ["A100", "v4-8", None]
    monkeypatch.setenv("SLURM_CPUS_ON_NODE", "3")
    assert available_cpu_cores() == CpuAcceleratorConfig().core_count == 3


def test_a_custom_configuration_of_resources_can_be_used():
    @dataclass(frozen=True)
    class Npus(ComputeResourceConfig):
        count: int = 1

        def resources(self):
            return {"CPU": 1, "NPU": self.count}

    own = Npus(2).with_environment_variables({"A": "1"}, B="2")
    assert own.get_remote_options()["resources"] == {"NPU": 2}
    assert own.to_ray_resources().runtime_env == {"env_vars": {"A": "1", "B": "2"}}
    with pytest.raises(NotImplementedError, match="ComputeResourceConfig does not say"):
        ComputeResourceConfig().to_ray_resources()
