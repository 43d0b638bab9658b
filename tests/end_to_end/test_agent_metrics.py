"""Policies see the metrics of agents, and GPUs in use by others are not leased.

The agents import a stand-in for NVML, which simulates the GPUs.
"""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fleets import Fleet, serve_fleet
from served import until

from moorage.backends.local.machine import this_node
from moorage_policies import catalog

pytestmark = pytest.mark.heavy

SetUse = Callable[..., None]

NVML = '''
"""GPUs a and b; `users.json` says which processes run there and how busy it is."""
import json, pathlib
from types import SimpleNamespace as Record
class NVMLError(Exception): pass
class NVMLError_NotSupported(NVMLError): pass
class NVMLError_NotFound(NVMLError): pass
NVML_DEVICE_MIG_ENABLE = NVML_P2P_STATUS_OK = NVML_TEMPERATURE_GPU = 0
NVML_P2P_CAPS_INDEX_NVLINK = 0
def _used(handle):
    return json.loads(pathlib.Path(__file__).with_name("users.json").read_text()).get(handle, {})
def _lacks(*arguments): raise NVMLError_NotSupported
nvmlInit = nvmlShutdown = lambda: None
nvmlSystemGetDriverVersion = lambda: "1"
nvmlDeviceGetCount = lambda: 2
nvmlDeviceGetHandleByIndex = lambda index: "ab"[index]
nvmlDeviceGetUUID = lambda handle: f"GPU-{pathlib.Path(__file__).parents[1].name}-{handle}"
nvmlDeviceGetName = lambda handle: "Stand-in"
nvmlDeviceGetPciInfo = lambda handle: Record(busId="00000000:01:00.0")
def nvmlDeviceGetMemoryInfo(handle):
    used = _used(handle).get("used", 0)
    return Record(total=1000 << 20, used=used << 20, free=(1000 - used) << 20)
nvmlDeviceGetMaxMigDeviceCount = nvmlDeviceGetMigMode = nvmlDeviceGetP2PStatus = _lacks
nvmlDeviceGetUtilizationRates = lambda handle: Record(gpu=_used(handle).get("busy", 0))
nvmlDeviceGetPowerUsage = lambda handle: 70_000
nvmlDeviceGetTemperature = lambda handle, kind: 40
def nvmlDeviceGetComputeRunningProcesses(handle):
    return [Record(pid=each, usedGpuMemory=300 << 20) for each in _used(handle).get("pids", ())]
'''


@pytest.fixture
def set_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SetUse:
    """Set the use that the simulated GPUs report."""
    folder = tmp_path / "nvml"
    folder.mkdir()
    (folder / "pynvml.py").write_text(NVML)
    monkeypatch.setenv("PYTHONPATH", str(folder))

    def say(**users: dict) -> None:
        fresh = folder / "users.new"
        fresh.write_text(json.dumps(users))
        fresh.replace(folder / "users.json")

    say()
    return say


@pytest.fixture(scope="module")
def shared_fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with serve_fleet(tmp_path_factory.mktemp("server"), MOORAGE_AGENT_LOST_SECONDS="3") as fleet:
        fleet.server.publish(catalog.document("least_loaded"))
        yield fleet


def metrics(fleet: Fleet) -> dict:
    answer = fleet.server.http.get(f"/cluster/{fleet.cluster}").json()
    return answer.get("data", {"nodes": ()})


def node_metrics(fleet: Fleet, node: str = "box") -> dict:
    return next((each for each in metrics(fleet)["nodes"] if each["id"] == node), {})


def lease_of(fleet: Fleet, gpus: int = 1, **more) -> dict:
    demand = {"clusters": [fleet.cluster], "resources": {"gpus": gpus}}
    answer = fleet.server.ask(**demand, lease={"ttl_seconds": 600}, **more)
    assert answer["success"], answer
    return answer["lease"]


def gpu_of(fleet: Fleet, **more) -> str:
    return lease_of(fleet, **more)["placement"][0]["gpus"][0]


