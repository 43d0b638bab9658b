"""Makes the order document for a process's supervisor; a restarted daemon reads it again."""

import os
import socket
from dataclasses import asdict, replace
from typing import Final

from moorage.backends.base import Order, UnsupportedSpecError
from moorage.backends.local import marks
from moorage.backends.local.confinement import Confinement
from moorage.backends.local.devices import DEVICE_ORDER, DeviceBinding
from moorage.backends.spec_fields import memory_bytes
from moorage.backends.specs import (
    BaseResourceSpec,
    ProcessResourceSpec,
    Readiness,
    ServiceResourceSpec,
    VLLMModelResourceSpec,
)
from moorage.records.json_values import JsonObject

OUTPUT_BYTES_MAX: Final = 64 * 1024 * 1024
"""Maximum bytes of a workload's log; beyond them the older half is dropped."""
_INHERITED: Final = frozenset(
    {
        *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TMPDIR"),
        *("LD_LIBRARY_PATH", "VIRTUAL_ENV", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"),
        *("http_proxy", "https_proxy", "no_proxy"),
    }
)
"""Variables of the daemon that its workloads inherit; none is a secret."""


def process(spec: BaseResourceSpec) -> ProcessResourceSpec:
    """Return a spec as a process spec: a vLLM model becomes the command that serves it.

    Raises:
        UnsupportedSpecError: The spec is of another kind.
    """
    if isinstance(spec, VLLMModelResourceSpec):
        return spec.service()
    if not isinstance(spec, ProcessResourceSpec):
        raise UnsupportedSpecError(f"a {spec.category} cannot run as a process")
    if spec.mem_limit is not None:
        return replace(spec, mem_limit=memory_bytes(spec.mem_limit))
    return spec


def document(
    order: Order,
    spec: ProcessResourceSpec,
    grant: DeviceBinding,
    *,
    mark: str,
    group: str,
    confinement: Confinement,
    owner: int | None,
    heard: str,
) -> JsonObject:
    """Return the content of `order.json`.

    Args:
        order: The order to carry out.
        spec: The order's spec.
        grant: The devices that the workload is bound to.
        mark: Value of the marker variable of all its processes.
        group: The workload's control group; empty: none.
        confinement: The method that hides a folder from the workload.
        owner: Pid of the process that the workload must not outlive; None: no such process.
        heard: Path of `heard.json`; see `deadline`.
    """
    port, host, probe = 0, "", None
    command, environment = spec.command, dict(spec.environment)
    if isinstance(spec, ServiceResourceSpec):
        host, probe = spec.host, asdict(spec.readiness or Readiness())
        port = spec.port or free_port(spec.host)
        command = [part.replace("{port}", str(port)) for part in command]
        environment = {"PORT": str(port), **environment}
    if grant.environment:
        environment = {**DEVICE_ORDER, **environment}
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name in _INHERITED or name.startswith("LC_")
    }
    return {
        "id": order.id,
        "attempt": order.attempt,
        "category": spec.category,
        "command": command,
        "workdir": spec.workdir,
        "environment": {
            **confinement.environment({**inherited, **environment}, f"{mark}/work"),
            **grant.environment,  # The spec may not override the lease's variables.
            **order.environment,
            marks.WORKLOAD: mark,
        },
        "cpus": grant.cpus,
        "devices": grant.rows,
        "memory_bytes": memory_bytes(spec.mem_limit) if spec.mem_limit else 0,
        "stop_seconds": order.bound_stop(spec.stop_seconds),
        "reset_command": spec.reset_command,
        "group": group,
        "hidden": confinement.hidden,
        "way": confinement.way,
        "log_bytes_max": OUTPUT_BYTES_MAX,
        "port": port,
        "host": host,
        "probe": probe,
        "owner": owner,
        "heard": heard,
    }


def free_port(host: str) -> int:
    """Return a port that is free now at an address of this machine."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as listener:
        listener.bind((host, 0))
        return int(listener.getsockname()[1])
