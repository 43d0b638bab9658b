"""Checks of a host's machine: whether the cloud reclaims it, and which processes use its TPU."""

import contextlib
import os
import signal
import urllib.request
from pathlib import Path
from typing import Final

DEVICE_ORDER: Final = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
"""Makes CUDA count GPUs in Ray's order; CUDA's own order begins with the fastest GPU."""
METADATA_SECONDS_MAX: Final = 1.0
_METADATA_HOST: Final = "metadata.google.internal"
_PREEMPTED: Final = "computeMetadata/v1/instance/preempted"
_VFIO: Final = "/dev/vfio"
_LOCK: Final = Path("/tmp/libtpu_lockfile")  # noqa: S108  # Where libtpu has it.


def is_reclaimed() -> bool:
    """Return whether Google Cloud says that this machine is being preempted.

    `GCE_METADATA_HOST` names another server of metadata, as for Google's own libraries. Without an
    answer, the result is False.
    """
    host = os.environ.get("GCE_METADATA_HOST", _METADATA_HOST)
    request = urllib.request.Request(
        f"http://{host}/{_PREEMPTED}", headers={"Metadata-Flavor": "Google"}
    )
    directly = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with directly.open(request, timeout=METADATA_SECONDS_MAX) as answer:
            return bool(answer.read(16).strip().upper() == b"TRUE")
    except (OSError, ValueError):
        return False


def release_devices() -> list[int]:
    """Kill every process that has /dev/vfio open, and remove libtpu's lock file.

    Call this only if `EFORMER_KILL_VFIO=1` allows it: the processes may belong to other users.

    Returns:
        The ids of the killed processes.
    """
    killed = []
    for folder in Path("/proc").glob("[0-9]*/fd"):
        process = int(folder.parent.name)
        if process != os.getpid() and _holds(folder):
            with contextlib.suppress(OSError):  # The process has ended, or we may not kill it.
                os.kill(process, signal.SIGKILL)
                killed.append(process)
    with contextlib.suppress(OSError):  # The file is gone, or is another user's.
        _LOCK.unlink()
    return killed


def _holds(folder: Path) -> bool:
    try:
        return any(str(each.readlink()).startswith(_VFIO) for each in folder.iterdir())
    except OSError:
        return False
