"""Tests of this machine's document and GPUs, by the real NVML bindings with a test driver."""

import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from moorage_client.inventory import collect
from moorage_client.inventory.documents import machine_key

# The used part of NVML's interface, as a driver would export it: two devices joined by
# NVLink, a third one by itself, and a fourth that is divided into MIG instances 0 and 2.
DRIVER = """
#include <stdio.h>
#include <string.h>
typedef struct { char legacy[16]; unsigned domain, bus, device, id, sub; char name[32]; } Pci;
typedef struct { unsigned long long total, free, used; } Memory;
#define HANDLE(n) ((void *)(long)((n) + 1))
#define INDEX(h) ((long)(h) - 1)
static int broken(void) { return BROKEN; }
int nvmlInitWithFlags(unsigned flags) { return broken() == 9 ? 9 : 0; }
int nvmlShutdown(void) { return 0; }
int nvmlSystemGetDriverVersion(char *v, unsigned n) { snprintf(v, n, "570.1"); return 0; }
int nvmlDeviceGetCount_v2(unsigned *n) { *n = broken() == 1 ? 0 : 4; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **h) { *h = HANDLE(i); return 0; }
int nvmlDeviceGetPciInfo_v3(void *h, Pci *p) {
    memset(p, 0, sizeof *p);
    snprintf(p->name, 32, "00000000:%02lX:00.0", 0xF0 + INDEX(h));
    return broken() == 15 ? 15 : 0;
}
int nvmlDeviceGetName(void *h, char *v, unsigned n) {
    snprintf(v, n, INDEX(h) < 100 ? "NVIDIA A100" : "NVIDIA A100 MIG 1g.5gb");
    return 0;
}
int nvmlDeviceGetUUID(void *h, char *v, unsigned n) {
    snprintf(v, n, INDEX(h) < 100 ? "GPU-%ld" : "MIG-%ld", INDEX(h));
    return 0;
}
int nvmlDeviceGetMemoryInfo(void *h, Memory *m) {
    m->total = (INDEX(h) < 100 ? 40960ULL : 4864ULL) << 20;
    m->free = m->total; m->used = 0;
    return 0;
}
int nvmlDeviceGetMigMode(void *h, unsigned *now, unsigned *next) {
    *now = *next = INDEX(h) == 3;
    return INDEX(h) == 2 ? 3 : 0;
}
int nvmlDeviceGetMaxMigDeviceCount(void *h, unsigned *n) { *n = 3; return 0; }
int nvmlDeviceGetMigDeviceHandleByIndex(void *h, unsigned i, void **m) {
    *m = HANDLE(100 + i);
    return i == 1 ? 6 : 0;
}
int nvmlDeviceGetP2PStatus(void *a, void *b, int what, int *status) {
    *status = what == 2 && INDEX(a) + INDEX(b) == 1 ? 0 : 4;
    return INDEX(a) == 3 ? 3 : 0;
}
"""


def test_the_document_of_this_machine_agrees_with_the_system():
    found = collect(["local"])
    (document,) = found.documents
    (node,) = document["nodes"]["nodeData"]
    assert document["id"] == node["id"] == platform.node()
    assert 0 < node["vcpus"]["count"] <= (os.cpu_count() or 1)
    page, pages = (os.sysconf(name) for name in ("SC_PAGE_SIZE", "SC_PHYS_PAGES"))
    assert 0 < node["memory"] <= page * pages >> 20
    assert node["labels"]["kubernetes.io/os"] == "linux"
    raw = Path("/etc/machine-id").read_text().strip() if Path("/etc/machine-id").exists() else ""
    assert node.get("machineId", "") == machine_key(raw) != (raw or None)
    gpus = node["gpus"]["count"]
    assert gpus or found.notes[0].startswith("local: no NVIDIA GPUs: ")
    assert collect(["local"], "desk").documents[0]["id"] == "desk"


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    """Return a function that builds an NVML driver; its argument chooses the calls that fail."""

    def build(broken: int = 0) -> Path:
        folder = tmp_path_factory.mktemp("driver")
        library = folder / "libnvidia-ml.so.1"
        command = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", library]
        source = DRIVER.replace("BROKEN", str(broken))
        subprocess.run(command, input=source, text=True, check=True, timeout=60)
        return folder

    if shutil.which("cc") is None:
        pytest.skip("no C compiler to build a driver with")
    return build


def with_driver(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [Path(sys.executable).with_name("moorage"), "fleet", "import", "local", "--dry-run"]
    environment = {**os.environ, "LD_LIBRARY_PATH": str(folder)}
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=60
    )


@pytest.mark.heavy  # A C compiler.
def test_devices_links_and_mig_instances_are_listed(driver):
    done = with_driver(driver())
    assert (done.returncode, done.stderr) == (0, "")
    (document,) = json.loads(done.stdout)["clusters"]
    (node,) = document["nodes"]["nodeData"]
    whole = {"modelName": "NVIDIA A100", "memory": 40_960}
    instance = {"modelName": "NVIDIA A100 MIG 1g.5gb", "memory": 4864, "exclusive": True}
    assert node["gpus"]["gpus"] == [
        {**whole, "id": "0", "linkGroup": "nvlink-0", "uuid": "GPU-0"},
        {**whole, "id": "1", "linkGroup": "nvlink-0", "uuid": "GPU-1"},
        {**whole, "id": "2", "uuid": "GPU-2"},
        {**instance, "id": "3:0", "uuid": "MIG-100", "parentUuid": "GPU-3"},
        {**instance, "id": "3:2", "uuid": "MIG-102", "parentUuid": "GPU-3"},
    ]
    assert node["labels"]["nvidia.com/driver"] == "570.1"
    assert document["gpus"] == {"count": 5, "memory": 3 * 40_960 + 2 * 4864}


@pytest.mark.heavy  # A C compiler.
@pytest.mark.parametrize(
    ("broken", "code", "said"),
    [
        (1, 0, "no NVIDIA GPUs: the driver knows none"),
        (9, 0, "no NVIDIA GPUs: NVML says: Driver Not Loaded"),
        (15, 2, "local, NVML: expected to read its GPUs, but NVML reports: GPU is lost"),
    ],
)
def test_a_driver_without_devices_gives_a_note_and_a_lost_device_gives_an_error(
    driver, broken, code, said
):
    done = with_driver(driver(broken))
    assert done.returncode == code
    assert said in done.stderr
    assert (done.stdout == "") is (code == 2)
