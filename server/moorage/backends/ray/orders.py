"""Makes the plans for an order on Ray: one for each node of the placement. Makes no call to Ray."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from importlib import resources
from typing import Final

from moorage.backends.base import BackendError, Order, UnsupportedSpecError
from moorage.backends.local.container_plans import LOOPBACK, is_shell, mounts, probe_port
from moorage.backends.ray.specs import RayActorResourceSpec, RayJobResourceSpec
from moorage.backends.spec_fields import memory_bytes
from moorage.backends.specs import (
    BaseResourceSpec,
    ContainerResourceSpec,
    ProcessResourceSpec,
    Readiness,
    ServiceResourceSpec,
    VLLMModelResourceSpec,
)
from moorage.model import GPU_MILLI, Share
from moorage.records.json_values import JsonMapping, JsonObject

NAMESPACE: Final = "moorage"
"""The Ray namespace of all our actors."""
CATEGORIES: Final = frozenset({"process", "service", "vllm", "ray_actor", "job", "container"})
OPTIONS: Final = frozenset({"runtime_env", "max_concurrency", "resources"})
"""Allowed `ray_actor_options`; the lease determines all others."""
OWN_OPTIONS: Final = frozenset(
    {"num_cpus", "num_gpus", "memory", "accelerator_type", "label_selector", "scheduling_strategy"}
)
"""Further `ray_actor_options` that are allowed without a lease."""
IMAGES: Final = frozenset({"image_uri", "container"})
"""Fields of a `runtime_env` that make Ray run a worker in a container image."""
CALLS_MAX: Final = 1000
NODE_PYTHON: Final = "{python}"
"""Placeholder for a command's program: the Python interpreter of Ray on the node."""

Plan = JsonObject
"""A plan for one node, as JSON: by it, `driver` starts the actor, and `node.host` the workload."""


def check(spec: BaseResourceSpec, *, leased: bool = True) -> None:
    """Refuse a spec that could never be started on Ray.

    Args:
        spec: The spec to check.
        leased: Whether the workload gets its resources from a lease; if not, from the spec.

    Raises:
        UnsupportedSpecError: Ray could never start it; the message names the field.
    """
    if spec.category not in CATEGORIES:
        known = ", ".join(sorted(CATEGORIES))
        raise UnsupportedSpecError(f"the backend ray starts {known}, not {spec.category}")
    if spec.category == "job" and not isinstance(spec, RayJobResourceSpec):
        raise UnsupportedSpecError("a job on Ray is a command; jobs with an image need Kubernetes")
    if isinstance(spec, ProcessResourceSpec):
        if not spec.command:
            raise UnsupportedSpecError("command: expected a list of texts, the program first")
        if spec.cpu_count is not None and leased:
            raise UnsupportedSpecError(
                "cpu_count: Ray counts processors and binds nothing to them; ask for cpu_milli in"
                " resources"
            )
        if spec.reset_command:
            raise UnsupportedSpecError("reset_command: the backend ray resets nothing")
    if isinstance(spec, ContainerResourceSpec):
        _check_container(spec, leased=leased)
    if isinstance(spec, RayActorResourceSpec):
        module, dot, name = spec.actor_cls_path.rpartition(".")
        if not (module and dot and name.isidentifier()):
            raise UnsupportedSpecError("actor_cls_path: expected package.module.Class")
        _check_options(spec.ray_actor_options, leased=leased)


def _check_container(spec: ContainerResourceSpec, *, leased: bool) -> None:
    if not isinstance(spec.gpus, int | None):
        raise UnsupportedSpecError("gpus: expected a number; Ray chooses the devices")
    environment = spec.ray_actor_options.get("runtime_env", {})
    if isinstance(environment, dict) and (named := environment.keys() & IMAGES):
        raise UnsupportedSpecError(
            f"ray_actor_options.runtime_env.{min(named)}: expected none: the container engine of"
            " the node runs `image`, and Ray itself runs no image for the engine"
        )
    mounts(spec)
    probe_port(spec)
    _check_options(spec.ray_actor_options, leased=leased)


