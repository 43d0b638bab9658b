"""What agents say of their machines: metrics that policies see, and GPUs that others use.

The GPUs are those of a stand-in for NVML, which an agent imports in the place of the bindings.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from fleets import Fleet, served
from served import until

from moorage_policies import catalog

pytestmark = pytest.mark.heavy

NVML = '''
"""Two GPUs; `users.json` says, by UUID, which processes run there and how busy it is."""
import json, pathlib
from types import SimpleNamespace
class NVMLError(Exception): pass
class NVMLError_NotSupported(NVMLError): pass
class NVMLError_NotFound(NVMLError): pass
NVML_DEVICE_MIG_ENABLE = NVML_P2P_STATUS_OK = NVML_TEMPERATURE_GPU = 0
NVML_P2P_CAPS_INDEX_NVLINK = 0
def _said(handle):
    file = pathlib.Path(__file__).with_name("users.json")
    return json.loads(file.read_text()).get(handle, {})
def nvmlInit(): pass
def nvmlShutdown(): pass
def nvmlSystemGetDriverVersion(): return "1"
def nvmlDeviceGetCount(): return 2
def nvmlDeviceGetHandleByIndex(index): return f"GPU-{'ab'[index]}"
def nvmlDeviceGetUUID(handle): return handle
def nvmlDeviceGetName(handle): return "Stand-in"
def nvmlDeviceGetPciInfo(handle): return SimpleNamespace(busId="00000000:01:00.0")
def nvmlDeviceGetMemoryInfo(handle):
    used = _said(handle).get("used", 0)
    return SimpleNamespace(total=1000 << 20, used=used << 20, free=(1000 - used) << 20)
def nvmlDeviceGetMaxMigDeviceCount(handle): raise NVMLError_NotSupported
def nvmlDeviceGetMigMode(handle): raise NVMLError_NotSupported
def nvmlDeviceGetP2PStatus(one, other, index): raise NVMLError_NotSupported
def nvmlDeviceGetUtilizationRates(handle): return SimpleNamespace(gpu=_said(handle).get("busy", 0))
def nvmlDeviceGetPowerUsage(handle): return 70_000
def nvmlDeviceGetTemperature(handle, kind): return 40
def nvmlDeviceGetComputeRunningProcesses(handle):
    pids = _said(handle).get("pids", ())
    return [SimpleNamespace(pid=each, usedGpuMemory=300 << 20) for each in pids]
'''


class Cards:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.folder.mkdir()
        (folder / "pynvml.py").write_text(NVML)
        self.say()

    def say(self, **users: dict) -> None:
        fresh = self.folder / "users.new"
        fresh.write_text(json.dumps({f"GPU-{name}": said for name, said in users.items()}))
        fresh.replace(self.folder / "users.json")


@pytest.fixture
def cards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cards:
    cards = Cards(tmp_path / "nvml")
    monkeypatch.setenv("PYTHONPATH", str(cards.folder))
    return cards


@pytest.fixture
def fleet(tmp_path: Path, cards: Cards) -> Iterator[Fleet]:
    with served(tmp_path, MOORAGE_AGENT_LOST_SECONDS="3") as fleet:
        yield fleet


def measured(fleet: Fleet, node: str) -> dict:
    document = fleet.server.http.get("/cluster/lab").json().get("data", {"nodes": ()})
    return next((each for each in document["nodes"] if each["id"] == node), {})


def cuda_utilization(fleet: Fleet) -> float | None:
    gpus = measured(fleet, "box").get("gpus")
    return gpus[0]["cudaUtilization"] if gpus else None


def gpu_of(fleet: Fleet) -> str:
    lease = {"ttl_seconds": 600}
    answer = fleet.server.ask(clusters=["lab"], resources={"gpus": 1}, lease=lease)
    assert answer["success"], answer
    return answer["lease"]["placement"][0]["gpus"][0]


def test_metrics_have_the_documented_shape(fleet: Fleet, cards: Cards) -> None:
    cards.say(a={"used": 250, "busy": 60})
    fleet.agent("box", fleet.token())
    until(lambda: fleet.server.http.get("/cluster/lab").status_code == 200)
    tree = measured(fleet, "box")
    assert tree["memory"]["freeMem"] > 0
    assert {"load1m", "load5m", "load_5m", "load15m"} <= tree["vcpu"].keys()
    assert tree["storage"]["freeMem"] > 0
    assert tree["gpus"][0] == {
        "gpu_id": 0,
        "usedMem": 250,
        "freeMem": 750,
        "totalMem": 1000,
        "memUtilization": 25,
        "cudaUtilization": 60,
        "powerUtilization": 70,
        "temperature": 40,
    }
    assert (tree["gpu"]["count"], tree["gpu"]["avgCudaUtilization"]) == (2, 30)
    assert tree["stale"] is False
    totals = fleet.server.http.get("/cluster/lab").json()["data"]["cluster"]
    assert totals["gpu"]["totalFreeMem"] == 1750


def test_policies_see_metrics_of_agents(fleet: Fleet, cards: Cards) -> None:
    fleet.server.publish(catalog.document("least_loaded"))
    cards.say(a={"busy": 90}, b={"busy": 5})
    fleet.agent("box", fleet.token())
    until(lambda: measured(fleet, "box").get("gpus"))
    answer = fleet.server.ask(
        policy_rule_uri="least_loaded:1.0-stable",
        clusters=["lab"],
        resources={"gpus": 1},
        lease={"ttl_seconds": 600},
    )
    assert answer["success"], answer
    assert answer["lease"]["placement"][0]["gpus"] == ["1"], answer


def test_a_gpu_that_others_use_is_not_given_out(fleet: Fleet, cards: Cards) -> None:
    cards.say(a={"pids": [os.getpid()], "used": 300})
    fleet.agent("box", fleet.token())
    (busy,) = fleet.node("box")["busy"]
    assert (busy["id"], busy["uuid"]) == ("0", "GPU-a")
    assert f"(process {os.getpid()}, 300 MiB), which no lease started" in busy["reason"]
    assert gpu_of(fleet) == "1"
    refused = fleet.server.ask(resources={"gpus": 1}, lease={"ttl_seconds": 9})
    assert refused["error"]["code"] == "no_capacity"
    cards.say()
    until(lambda: "busy" not in fleet.node("box"))
    assert gpu_of(fleet) == "0"


def test_what_a_lease_runs_is_not_others_use(fleet: Fleet, cards: Cards) -> None:
    fleet.agent("box", fleet.token())
    spec = {"category": "process", "command": ["sleep", "1000"]}
    lease = fleet.server.ask(
        clusters=["lab"],
        resources={"gpus": 2},
        lease={"ttl_seconds": 600},
        provision={"backend": "local", "spec": spec},
    )["lease"]
    until(lambda: fleet.state(lease) == "active")
    cards.say(a={"pids": [1], "busy": 77}, b={"pids": [1]})
    until(lambda: cuda_utilization(fleet) == 77)
    assert "busy" not in fleet.node("box")
    assert fleet.server.release(lease)["success"]
    until(lambda: len(fleet.node("box").get("busy", ())) == 2)


def test_metrics_of_a_lost_machine_are_stale_and_go_with_it(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = fleet.agent("box", fleet.token())
    monkeypatch.delenv("PYTHONPATH")  # It would have the same GPUs.
    fleet.agent("other", fleet.token())
    until(lambda: measured(fleet, "box") and measured(fleet, "other"))
    agent.kill()
    agent.wait()
    until(lambda: measured(fleet, "box")["stale"])
    assert measured(fleet, "other")["stale"] is False
    until(lambda: "unavailable" in fleet.node("box"))
    assert fleet.server.moorage("fleet", "forget", "lab/box").returncode == 0
    until(lambda: not measured(fleet, "box"))
    assert measured(fleet, "other")
