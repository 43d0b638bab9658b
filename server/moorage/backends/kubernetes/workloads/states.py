"""Derives the phase of a workload from the states of its pods. No I/O."""

import enum
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import msgspec

from moorage.backends.base import Phase, WorkloadReport, exit_code
from moorage.backends.kubernetes.workloads import manifests
from moorage.records.json_values import JsonObject

_HOPELESS: Final = frozenset(
    {
        "ImagePullBackOff",
        "ErrImageNeverPull",
        "InvalidImageName",
        "CreateContainerConfigError",
        "CreateContainerError",
        "RunContainerError",
    }
)
"""Reasons of a waiting container that count as a failure; a first failed pull is retried."""
_IMAGE: Final = frozenset(
    {"ErrImagePull", "ImagePullBackOff", "ErrImageNeverPull", "InvalidImageName"}
)


class _Read(msgspec.Struct, frozen=True, rename="camel"):
    """The base of all objects of this module; absent fields get their default."""


class _Owner(_Read, frozen=True):
    kind: str = ""
    name: str = ""


class _Meta(_Read, frozen=True):
    name: str = ""
    namespace: str = ""
    uid: str = ""
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None
    owner_references: list[_Owner] | None = None
    deletion_timestamp: str = ""


class _Condition(_Read, frozen=True):
    type: str = ""
    status: str = ""
    reason: str = ""
    message: str = ""


class _Waiting(_Read, frozen=True):
    reason: str = ""
    message: str = ""


class _Terminated(_Read, frozen=True):
    exit_code: int = 0
    reason: str = ""
    message: str = ""


class _ContainerState(_Read, frozen=True):
    waiting: _Waiting | None = None
    terminated: _Terminated | None = None


class _Container(_Read, frozen=True):
    name: str = ""
    state: _ContainerState = _ContainerState()
    last_state: _ContainerState = _ContainerState()


class _PodStatus(_Read, frozen=True):
    phase: str = ""
    reason: str = ""
    message: str = ""
    conditions: list[_Condition] | None = None
    container_statuses: list[_Container] | None = None
    init_container_statuses: list[_Container] | None = None


class _PodClaim(_Read, frozen=True):
    resource_claim_name: str = ""


class _PodSpec(_Read, frozen=True):
    node_name: str = ""
    termination_grace_period_seconds: int = 30
    resource_claims: list[_PodClaim] | None = None


class _Pod(_Read, frozen=True):
    metadata: _Meta = _Meta()
    spec: _PodSpec = _PodSpec()
    status: _PodStatus = _PodStatus()


class _NodeStatus(_Read, frozen=True):
    conditions: list[_Condition] | None = None


class _Node(_Read, frozen=True):
    metadata: _Meta = _Meta()
    status: _NodeStatus = _NodeStatus()


_POD: Final = msgspec.json.Decoder(_Pod)
_NODE: Final = msgspec.json.Decoder(_Node)


@dataclass(frozen=True, slots=True)
class PodState:
    """A pod of this server, as the API server last reported it.

    Args:
        workload: Name of its workload.
        start: The name that all objects of its start share.
        uid: Kubernetes' unique id of the pod.
        job: The Job that created it; empty: none.
        size: Number of pods of the workload.
        attempt: Number of the start.
        endpoint: Address of the workload once it is ready.
        probed: Whether it has a readiness check.
        node: The node that it is bound to; empty: not bound yet.
        stop_seconds: The pod's seconds between SIGTERM and SIGKILL.
        claims: Names of the claims that the pod needs.
        phase: The pod's phase in Kubernetes.
        ready: Whether its readiness check succeeds.
        deleted: Whether its deletion was ordered.
        unschedulable: The scheduler's reason why the pod has no node; empty: no reason reported.
        waiting: Why a container has not started yet: reason and message.
        ended: Exit code, reason and message of an ended container; None: none ended.
        reason: Why Kubernetes failed the pod: reason and message.
        disruption: Why Kubernetes removed the pod; empty: Kubernetes did not remove it.
    """

    workload: str
    start: str
    name: str
    namespace: str
    uid: str
    job: str
    size: int
    attempt: int
    endpoint: str
    probed: bool
    node: str
    stop_seconds: int
    claims: tuple[str, ...]
    phase: str
    ready: bool
    deleted: bool
    unschedulable: str
    waiting: tuple[str, str]
    ended: tuple[int, str, str] | None
    reason: tuple[str, str]
    disruption: str

    @property
    def over(self) -> bool:
        """Whether all containers of the pod have ended."""
        return self.phase in {"Succeeded", "Failed"}


@dataclass(frozen=True, slots=True)
class ClaimState:
    """A claim of this server, its workload, and its allocated devices in order."""

    workload: str
    name: str
    namespace: str
    devices: tuple[tuple[str, str, str], ...]