def _check_options(options: JsonMapping, *, leased: bool) -> None:
    """Refuse wrong actor options, which Ray would refuse only after the lease is granted."""
    allowed = OPTIONS if leased else OPTIONS | OWN_OPTIONS
    for option in options.keys() - allowed:
        known = ", ".join(sorted(allowed))
        reason = f"expected one of {known}; the lease decides all other options"
        raise UnsupportedSpecError(f"ray_actor_options.{option}: {reason}")
    calls = options.get("max_concurrency", 1)
    if isinstance(calls, bool) or not (isinstance(calls, int) and 1 <= calls <= CALLS_MAX):
        reason = f"expected a number from 1 to {CALLS_MAX}"
        raise UnsupportedSpecError(f"ray_actor_options.max_concurrency: {reason}")
    for option in ("resources", "runtime_env"):
        if not isinstance(options.get(option, {}), dict):
            raise UnsupportedSpecError(f"ray_actor_options.{option}: expected an object")
    for name, amount in options.get("resources", {}).items():
        field = f"ray_actor_options.resources.{name}"
        if name in {"CPU", "GPU", "memory", "object_store_memory"}:
            raise UnsupportedSpecError(
                f"{field}: expected nothing: the lease sets it; request it in resources"
            )
        number = isinstance(amount, int | float) and not isinstance(amount, bool)
        if not (number and 0 <= amount < math.inf):
            raise UnsupportedSpecError(f"{field}: expected a number from 0 on")


def plans(order: Order, server: str) -> list[Plan]:
    """Return one plan per node, in the order of the placement; for a job, only the first plan.

    Args:
        order: The order; without a placement, one actor runs on any node that Ray chooses.
        server: The server's id, the first part of its actors' names.

    Raises:
        BackendError: Ray cannot allocate the lease's devices.
    """
    spec = _service(order.spec) if isinstance(order.spec, VLLMModelResourceSpec) else order.spec
    fencing = order.environment.get("MOORAGE_FENCING", "0")
    shares: list[Share | None] = [*order.placement] or [None]
    bundles = _bundles(order.placement) if isinstance(spec, RayJobResourceSpec) else []
    if bundles:
        del shares[1:]
    nodes = [str(each.node_id) for each in order.placement] or [""]
    own: Mapping[str, str] = {}
    if isinstance(spec, ProcessResourceSpec | ContainerResourceSpec):
        own = spec.environment
    found = []
    for index, share in enumerate(shares):
        name = f"{server}/{order.id}/{fencing}/{order.attempt}/{index}"
        environment = {**own, **order.environment, "MOORAGE_RANK": str(index)}
        environment["MOORAGE_WORKLOAD"] = f"{server}/{order.id}"
        if share is not None:
            environment["MOORAGE_NODE_ID"] = share.node_id
        work = _work(spec, share)
        found.append(
            {
                "workload": order.id,
                "attempt": order.attempt,
                "name": name,
                "namespace": NAMESPACE,
                "title": spec.title,
                "node": share.node_id if share else "",
                "gpus": list(share.gpus) if share else None,
                "options": {"num_cpus": 0, "num_gpus": 0} if bundles else _options(share, spec),
                "bundles": bundles,
                "shape": {"actors": len(shares), "nodes": nodes},
                "environment": environment,
                **work,
                "stop_seconds": order.bound_stop(work["stop_seconds"]),
            }
        )
    return found


def _options(share: Share | None, spec: BaseResourceSpec) -> JsonObject:
    """Return the options of an actor, including its share of the lease."""
    given: JsonMapping = {}
    if isinstance(spec, RayActorResourceSpec | ContainerResourceSpec):
        given = spec.ray_actor_options
    options = {name: value for name, value in given.items() if name != "max_concurrency"}
    held: dict[str, float] = {"num_cpus": 0, "num_gpus": 0}
    return {**held, **options, **(_share_amounts(share) if share is not None else _amounts(spec))}


def _amounts(spec: BaseResourceSpec) -> dict[str, float]:
    """Return the resources that the spec asks for, for a workload without a lease."""
    said = {"num_cpus": "cpu_count", "num_gpus": "gpus", "memory": "mem_limit"}
    given = {option: getattr(spec, name, None) for option, name in said.items()}
    if given["memory"]:
        given["memory"] = memory_bytes(given["memory"])
    return {option: amount for option, amount in given.items() if amount is not None}


def _service(spec: VLLMModelResourceSpec) -> ServiceResourceSpec:
    """Return a model as a service that all nodes of the cluster can reach."""
    service = spec.service()
    command = ["0.0.0.0" if each == "127.0.0.1" else each for each in service.command]  # noqa: S104  # All nodes must reach it.
    if spec.python is None:
        command[0] = NODE_PYTHON
    return replace(service, host="0.0.0.0", command=command)  # noqa: S104  # As above.


