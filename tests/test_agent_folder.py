"""An agent's hello has only hardware addresses that a restart does not change."""

from pathlib import Path

import pytest

from moorage.commands import agent_folder


def add_interface(machine: Path, name: str, bus: str, **files: str) -> None:
    """Write the files with which the kernel shows a network interface below /sys."""
    (machine / "bus" / bus).mkdir(parents=True, exist_ok=True)
    device = machine / "net" / name / "device"
    device.mkdir(parents=True)
    (device / "subsystem").symlink_to(machine / "bus" / bus)
    for each, text in {"type": "1", "addr_assign_type": "0", "address": name, **files}.items():
        (machine / "net" / name / each).write_text(f"{text}\n")


def test_an_agent_sends_only_hardware_addresses_that_outlast_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_folder, "_INTERFACES", tmp_path / "net")
    add_interface(tmp_path, "board", "pci")
    add_interface(tmp_path, "dock", "usb")
    add_interface(tmp_path, "wsl", "vmbus")
    add_interface(tmp_path, "drawn", "pci", addr_assign_type="1")
    add_interface(tmp_path, "virtual", "pci")
    (tmp_path / "net" / "virtual" / "device" / "physfn").mkdir()
    (tmp_path / "net" / "bridge").mkdir()
    assert agent_folder.describe_folder(tmp_path).addresses == ("board",)
