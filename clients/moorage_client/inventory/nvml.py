"""Reads this machine's NVIDIA GPUs through NVML, as devices of a cluster document.

`this_machine` calls this module. The bindings (`nvidia-ml-py`, module `pynvml`) are the extra
`nvml`, and are loaded only here.
"""

import importlib
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Final

from moorage.extras import install_command
from moorage_client.inventory.documents import MIB, Document, InventoryError, device

_DRIVER: Final = Path("/proc/driver/nvidia")
_PCI: Final = Path("/sys/bus/pci/devices")


def devices_here(source: str) -> tuple[list[Document], str, str]:
    """Return the NVIDIA devices of this machine.

    Args:
        source: The source's name in errors and the note.

    Returns:
        The devices by index, the driver's version, and the reason if there are no devices.

    Raises:
        InventoryError: The driver is loaded, but its devices cannot be read: a document without
            devices would say that the machine has no devices.
    """
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return _none(source, f"nvidia-ml-py is missing: {install_command('nvml')}")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return _none(source, f"NVML says: {error}")
    try:
        count = nvml.nvmlDeviceGetCount()
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
        groups = _link_groups(nvml, handles)
        found = [
            each
            for index, handle in enumerate(handles)
            for each in _devices(nvml, handle, index, groups[index])
        ]
        driver = str(nvml.nvmlSystemGetDriverVersion())
    except nvml.NVMLError as error:
        raise InventoryError(
            source, "NVML", f"to read its GPUs, but NVML reports: {error}"
        ) from error
    finally:
        nvml.nvmlShutdown()
    return found, driver, "" if found else f"{source}: no NVIDIA GPUs: the driver knows none"


def _none(source: str, why: str) -> tuple[list[Document], str, str]:
    if _DRIVER.exists():
        raise InventoryError(source, "NVML", f"to read the GPUs of its NVIDIA driver, but {why}")
    return [], "", f"{source}: no NVIDIA GPUs: {why}"


def _devices(nvml: ModuleType, handle: object, index: int, group: str) -> list[Document]:
    """Return a physical device as one document, or its MIG instances as one document each."""
    numa = _numa(str(nvml.nvmlDeviceGetPciInfo(handle).busId))
    instances = _instances(nvml, handle)
    if instances is None:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle).total // MIB
        model = str(nvml.nvmlDeviceGetName(handle))
        # The id is the index as text, even if MIG instances of other devices precede the device.
        uuid = _uuid(nvml, handle)
        return [device(model, memory, name=str(index), link_group=group, numa=numa, uuid=uuid)]
    return [
        device(
            str(nvml.nvmlDeviceGetName(instance)),
            nvml.nvmlDeviceGetMemoryInfo(instance).total // MIB,
            name=f"{index}:{number}",
            exclusive=True,
            numa=numa,
            uuid=_uuid(nvml, instance),
            parent_uuid=_uuid(nvml, handle),
        )
        for number, instance in instances
    ]


def _uuid(nvml: ModuleType, handle: object) -> str:
    """Return the UUID of a device; empty if its driver reports no UUID."""
    try:
        return str(nvml.nvmlDeviceGetUUID(handle))
    except nvml.NVMLError:
        return ""


def _instances(nvml: ModuleType, handle: object) -> list[tuple[int, object]] | None:
    """Return the MIG instances of a device with their numbers; None for an undivided device."""
    try:
        mode, _ = nvml.nvmlDeviceGetMigMode(handle)
    except nvml.NVMLError_NotSupported:
        return None
    if mode != nvml.NVML_DEVICE_MIG_ENABLE:
        return None
    found = []
    for number in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        try:
            found.append((number, nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number)))
        except nvml.NVMLError_NotFound:
            continue  # Destroyed instances leave gaps in the numbers.
    return found


def _link_groups(nvml: ModuleType, handles: Sequence[object]) -> list[str]:
    """Return the NVLink group of each device; empty: the device has no NVLink."""
    groups = list(range(len(handles)))
    for first, one in enumerate(handles):
        for second in range(first):
            if groups[first] != groups[second] and _has_link(nvml, one, handles[second]):
                merged = groups[first]
                groups = [groups[second] if each == merged else each for each in groups]
    return [f"nvlink-{each}" if groups.count(each) > 1 else "" for each in groups]


def _has_link(nvml: ModuleType, one: object, other: object) -> bool:
    try:
        status = nvml.nvmlDeviceGetP2PStatus(one, other, nvml.NVML_P2P_CAPS_INDEX_NVLINK)
    except nvml.NVMLError_NotSupported:
        return False
    return bool(status == nvml.NVML_P2P_STATUS_OK)


def _numa(bus: str) -> int:
    """Return the NUMA domain of a PCI device; -1 if it is unknown."""
    # NVML writes an eight-digit domain, the kernel a four-digit one, in small letters.
    domain, _, rest = bus.lower().partition(":")
    try:
        return int((_PCI / f"{domain[-4:]}:{rest}" / "numa_node").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return -1
