"""Finds the GPUs of this machine, and resolves ids to GPUs. Used by `devices` and the runners."""

import importlib
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from types import ModuleType
from typing import NamedTuple

from moorage.model import DeviceId


class Device(NamedTuple):
    """A GPU of this machine, or a MIG instance of a GPU.

    Args:
        gpu: UUID of the GPU; without NVML, the given id.
        instance: UUID of the MIG instance, or its given id; empty: the whole GPU.
    """

    gpu: str
    instance: str = ""


def gpus_here() -> list[str]:
    """Return the UUIDs of this machine's NVIDIA GPUs, as CUDA takes them; empty without NVML."""
    nvml = nvml_here()
    if nvml is None:
        return []
    handles = map(nvml.nvmlDeviceGetHandleByIndex, range(nvml.nvmlDeviceGetCount()))
    return [str(nvml.nvmlDeviceGetUUID(handle)) for handle in handles]


def device_of(name: str) -> Device:
    """Return the device of an id: an index, `index:instance`, a UUID or a UUID's beginning."""
    known = _devices_by_name()
    found = known.get(name.lower())
    if found is not None:
        return found
    beginning = name.lower()
    meant = {device for each, device in known.items() if each.startswith(beginning)}
    if beginning.startswith(("gpu-", "mig-")) and len(meant) == 1:
        return meant.pop()
    gpu, colon, _ = name.partition(":")
    whole = known.get(gpu.lower(), Device(gpu)).gpu
    return Device(whole, name) if colon else Device(whole)


def find_device(name: str, meant: DeviceId) -> tuple[str, Device | None]:
    """Return the present id of a device, and the device; None as device if it is unknown.

    Args:
        name: The device's last known name on its node.
        meant: The device's UUIDs; without UUIDs, the device with this name is meant.

    Raises:
        LookupError: This machine has no such device.
    """
    known = _devices_by_name()
    if not meant.uuid:
        return name, device_of(name) if known else None
    if not known:
        return name, Device(meant.parent or meant.uuid, meant.uuid if meant.parent else "")
    device = known[meant.uuid.lower()]
    if known.get(name.lower()) != device:
        name = next(each for each, other in known.items() if other == device)
    return name, device


def look_again() -> None:
    """Forget the cached GPUs of this machine, so that the next call reads them again."""
    _devices_by_name.cache_clear()


@lru_cache(1)
def _devices_by_name() -> dict[str, Device]:
    """Return the devices by all their names, in lower case; {} without NVML."""
    nvml = nvml_here()
    if nvml is None:
        return {}
    names: dict[str, Device] = {}
    try:
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            gpu = str(nvml.nvmlDeviceGetUUID(handle))
            names[str(index)] = names[gpu.lower()] = Device(gpu)
            for number, uuid, _ in instances(nvml, handle):
                names[f"{index}:{number}"] = names[uuid.lower()] = Device(gpu, uuid)
    finally:
        nvml.nvmlShutdown()  # Otherwise NVML returns the same list next time.
    return names


def instances(nvml: ModuleType, handle: object) -> Iterator[tuple[int, str, object]]:
    """Yield number, UUID and handle of each MIG instance of a GPU."""
    with suppress(nvml.NVMLError):  # The GPU does not support MIG.
        for number in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
            with suppress(nvml.NVMLError_NotFound):  # Destroyed instances leave gaps.
                instance = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number)
                yield number, str(nvml.nvmlDeviceGetUUID(instance)), instance


def nvml_here() -> ModuleType | None:
    """Initialize NVML and return its module; None without the module or a driver."""
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except Exception:  # noqa: BLE001  # No bindings or no driver: no GPUs.
        return None
    return nvml
