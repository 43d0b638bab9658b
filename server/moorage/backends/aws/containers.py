"""Makes specs of instances that run a container: cloud-init installs and starts Docker. No I/O."""

import dataclasses
import shlex
from typing import Final

from moorage.backends.aws.specs import InstanceResourceSpec
from moorage.backends.base import UnsupportedSpecError
from moorage.backends.local.container_plans import is_shell
from moorage.backends.spec_fields import memory_bytes
from moorage.backends.specs import ContainerResourceSpec, SpecError
from moorage.records.json_values import JsonObject

NAME: Final = "moorage"
"""The container's name on its instance."""
_OURS: Final = frozenset(
    {"category", "user_data", "cpu_count", "mem_limit", "gpus", "readiness_port"}
)
"""Fields of the instance that are set from the container's spec."""
_SCRIPT: Final = """#!/bin/sh
command -v docker || dnf install -y docker || (apt-get update && apt-get install -y docker.io)
systemctl enable --now docker
docker run --detach --name {name} {options} -- {image} {command}
"""


def instance_of(spec: ContainerResourceSpec) -> InstanceResourceSpec:
    """Return the spec of the instance that runs a container; its `extra` may set other fields.

    Raises:
        UnsupportedSpecError: A field has no meaning on an instance; the message names it.
    """
    if spec.mount:
        raise UnsupportedSpecError(
            "mount: expected nothing: the instance is new and has no files to mount"
        )
    if spec.gpus is not None and not isinstance(spec.gpus, int):
        raise UnsupportedSpecError(
            "gpus: expected a number: the container gets all GPUs of the instance"
        )
    probe = spec.readiness
    if probe is not None and (probe.path is not None or probe.command is not None):
        raise UnsupportedSpecError(
            "readiness: expected a port: AWS only supports readiness by port"
        )
    known = {each.name for each in dataclasses.fields(InstanceResourceSpec)} - _OURS
    for name in spec.extra.keys() - known:
        listed = ", ".join(sorted(known))
        raise UnsupportedSpecError(f"extra.{name}: expected one of {listed}")
    wanted = {each for each in (spec.container_port, probe and probe.port) if each}
    ports = {each: spec.ports.get(each) or each for each in (*sorted(wanted), *spec.ports)}
    port = (probe.port or spec.container_port) if probe is not None else None
    made: JsonObject = {
        "user_data": _script(spec, ports),
        "cpu_count": spec.cpu_count,
        "mem_limit": spec.mem_limit,
        "gpus": spec.gpus or 0,
        "readiness_port": ports.get(port) if port else None,
        "max_global_num": spec.max_global_num,
    }
    if spec.start_timeout is not None:
        made["start_timeout"] = spec.start_timeout
    try:
        return InstanceResourceSpec(**{**spec.extra, **made})
    except SpecError as error:
        raise UnsupportedSpecError(f"extra.{error}") from error


def _script(spec: ContainerResourceSpec, ports: dict[int, int]) -> str:
    shell = spec.command is None or is_shell(spec.command)
    options = ["--interactive"] if shell else []
    for key, text in spec.environment.items():
        options += ["--env", f"{key}={text}"]
    for inside, outside in ports.items():
        options += ["--publish", f"{spec.host_ip or '0.0.0.0'}:{outside}:{inside}"]  # noqa: S104  # Security groups limit access.
    if spec.cpu_count is not None:
        options += ["--cpus", f"{spec.cpu_count:g}"]
    if spec.mem_limit is not None:
        options += ["--memory", str(memory_bytes(spec.mem_limit))]
    if spec.gpus:
        options += ["--gpus", "all"]
    return _SCRIPT.format(
        name=NAME,
        options=shlex.join(options),
        image=shlex.quote(spec.title),
        command=shlex.join(spec.command or []),
    )