def _bundles(placement: Sequence[Share]) -> list[Plan]:
    """Return the resources for a job's tasks and actors on each node."""
    found = []
    for share in placement:
        held = _share_amounts(share)
        resources = {"GPU": held["num_gpus"], "CPU": held["num_cpus"]}
        resources["memory"] = held.get("memory", 0)
        resources = {name: amount for name, amount in resources.items() if amount}
        if not resources:
            raise BackendError(
                "a job on Ray may only use the resources of its lease, which has none; request"
                " gpus, cpu_milli or memory_mib in resources"
            )
        found.append({"node": share.node_id, "gpus": list(share.gpus), "resources": resources})
    return found


def _share_amounts(share: Share) -> dict[str, float]:
    """Return a lease's share on one node as Ray's resource options."""
    if share.gpu_milli != GPU_MILLI and len(share.gpus) > 1:
        raise BackendError(
            "a workload on Ray may have a share of one GPU of a node, not of several"
        )
    if wrong := [each for each in share.gpus if not each.isdecimal()]:
        raise BackendError(
            f"GPU {wrong[0]} of node {share.node_id}: Ray knows GPUs by their index; let the"
            " backend register the inventory"
        )
    held: dict[str, float] = {
        "num_gpus": len(share.gpus) * share.gpu_milli / GPU_MILLI,
        "num_cpus": share.cpu_milli / 1000,
    }
    if share.memory_mib:
        held["memory"] = share.memory_mib << 20
    return held


def _work(spec: BaseResourceSpec, share: Share | None) -> JsonObject:
    """Return the part of a plan that says what the actor runs."""
    programs = resources.files("moorage.backends.ray.node")
    work: JsonObject = {
        "actor": None,
        "command": [],
        "workdir": None,
        "memory_bytes": 0,
        "port": None,
        "host": "127.0.0.1",
        "readiness": None,
        "stop_seconds": 0.0,
        "concurrency": 1,
        "warden": programs.joinpath("warden.py").read_text(),
        "site": "",
        "container": None,
    }
    if isinstance(spec, ContainerResourceSpec):
        return {**work, **_container(spec, share)}
    if isinstance(spec, RayActorResourceSpec):
        concurrency = spec.ray_actor_options.get("max_concurrency", 1)
        actor = {
            "cls_path": spec.actor_cls_path,
            "args": spec.init_args,
            "kwargs": spec.init_kwargs,
        }
        return {**work, "actor": actor, "concurrency": concurrency}
    assert isinstance(spec, ProcessResourceSpec)
    if isinstance(spec, RayJobResourceSpec):
        work["site"] = programs.joinpath("job_site.py").read_text()
    work |= {
        "command": spec.command,
        "workdir": spec.workdir,
        "memory_bytes": memory_bytes(spec.mem_limit) if spec.mem_limit else 0,
        "stop_seconds": spec.stop_seconds,
    }
    if isinstance(spec, ServiceResourceSpec):
        probe = asdict(spec.readiness or Readiness())
        work |= {"port": spec.port, "host": spec.host, "readiness": probe}
    return work


def _container(spec: ContainerResourceSpec, share: Share | None) -> JsonObject:
    """Return the description of a container, from its spec and its lease, as JSON."""
    cpus = spec.cpu_count or (share.cpu_milli / 1000 if share else 0)
    size = (
        memory_bytes(spec.mem_limit) if spec.mem_limit else (share.memory_mib << 20 if share else 0)
    )
    port = probe_port(spec)
    readiness = asdict(spec.readiness or Readiness()) | {"asked": spec.readiness is not None}
    wanted = [each for each in (spec.container_port, port) if each is not None]
    return {
        "container": {
            "image": spec.title,
            "command": spec.command or [],
            "stdin": spec.command is None or is_shell(spec.command),
            "cpus": cpus,
            "memory_bytes": size,
            "ports": {str(each): spec.ports.get(each, 0) for each in (*wanted, *spec.ports)},
            "container_port": spec.container_port,
            "mounts": mounts(spec),
        },
        "host": spec.host_ip or LOOPBACK,
        "readiness": readiness | ({"port": port} if spec.readiness else {}),
        "stop_seconds": spec.stop_seconds,
    }