def test_metrics_have_the_documented_shape(fleet: Fleet, set_use: SetUse) -> None:
    set_use(a={"used": 250, "busy": 60})
    fleet.agent("box", fleet.token())
    until(lambda: node_metrics(fleet))
    tree = node_metrics(fleet)
    assert tree["memory"]["freeMem"] > 0
    assert {"load1m", "load5m", "load_5m", "load15m"} <= tree["vcpu"].keys()
    assert tree["storage"]["freeMem"] > 0
    sizes = {"usedMem": 250, "freeMem": 750, "totalMem": 1000, "memUtilization": 25}
    others = {"cudaUtilization": 60, "powerUtilization": 70, "temperature": 40}
    assert tree["gpus"][0] == {"gpu_id": 0, **sizes, **others}
    assert (tree["gpu"]["count"], tree["gpu"]["avgCudaUtilization"]) == (2, 30)
    assert tree["stale"] is False
    assert metrics(fleet)["cluster"]["gpu"]["totalFreeMem"] == 1750


def test_policies_see_metrics_of_agents(fleet: Fleet, set_use: SetUse) -> None:
    set_use(a={"busy": 90}, b={"busy": 5})
    fleet.agent("box", fleet.token())
    until(lambda: node_metrics(fleet).get("gpus"))
    assert gpu_of(fleet, policy_rule_uri="least_loaded:1.0-stable") == "1"


def test_a_gpu_in_use_by_others_is_not_leased(fleet: Fleet, set_use: SetUse) -> None:
    set_use(a={"pids": [os.getpid()], "used": 300})
    fleet.agent("box", fleet.token())
    (busy,) = fleet.node("box")["busy"]
    assert (busy["id"], busy["uuid"]) == ("0", f"GPU-{fleet.cluster}-a")
    check_use_by_others(fleet, set_use, "box")


def check_use_by_others(fleet: Fleet, set_use: SetUse, node: str) -> None:
    """Check that the first of two GPUs is leased only after this process stops using it."""
    (busy,) = fleet.node(node)["busy"]
    assert f"(process {os.getpid()}, 300 MiB), which no lease started" in busy["reason"]
    assert gpu_of(fleet) == "1"
    demand = {"clusters": [fleet.cluster], "resources": {"gpus": 1}}
    refused = fleet.server.ask(**demand, lease={"ttl_seconds": 9})
    assert refused["error"]["code"] == "no_capacity"
    set_use()
    until(lambda: "busy" not in fleet.node(node))
    assert gpu_of(fleet) == "0"


def test_processes_of_a_lease_do_not_count_as_use_by_others(fleet: Fleet, set_use: SetUse) -> None:
    fleet.agent("box", fleet.token())
    spec = {"category": "process", "command": ["sleep", "1000"]}
    lease = lease_of(fleet, 2, provision={"backend": "local", "spec": spec})
    until(lambda: fleet.state(lease) == "active")
    set_use(a={"pids": [1], "busy": 77}, b={"pids": [1]})
    until(lambda: node_metrics(fleet).get("gpus", [{}])[0].get("cudaUtilization") == 77)
    assert "busy" not in fleet.node("box")
    assert fleet.server.release(lease)["success"]
    until(lambda: len(fleet.node("box").get("busy", ())) == 2)


@pytest.mark.usefixtures("set_use")
def test_metrics_of_a_lost_machine_are_stale_and_are_removed_with_it(fleet, monkeypatch):
    agent = fleet.agent("box", fleet.token())
    monkeypatch.delenv("PYTHONPATH")  # Otherwise this agent would have the same GPUs.
    fleet.agent("other", fleet.token())
    until(lambda: node_metrics(fleet) and node_metrics(fleet, "other"))
    agent.kill()
    until(lambda: node_metrics(fleet)["stale"])
    assert node_metrics(fleet, "other")["stale"] is False
    until(lambda: "unavailable" in fleet.node("box"))
    assert fleet.server.moorage("fleet", "forget", f"{fleet.cluster}/box").returncode == 0
    until(lambda: not node_metrics(fleet))
    assert node_metrics(fleet, "other")


def test_the_servers_own_machine_reports_like_an_agent(tmp_path: Path, set_use: SetUse):
    set_use(a={"pids": [os.getpid()], "used": 300, "busy": 60})
    with serve_fleet(tmp_path, "--here") as fleet:
        fleet.cluster = this_node()
        until(lambda: node_metrics(fleet, fleet.cluster).get("gpus"))
        tree = node_metrics(fleet, fleet.cluster)
        assert tree["gpus"][0]["cudaUtilization"] == 60
        assert (tree["memory"]["freeMem"] > 0, tree["stale"]) == (True, False)
        until(lambda: "busy" in fleet.node(fleet.cluster))
        check_use_by_others(fleet, set_use, fleet.cluster)