class Trouble(enum.Enum):
    """Kinds of reasons why a workload does not become ready."""

    NONE = enum.auto()
    UNSCHEDULABLE = enum.auto()
    """The scheduler finds no node now; it may find one soon."""
    SILENCE = enum.auto()
    """Kubernetes has reported nothing about the workload."""
    HOPELESS = enum.auto()
    """The fault stays however long the start waits."""


@dataclass(frozen=True, slots=True)
class WorkloadView:
    """The joint state of all pods of a workload."""

    report: WorkloadReport
    trouble: Trouble = Trouble.NONE


def pod_state(raw: msgspec.Raw) -> PodState | None:
    """Return the record of a pod; None if this server did not make the pod."""
    pod = _POD.decode(raw)
    meta, status = pod.metadata, pod.status
    notes, labels = meta.annotations or {}, meta.labels or {}
    workload = notes.get(manifests.WORKLOAD)
    size, attempt = notes.get(manifests.SIZE, "1"), notes.get(manifests.ATTEMPT, "1")
    if not workload or not (size.isdecimal() and attempt.isdecimal()):
        return None  # Another client may have copied our label.
    said = {each.type: each for each in status.conditions or ()}
    scheduled, ready = said.get("PodScheduled", _Condition()), said.get("Ready", _Condition())
    taken = said.get("DisruptionTarget", _Condition())
    owners = [each.name for each in meta.owner_references or () if each.kind == "Job"]
    containers = [*(status.init_container_statuses or ()), *(status.container_statuses or ())]
    waiting = next((each.state.waiting for each in containers if each.state.waiting), _Waiting())
    return PodState(
        workload=workload,
        start=labels.get(manifests.START, ""),
        name=meta.name,
        namespace=meta.namespace,
        uid=meta.uid,
        job=owners[0] if owners else "",
        size=int(size),
        attempt=int(attempt),
        endpoint=notes.get(manifests.ENDPOINT, ""),
        probed=manifests.PROBED in notes,
        node=pod.spec.node_name,
        stop_seconds=pod.spec.termination_grace_period_seconds,
        claims=tuple(each.resource_claim_name for each in pod.spec.resource_claims or ()),
        phase=status.phase,
        ready=ready.status == "True",
        deleted=bool(meta.deletion_timestamp),
        unschedulable=scheduled.message or scheduled.reason if scheduled.status == "False" else "",
        waiting=(waiting.reason, waiting.message),
        ended=_decisive_end(containers),
        reason=(status.reason, status.message),
        disruption=f"{taken.reason}: {taken.message}" if taken.status == "True" else "",
    )


def _decisive_end(containers: Collection[_Container]) -> tuple[int, str, str] | None:
    """Return how a pod's first failed container ended; if none failed, how the last one ended."""
    ends = [
        (end.exit_code, end.reason, end.message)
        for each in containers
        if (end := each.state.terminated or each.last_state.terminated) is not None
    ]
    return next((each for each in ends if each[0]), ends[-1] if ends else None)


def claim_state(raw: msgspec.Raw) -> ClaimState | None:
    """Return the record of a claim; None if this server did not make the claim."""
    claim: JsonObject = msgspec.json.decode(raw)
    meta = claim["metadata"]
    workload = meta.get("annotations", {}).get(manifests.WORKLOAD)
    if not workload:
        return None
    allocation = claim.get("status", {}).get("allocation", {}).get("devices", {})
    found = allocation.get("results") or ()
    devices = tuple((each["driver"], each["pool"], each["device"]) for each in found)
    return ClaimState(workload, meta["name"], meta["namespace"], devices)


class NodeTrouble(NamedTuple):
    """Why a node is not ready.

    Args:
        why: Kubernetes' message; empty: the node is ready.
        silent: Whether its kubelet no longer reports.
    """

    why: str
    silent: bool


def node_trouble(raw: msgspec.Raw) -> NodeTrouble:
    """Return why a node is not ready, from its conditions."""
    conditions = _NODE.decode(raw).status.conditions or ()
    ready = next((each for each in conditions if each.type == "Ready"), None)
    if ready is None or ready.status == "True":
        return NodeTrouble("", silent=False)
    return NodeTrouble(ready.message or ready.reason, silent=ready.status == "Unknown")


def view(
    workload: str, pods: Sequence[PodState], nodes: Mapping[str, NodeTrouble], listed: bool
) -> WorkloadView | None:
    """Return the joint state of a workload's pods; None without pods.

    Args:
        workload: The workload's name.
        pods: The pods of one start, in the order of their names.
        nodes: The trouble of each node, by `/name`.
        listed: Whether `nodes` has all nodes of the cluster.
    """
    if not pods:
        return None
    each = [_view(pod, nodes, listed) for pod in pods]
    for seen in each:
        if seen.report.phase is Phase.FAILED:
            return seen
    missing = pods[0].size - len(pods)
    if missing > 0:
        said = f"{len(pods)} of its {pods[0].size} pods are there"
        return WorkloadView(WorkloadReport(workload, Phase.STARTING, detail=said), Trouble.SILENCE)
    order = [Phase.PENDING, Phase.PULLING, Phase.STARTING, Phase.READY, Phase.SUCCEEDED]
    # One pod of a gang has the actual reason; the others only report that the gang is incomplete.
    whys = [2 if not pod.unschedulable else "minCount" in pod.unschedulable for pod in pods]
    ranks = [(order.index(x.report.phase), why) for x, why in zip(each, whys, strict=True)]
    return each[ranks.index(min(ranks))]


