"""Tests of limits of control groups, in the layouts of kernels, container engines and systemd."""

from pathlib import Path

import pytest

from moorage_client.inventory.control_groups import cpu_limit, memory_limit

GIB = 1 << 30


class Machine:
    """A folder that stands for /proc and the control group hierarchies of a process."""

    def __init__(self, root: Path) -> None:
        self.process = root / "proc"
        self.groups = root / "cgroup groups"
        self.process.mkdir()

    def mount(self, kind, point, options, root="/"):
        shown = str(self.groups / point).replace(" ", "\\040")
        line = f"30 24 0:26 {root} {shown} rw,nosuid shared:4 - {kind} cgroup {options}\n"
        with (self.process / "mountinfo").open("a") as file:
            file.write(line)

    def put(self, lines, **files):
        (self.process / "cgroup").write_text("\n".join(lines) + "\n")
        for path, text in files.items():
            place = self.groups / path
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(f"{text}\n")

    @property
    def limits(self):
        found = cpu_limit(self.process), memory_limit(self.process)
        return tuple(
            each and (each.amount, str(each.file.relative_to(self.groups))) for each in found
        )


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def test_without_control_groups_or_limits_the_client_sees_no_limit(machine):
    assert machine.limits == (None, None)
    machine.mount("cgroup2", ".", "rw")
    machine.put(["0::/"], **{"cpu.max": "max 100000", "memory.max": "max"})
    assert machine.limits == (None, None)


def test_limits_of_control_groups_of_version_1_are_read_by_controller(machine):
    machine.mount("cgroup", "cpu,cpuacct", "rw,cpu,cpuacct")
    machine.mount("cgroup", "memory", "rw,memory")
    machine.put(
        ["4:memory:/y", "1:cpu,cpuacct:/x", "9:name=systemd:/"],
        **{
            "cpu,cpuacct/cpu.cfs_quota_us": "-1",
            "cpu,cpuacct/x/cpu.cfs_quota_us": "50000",
            "cpu,cpuacct/x/cpu.cfs_period_us": "100000",
            "memory/memory.limit_in_bytes": "9223372036854771712",
            "memory/y/memory.limit_in_bytes": str(GIB),
        },
    )
    cpu = (500, "cpu,cpuacct/x/cpu.cfs_quota_us")
    assert machine.limits == (cpu, (GIB, "memory/y/memory.limit_in_bytes"))


def test_limits_of_parent_control_groups_of_version_2_count(machine):
    """A slice of systemd has a lower limit than the service inside it."""
    machine.mount("cgroup2", ".", "rw,nsdelegate")
    machine.put(
        ["0::/a.slice/b.service"],
        **{
            "a.slice/cpu.max": "150000 100000",
            "a.slice/memory.max": str(2 * GIB),
            "a.slice/b.service/cpu.max": "400000 100000",
            "a.slice/b.service/memory.max": "max",
        },
    )
    assert machine.limits == ((1500, "a.slice/cpu.max"), (2 * GIB, "a.slice/memory.max"))


def test_limits_of_both_versions_of_control_groups_are_read_on_a_mixed_system(machine):
    machine.mount("cgroup2", "unified", "rw")
    machine.mount("cgroup", "memory", "rw,memory")
    machine.put(
        ["4:memory:/x", "0::/x"],
        **{"unified/x/cpu.max": "100000 100000", "memory/x/memory.limit_in_bytes": str(GIB)},
    )
    limits = (1000, "unified/x/cpu.max"), (GIB, "memory/x/memory.limit_in_bytes")
    assert machine.limits == limits


@pytest.mark.parametrize("path", ["/docker/abc", "/../../elsewhere", "/"])
def test_a_container_sees_its_own_group_as_the_root(machine, path):
    root = "/docker/abc" if path == "/docker/abc" else "/"
    machine.mount("cgroup", "cpu", "rw,cpu", root)
    quota = {"cpu/cpu.cfs_quota_us": "25000", "cpu/cpu.cfs_period_us": "50000"}
    machine.put([f"1:cpu:{path}"], **quota)
    assert machine.limits == ((500, "cpu/cpu.cfs_quota_us"), None)
