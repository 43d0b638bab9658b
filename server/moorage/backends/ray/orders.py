"""What an order means on Ray: one plan for each node of the placement. Nothing is asked of Ray."""

import math
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any, Final

from moorage.backends.base import BackendError, Order, UnsupportedSpecError
from moorage.backends.ray.specs import RayActorResourceSpec, RayJobResourceSpec
from moorage.backends.specs import (
    BaseResourceSpec,
    ProcessResourceSpec,
    Readiness,
    ServiceResourceSpec,
    VLLMModelResourceSpec,
    memory_bytes,
)
from moorage.model import GPU_MILLI, Share

__all__ = ["CATEGORIES", "NAMESPACE", "Plan", "check", "plans"]

NAMESPACE: Final = "moorage"
"""Of Ray, that all actors are in."""
CATEGORIES: Final = frozenset({"process", "service", "vllm", "ray_actor", "job"})
OPTIONS: Final = frozenset({"runtime_env", "max_concurrency", "resources"})
"""Of `ray_actor_options`; the others say what the lease says."""
CALLS_MAX: Final = 1000

Plan = dict[str, Any]
"""What runs on one node, as JSON: `driver` starts the actor by it, `node.host` the workload."""


def check(spec: BaseResourceSpec) -> None:
    """Refuse what could never be started on Ray.

    Raises:
        UnsupportedSpecError: It names the field.

    """
    if spec.category not in CATEGORIES:
        known = ", ".join(sorted(CATEGORIES))
        raise UnsupportedSpecError(f"the backend ray starts {known}, not {spec.category}")
    if spec.category == "job" and not isinstance(spec, RayJobResourceSpec):
        raise UnsupportedSpecError("a job on Ray is a command; jobs with an image need Kubernetes")
    if isinstance(spec, ProcessResourceSpec):
        if not spec.command:
            raise UnsupportedSpecError("command: expected a list of texts, the program first")
        if spec.cpu_count is not None:
            reason = "Ray counts processors and binds nothing to them; ask for cpu_milli"
            raise UnsupportedSpecError(f"cpu_count: {reason} in resources")
        if spec.reset_command:
            raise UnsupportedSpecError("reset_command: the backend ray resets nothing")
    if isinstance(spec, RayActorResourceSpec):
        module, dot, name = spec.actor_cls_path.rpartition(".")
        if not (module and dot and name.isidentifier()):
            raise UnsupportedSpecError("actor_cls_path: expected package.module.Class")
        _check_options(spec.ray_actor_options)


def _check_options(options: Mapping[str, Any]) -> None:
    """Refuse what Ray would only refuse once the lease is granted."""
    for option in options.keys() - OPTIONS:
        known = ", ".join(sorted(OPTIONS))
        reason = f"expected one of {known}; the lease says all else"
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
            raise UnsupportedSpecError(f"{field}: the lease says it; ask for it in resources")
        number = isinstance(amount, int | float) and not isinstance(amount, bool)
        if not (number and 0 <= amount < math.inf):
            raise UnsupportedSpecError(f"{field}: expected a number from 0 on")


def plans(order: Order, server: str) -> list[Plan]:
    """Return what runs on each node, in the order of the placement; a job runs on the first.

    Args:
        order: What shall run; without a placement it is one actor wherever Ray puts it.
        server: Part of the names of its actors.

    Raises:
        BackendError: The lease holds what Ray cannot give.

    """
    spec = order.spec.service() if isinstance(order.spec, VLLMModelResourceSpec) else order.spec
    fencing = order.environment.get("MOORAGE_FENCING", "0")
    shares: list[Share | None] = [*order.placement] or [None]
    bundles = _bundles(order.placement) if isinstance(spec, RayJobResourceSpec) else []
    if bundles:
        del shares[1:]
    nodes = [str(each.node_id) for each in order.placement] or [""]
    own = spec.environment if isinstance(spec, ProcessResourceSpec) else {}
    found = []
    for index, share in enumerate(shares):
        name = f"{server}/{order.id}/{fencing}/{order.attempt}/{index}"
        environment = {**own, **order.environment, "MOORAGE_RANK": str(index)}
        environment["MOORAGE_WORKLOAD"] = f"{server}/{order.id}"
        if share is not None:
            environment["MOORAGE_NODE_ID"] = share.node_id
        found.append(
            {
                "workload": order.id,
                "attempt": order.attempt,
                "name": name,
                "namespace": NAMESPACE,
                "title": spec.title,
                "node": share.node_id if share else "",
                "gpus": list(share.gpus) if share else [],
                "options": {"num_cpus": 0, "num_gpus": 0} if bundles else _options(share, spec),
                "bundles": bundles,
                "shape": {"actors": len(shares), "nodes": nodes},
                "environment": environment,
                **_work(spec),
            }
        )
    return found


def _options(share: Share | None, spec: BaseResourceSpec) -> dict[str, Any]:
    """Return what Ray holds for the actor."""
    given: Mapping[str, Any] = {}
    if isinstance(spec, RayActorResourceSpec):
        given = {name: spec.ray_actor_options[name] for name in spec.ray_actor_options}
    kept = {name: value for name, value in given.items() if name != "max_concurrency"}
    held: dict[str, float] = {"num_cpus": 0, "num_gpus": 0}
    return {**kept, **held, **(_held(share) if share is not None else {})}


def _bundles(placement: Sequence[Share]) -> list[Plan]:
    """Return what the tasks and actors of a job may use on each node."""
    found = []
    for share in placement:
        held = _held(share)
        resources = {"GPU": held["num_gpus"], "CPU": held["num_cpus"]}
        resources["memory"] = held.get("memory", 0)
        resources = {name: amount for name, amount in resources.items() if amount}
        if not resources:
            reason = "a job on Ray may use what its lease holds, and that is nothing"
            raise BackendError(f"{reason}; ask for gpus, cpu_milli or memory_mib in resources")
        found.append({"node": share.node_id, "gpus": list(share.gpus), "resources": resources})
    return found


def _held(share: Share) -> dict[str, float]:
    """Return what a share is, as Ray says it."""
    if share.gpu_milli != GPU_MILLI and len(share.gpus) > 1:
        raise BackendError("Ray shares one GPU of a node with a workload, not several")
    if wrong := [each for each in share.gpus if not each.isdecimal()]:
        reason = "Ray knows GPUs by their index; have its inventory kept by the backend"
        raise BackendError(f"GPU {wrong[0]} of node {share.node_id}: {reason}")
    held: dict[str, float] = {
        "num_gpus": len(share.gpus) * share.gpu_milli / GPU_MILLI,
        "num_cpus": share.cpu_milli / 1000,
    }
    if share.memory_mib:
        held["memory"] = share.memory_mib << 20
    return held


def _work(spec: BaseResourceSpec) -> dict[str, Any]:
    """Return what the actor does."""
    programs = resources.files("moorage.backends.ray.node")
    work: dict[str, Any] = {
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
    }
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
        probe = spec.readiness or Readiness()
        work |= {
            "port": spec.port,
            "host": spec.host,
            "readiness": {
                "path": probe.path,
                "port": probe.port,
                "command": probe.command,
                "every_seconds": probe.every_seconds,
                "timeout_seconds": probe.timeout_seconds,
            },
        }
    return work