def _view(pod: PodState, nodes: Mapping[str, NodeTrouble], listed: bool) -> WorkloadView:
    def view(phase: Phase, detail: str, trouble: Trouble = Trouble.NONE) -> WorkloadView:
        return WorkloadView(WorkloadReport(pod.workload, phase, detail=detail), trouble)

    title = f"pod {pod.namespace}/{pod.name}"
    if pod.over:
        return WorkloadView(_over(pod, title))
    if pod.deleted:
        why = pod.disruption or "another client deleted it at the API server"
        return view(Phase.FAILED, f"{title} on {pod.node or 'no node'} was taken away: {why}")
    trouble = nodes.get(f"/{pod.node}")
    if pod.node and (trouble.why if trouble else listed):
        # A gang fails with any of its pods. But a kubelet that reports why its node is not ready
        # may be ready again soon.
        broken = pod.size > 1 and (trouble is None or trouble.silent)
        detail = f"{title}: its node {pod.node} {_node_fate(trouble)}"
        return view(Phase.FAILED if broken else Phase.STARTING, detail)
    if pod.phase == "Running":
        if pod.ready:
            report = WorkloadReport(
                pod.workload, Phase.READY, pod.endpoint, f"{title} on {pod.node}"
            )
            return WorkloadView(report)
        return view(Phase.STARTING, f"{title} runs on {pod.node}, and is not ready yet")
    reason, message = pod.waiting
    if reason in _HOPELESS:
        return view(Phase.STARTING, _why_stuck(title, reason, message), Trouble.HOPELESS)
    if pod.node:
        why = f": {reason} {message}".rstrip() if reason else ""
        return view(Phase.PULLING, f"{title} is being prepared on {pod.node}{why}")
    if pod.unschedulable:
        detail = f"the scheduler cannot place {title}: {pod.unschedulable}"
        return view(Phase.PENDING, f"{detail}; {_advice(pod)}", Trouble.UNSCHEDULABLE)
    return view(Phase.PENDING, f"{title} waits for the scheduler", Trouble.SILENCE)


def _node_fate(trouble: NodeTrouble | None) -> str:
    """Return the end of a message about a lost node; None for `trouble`: the node was deleted."""
    if trouble is None:
        return "was deleted; Kubernetes ends its pods in about a minute"
    advice = "bring it back, or delete the Node: until then the pod may still be running there"
    return f"is lost ({trouble.why}): {advice}"


def _why_stuck(title: str, reason: str, message: str) -> str:
    said = f"{title} cannot start: {reason}{': ' if message else ''}{message}"
    if reason in _IMAGE:
        return f"{said}; check the image's name, and imagePullSecrets in `manifest`"
    return f"{said}; check command, environment and `manifest` of its spec"


def _advice(pod: PodState) -> str:
    said = pod.unschedulable
    if "were unschedulable" in said or "untolerated taint" in said:
        return "the node of the lease is cordoned or tainted"
    if "claim" in said or "device" in said:
        return "another claim has its devices: see `kubectl get resourceclaims -A`"
    if "Insufficient" in said:
        return "the node has less free than the spec requests, or other pods hold the resources"
    return "see `kubectl describe pod`"


def _over(pod: PodState, title: str) -> WorkloadReport:
    code, reason, message = pod.ended or (None, "", "")
    if pod.phase == "Succeeded":
        return WorkloadReport(pod.workload, Phase.SUCCEEDED, detail=f"{title} ended", exit_code=0)
    code = exit_code(code) if code is not None else None
    why, said = pod.reason
    where = f"{title} on {pod.node}"
    if pod.disruption:
        detail = f"{where} was taken away: {pod.disruption}"
    elif why == "Evicted":
        advice = "request more memory in resources, or remove other pods from the node"
        detail = f"{where} was evicted: {said.rstrip('.')}: {advice}"
    elif reason == "OOMKilled":
        detail = f"{where} used more memory than it may: ask for more memory_mib, or mem_limit"
    elif why:
        detail = f"{where} failed: {why}{': ' if said else ''}{said}"
    elif code is None:
        detail = f"{where} failed, and Kubernetes does not say why"
    elif code < 0:
        detail = f"{where} was killed by signal {-code}"
    else:
        detail = f"{where} ended by itself with exit status {code}"
        if reason not in {"Error", ""} or message:
            detail += f" ({reason}{': ' if message else ''}{message})"
    return WorkloadReport(pod.workload, Phase.FAILED, detail=detail, exit_code=code)
