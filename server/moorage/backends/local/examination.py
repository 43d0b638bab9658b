"""The findings of `moored doctor` about the backend `local`."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from moorage.backends.base import BackendError
from moorage.backends.local import confinement, control_groups
from moorage.backends.local.container_api import ContainerApi, find_socket
from moorage.backends.registry import Examination
from moorage.records.findings import DoctorFinding

_DOES: Final = "runs commands on machines with agents"
_HERE: Final = "and on this machine, since local_here is true"
_NOT_HERE: Final = "and not on this machine, since local_here is false"


def examine(examination: Examination, *, here: bool) -> Iterator[DoctorFinding]:
    """Yield findings about containers, control groups and confinement on this machine.

    Args:
        examination: Arguments of `moored doctor`.
        here: Whether the backend starts workloads on this machine.
    """
    yield _containers()
    yield _groups()
    yield _confinement(examination.data_dir, examination.advice)
    yield DoctorFinding("backend: local", "ok", f"{_DOES}, {_HERE if here else _NOT_HERE}")


def _containers() -> DoctorFinding:
    try:
        api = ContainerApi(find_socket())
    except BackendError as error:
        return DoctorFinding("containers", "missing", str(error))
    with contextlib.closing(api):
        return DoctorFinding("containers", "ok", f"the backend local starts containers at {api}")


def _groups() -> DoctorFinding:
    found = control_groups.find()
    if found.memory:
        return DoctorFinding("control groups", "ok", found.detail)
    instead = "instead, a workload's supervisor adds up the workload's memory twice a second"
    if found.base is not None:
        return DoctorFinding("control groups", "ok", f"{found.detail}; {instead}")
    instead += ", and finds the workload's processes by parent and environment"
    return DoctorFinding("control groups", "missing", f"{found.detail}; {instead}")


def _confinement(folder: Path, advice: str) -> DoctorFinding:
    parent = next(each for each in (folder, *folder.parents) if os.path.lexists(each))
    try:
        with tempfile.TemporaryDirectory(dir=parent, prefix=".moorage-doctor-") as trial:
            found = confinement.find(trial)
            detail = found.detail.replace(os.path.realpath(trial), str(folder))
    except OSError as error:
        return DoctorFinding("workloads and data", "missing", f"{folder}: {error}{advice}")
    return DoctorFinding("workloads and data", "ok" if found.way else "missing", detail + advice)
